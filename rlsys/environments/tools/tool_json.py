"""Parsers of tool calls in JSON: Hermes and Qwen, Llama, Mistral, and bare JSON.

In: the text of a reply, and the schemas of the tools, which these formats do not need. Out: texts
and calls, in their order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlsys.common.safe_json import dump_json
from rlsys.environments.tools.tool_call import Piece, RawCall

Schemas = Sequence[Mapping[str, Any]]

DECODER = json.JSONDecoder()
SPACE = re.compile(r"\s*")

CLOSED = re.compile(r"\s*</tool_call>")
TOOL_CALLS = "[TOOL_CALLS]"
MISTRAL_NAME = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?")
NAME_FIRST = re.compile(r'\{\s*"name"\s*:')
LIST_OPENS = re.compile(r"[\[;,]\s*\Z")
LIST_CLOSES = re.compile(r"\s*[\];]")
SEMICOLON = re.compile(r"\s*;")

# Limit of attempts to parse JSON, so that a reply of many braces takes linear time.
MAX_ATTEMPTS = 64


def hermes(text: str, tools: Schemas) -> Iterator[Piece]:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3.

    The closing tag of the last call may be missing.
    """
    at = 0
    while (start := text.find("<tool_call>", at)) >= 0:
        yield text[at:start]
        inside = start + len("<tool_call>")
        call, at = _json_call(text, inside)
        closed = CLOSED.match(text, at)
        if closed:
            at = closed.end()
        elif text[at:].strip():  # invalid JSON, or other text before the closing tag
            end = text.find("</tool_call>", at)
            body = text[inside : end if end >= 0 else len(text)]
            at = end + len("</tool_call>") if end >= 0 else len(text)
            error = call.error or "there must be exactly one JSON object between the tags"
            call = RawCall(call.name, error=error, text=body)
        yield call
    yield text[at:]


def llama3(text: str, tools: Schemas) -> Iterator[Piece]:
    """Parse `{"name": ..., "parameters": {...}}`, separated by ";": Llama 3.1 to 3.3.

    `<|python_tag|>` may precede the calls.
    """
    before, tag, rest = text.partition("<|python_tag|>")
    if not tag or _is_within_json(text, len(before)):
        yield from plain_json(text, tools)
        return
    yield before
    at = 0
    while (at := _after_space(rest, at)) < len(rest):
        value, end, error = _json(rest, at)
        if error:
            yield RawCall(error=error, text=rest[at:])
            return
        yield _written(value)
        between = SEMICOLON.match(rest, end)
        at = between.end() if between else end
        if not between and not rest.startswith("{", _after_space(rest, at)):
            yield rest[at:]
            return


def _is_within_json(text: str, place: int) -> bool:
    begin = 0
    for _ in range(MAX_ATTEMPTS):
        begin = text.find("{", begin, place)
        if begin < 0:
            return False
        _, end, error = _json(text, begin)
        if end > place:
            return True
        begin = begin + 1 if error else end
    return False


def mistral(text: str, tools: Schemas) -> Iterator[Piece]:
    """Parse `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` of Mistral's models.

    Since version 11 of their tokenizer it is `[TOOL_CALLS]name[ARGS]{...}` for each call.
    """
    at = 0
    while (start := text.find(TOOL_CALLS, at)) >= 0:
        yield text[at:start]
        at = start + len(TOOL_CALLS)
        named = MISTRAL_NAME.match(text, at)
        value, end, error = _json(text, named.end() if named else at)
        if error:
            end = text.find(TOOL_CALLS, at)
            end = end if end >= 0 else len(text)
            yield RawCall(named[1] if named else "", error=error, text=text[at:end])
        elif named:
            yield RawCall(named[1], value, id=_id(named[2]))
        else:
            yield from map(_written, value if isinstance(value, list) else [value])
        at = end
    yield text[at:]


def plain_json(text: str, tools: Schemas) -> Iterator[Piece]:
    """Parse `{"name": ..., "arguments": {...}}` anywhere in the text, or a list of these."""
    at = begin = 0
    for _ in range(MAX_ATTEMPTS):
        brace = text.find("{", begin)
        if brace < 0:
            break
        value, end, error = _json(text, brace)
        if not error and _looks_like_a_call(value):
            yield LIST_OPENS.sub("", text[at:brace])
            yield _written(value)
            closing = LIST_CLOSES.match(text, end)
            at = begin = closing.end() if closing else end
        elif not error:
            begin = end
        elif NAME_FIRST.match(text, brace):
            yield text[at:brace]
            yield RawCall(error=error, text=text[brace:])
            return
        else:
            begin = brace + 1
    yield text[at:]


def _looks_like_a_call(value: Any) -> bool:
    has_arguments = isinstance(value, dict) and ("arguments" in value or "parameters" in value)
    return has_arguments and isinstance(value.get("name"), str)


def _json(text: str, at: int) -> tuple[Any, int, str]:
    """Parse the JSON at an index; return (value, end, "") or (None, index, error)."""
    begin = _after_space(text, at)
    try:
        value, end = DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        return None, at, f"invalid JSON, {error.msg} at character {error.pos - begin}"
    except RecursionError:
        return None, at, "its JSON is nested too deeply"
    except ValueError as error:  # a number of thousands of digits
        return None, at, f"invalid JSON, {error}"
    return value, end, ""


def _json_call(text: str, at: int) -> tuple[RawCall, int]:
    value, end, error = _json(text, at)
    if error:
        return RawCall(error=error, text=text[at:]), at
    return _written(value), end


def _after_space(text: str, at: int) -> int:
    space = SPACE.match(text, at)
    return space.end() if space else at


def _written(value: Any) -> RawCall:
    """Return a call from {"name": ..., "arguments" or "parameters": ...} or OpenAI's format."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {"id": value.get("id"), **value["function"]}
    if not isinstance(value, dict):
        return RawCall(error='a call must be an object, {"name": ...}', text=dump_json(value))
    name, id = value.get("name"), value.get("id")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a string
        arguments, _, _ = _json(arguments, 0)
    return RawCall(
        name if isinstance(name, str) else "",
        {} if arguments is None and "arguments" not in value else arguments,
        text=dump_json(value, ensure_ascii=False),
        id=_id(id),
    )


def _id(id: object) -> str:
    """Return the model's id of a call if templates accept it, else ""."""
    is_valid = isinstance(id, str) and re.fullmatch(r"[A-Za-z0-9]{9}", id)
    return str(id) if is_valid else ""
