"""Structural tags of replies that must call a tool (rlsys.common.structural_tags).

In: the schemas of the tools that may be called, and whether a reply may contain several calls. Out:
the format of a reply of one or more calls and nothing else, in the format of the model's chat
template. The parsers in tool_json.py and tool_xml.py can read such a reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.common.safe_json import dump_json
from rlsys.common.structural_tags import Format

Schemas = Sequence[Mapping[str, Any]]

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def json_of(schema: Any) -> Format:
    """Return the format of a JSON text that matches a schema."""
    return {"type": "json_schema", "json_schema": schema}


def hermes_calls(tools: Schemas, several: bool) -> Format:
    """Return the format of calls that `tool_json.hermes` parses."""
    return _calls(
        tools, several, "\n", '<tool_call>\n{"name": %s, "arguments": ', "}\n</tool_call>"
    )


def llama3_calls(tools: Schemas, several: bool) -> Format:
    """Return the format of calls that `tool_json.llama3` parses."""
    return _calls(tools, several, "; ", '{"name": %s, "parameters": ', "}")


def plain_json_calls(tools: Schemas, several: bool) -> Format:
    """Return the format of calls that `tool_json.plain_json` parses."""
    return _calls(tools, several, "\n", '{"name": %s, "arguments": ', "}")


def mistral_calls(tools: Schemas, several: bool) -> Format:
    """Return the format of calls in a list, that `tool_json.mistral` parses."""
    listed = _calls(tools, several, ", ", '{"name": %s, "arguments": ', "}")
    return _sequence(_text("[TOOL_CALLS]["), listed, _text("]"))


def mistral_args_calls(tools: Schemas, several: bool) -> Format:
    """Return the format of calls of version 11 of Mistral's tokenizer."""
    tags = [_tag(f"[TOOL_CALLS]{_name(tool)}[ARGS]", json_of(_schema(tool)), "") for tool in tools]
    return _tags(tags, several, "")


def qwen3_coder_calls(tools: Schemas, several: bool) -> Format:
    """Return the format of calls that `tool_xml.qwen3_coder` parses."""
    tags = [
        _tag(
            f"<tool_call>\n<function={_name(tool)}>\n",
            {**json_of(_schema(tool)), "style": "qwen_xml"},
            "\n</function>\n</tool_call>",
        )
        for tool in tools
    ]
    return _tags(tags, several, "\n")


def either(formats: Sequence[Format]) -> Format:
    """Return the format of a text that matches one of the formats."""
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


def behind_reasoning(format: Format, *, start: str, end: str, is_begun: bool) -> Format:
    """Return the format of a reply that may reason, between `start` and `end`, before `format`.

    If the prompt has begun the reasoning (`is_begun`), the reply must end it.
    """
    thoughts = _tag("" if is_begun else start, {"type": "any_text"}, end)
    first = thoughts if is_begun else {"type": "optional", "content": thoughts}
    return _sequence(first, {"type": "regex", "pattern": r"\n*"}, format)


def _calls(tools: Schemas, several: bool, separator: str, begin: str, end: str) -> Format:
    tags = [
        _tag(begin % dump_json(_name(tool), ensure_ascii=False), json_of(_schema(tool)), end)
        for tool in tools
    ]
    return _tags(tags, several, separator)


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])


def _schema(tool: Mapping[str, Any]) -> Any:
    return tool["function"].get("parameters") or NO_PARAMETERS


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _tags(tags: Sequence[Format], several: bool, separator: str) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}
