"""Parser of tool calls in XML with bare values: Qwen3-Coder and later Qwen models.

In: the text of a reply and the schemas of the tools. If a parameter is a string, its value is the
bare text, otherwise JSON. Out: texts and calls, in their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlsys.common.safe_json import parse_json
from rlsys.environments.tools.tool_call import Piece, RawCall

FUNCTION = "<function="
HEAD = re.compile(r"<function=\s*([^<>\s]+)\s*>")
END = re.compile(r"</function>\s*(?:</tool_call>|(?=<function=|<tool_call>)|\Z)")
OPENED = re.compile(r"<tool_call>\s*\Z")

# Values may contain these tags. A value ends at the next parameter or at the end of the text.
PARAMETER = re.compile(
    r"\s*<parameter=([^<>]+)>\n?(.*?)\n?(?:</parameter>\s*(?=<parameter=|\Z)|\Z)", re.DOTALL
)
# Some templates write Python's constants instead of JSON's.
PYTHON = {"True": True, "False": False, "None": None}


def qwen3_coder(text: str, tools: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
    """Parse `<tool_call><function=name><parameter=x>value</parameter></function></tool_call>`.

    The closing tags of the last call may be missing.
    """
    at = 0
    while (start := text.find(FUNCTION, at)) >= 0:
        yield OPENED.sub("", text[at:start])
        end = END.search(text, start)
        body = text[start : end.start() if end else len(text)]
        at = end.end() if end else len(text)
        yield _call(body, tools)
    yield text[at:]


def _call(body: str, tools: Sequence[Mapping[str, Any]]) -> RawCall:
    head = HEAD.match(body)
    if head is None:
        return RawCall(error="it must start with <function=NAME>", text=body)
    try:
        arguments = parameters_of(body[head.end() :], head[1], tools)
    except ValueError as error:
        return RawCall(head[1], error=str(error), text=body)
    return RawCall(head[1], arguments)


def parameters_of(body: str, tool: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the arguments by name. Raises ValueError if the text contains anything else."""
    properties = _properties(tool, tools)
    found: dict[str, Any] = {}
    at = 0
    while body[at:].strip():
        match = PARAMETER.match(body, at)
        if match is None:
            raise ValueError("its arguments must be <parameter=NAME>VALUE</parameter> only")
        name = match[1].strip()
        found[name] = _value(match[2], properties.get(name, {}))
        at = match.end()
    return found


def _properties(tool: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    for one in tools:
        function = one.get("function", one)
        if function.get("name") == tool:
            properties: Mapping[str, Any] = function.get("parameters", {}).get("properties", {})
            return properties
    return {}


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    types = _types(schema)
    bare = text.strip()
    if bare in ("null", "None") and "null" in types:
        return None
    if "string" in types:
        return text
    if bare in PYTHON:
        return PYTHON[bare]
    try:
        return parse_json(bare)
    except ValueError:
        return text


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a value may have; none if the schema does not restrict them."""
    kind = schema.get("type", [])
    found = {kind} if isinstance(kind, str) else set(kind)
    if schema.get("nullable"):
        found.add("null")
    if any(isinstance(one, str) for one in schema.get("enum", [])):
        found.add("string")
    for either in ("anyOf", "oneOf"):
        for one in schema.get(either, []):
            found |= _types(one)
    return found
