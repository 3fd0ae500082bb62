"""Calls of tools that are written as JSON: Hermes and Qwen, Llama, Mistral, and bare.

In: the text of a reply, and the schemas of the tools, which these formats do without. Out: its
pieces, text and calls, in their order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlsys.common.safe_json import dump_json
from rlsys.environments.tools.tool_call import Piece, Written

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

# A reply of braces only must not be read from each of them.
MAX_ATTEMPTS = 64


def hermes(text: str, tools: Schemas) -> Iterator[Piece]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3. The last
    may lack its closing tag, where the reply stopped at it.
    """
    at = 0
    while (start := text.find("<tool_call>", at)) >= 0:
        yield text[at:start]
        inside = start + len("<tool_call>")
        call, at = _json_call(text, inside)
        closed = CLOSED.match(text, at)
        if closed:
            at = closed.end()
        elif text[at:].strip():  # no JSON, or more than that before the closing tag
            end = text.find("</tool_call>", at)
            body = text[inside : end if end >= 0 else len(text)]
            at = end + len("</tool_call>") if end >= 0 else len(text)
            error = call.error or "one JSON object stands between the tags, and nothing else"
            call = Written(call.name, error=error, text=body)
        yield call
    yield text[at:]


def llama3(text: str, tools: Schemas) -> Iterator[Piece]:
    """`{"name": ..., "parameters": {...}}`, several of them divided by ";", behind
    `<|python_tag|>` or not: Llama 3.1 to 3.3.
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
            yield Written(error=error, text=rest[at:])
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
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or since their tokenizer's version 11
    `[TOOL_CALLS]name[ARGS]{...}` for each call.
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
            yield Written(named[1] if named else "", error=error, text=text[at:end])
        elif named:
            yield Written(named[1], value, id=_id(named[2]))
        else:
            yield from map(_written, value if isinstance(value, list) else [value])
        at = end
    yield text[at:]


def plain_json(text: str, tools: Schemas) -> Iterator[Piece]:
    """`{"name": ..., "arguments": {...}}` anywhere in the text, or a list of these."""
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
            yield Written(error=error, text=text[brace:])
            return
        else:
            begin = brace + 1
    yield text[at:]


def _looks_like_a_call(value: Any) -> bool:
    given = isinstance(value, dict) and ("arguments" in value or "parameters" in value)
    return given and isinstance(value.get("name"), str)


def _json(text: str, at: int) -> tuple[Any, int, str]:
    """(value, where it ends, "") of the JSON at a place, or (None, that place, what is wrong)."""
    begin = _after_space(text, at)
    try:
        value, end = DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        return None, at, f"no JSON, {error.msg} at character {error.pos - begin}"
    except RecursionError:
        return None, at, "its JSON is nested too deeply"
    except ValueError as error:  # a number of thousands of digits
        return None, at, f"no JSON, {error}"
    return value, end, ""


def _json_call(text: str, at: int) -> tuple[Written, int]:
    value, end, error = _json(text, at)
    if error:
        return Written(error=error, text=text[at:]), at
    return _written(value), end


def _after_space(text: str, at: int) -> int:
    space = SPACE.match(text, at)
    return space.end() if space else at


def _written(value: Any) -> Written:
    """A call from {"name": ..., "arguments" or "parameters": ...}; OpenAI's shape is taken too."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {"id": value.get("id"), **value["function"]}
    if not isinstance(value, dict):
        return Written(error='a call is an object, {"name": ...}', text=dump_json(value))
    name, id = value.get("name"), value.get("id")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a string
        arguments, _, _ = _json(arguments, 0)
    return Written(
        name if isinstance(name, str) else "",
        {} if arguments is None and "arguments" not in value else arguments,
        text=dump_json(value, ensure_ascii=False),
        id=_id(id),
    )


def _id(given: object) -> str:
    """The model's own, where it is one that templates take."""
    is_one = isinstance(given, str) and re.fullmatch(r"[A-Za-z0-9]{9}", given)
    return str(given) if is_one else ""
