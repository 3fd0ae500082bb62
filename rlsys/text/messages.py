"""Messages and tools in the form that chat templates need.

In: messages of a dataset's row, a client or a user's function. Out: plain dictionaries:

    content None, or missing with tool calls    ──► ""
    content of text parts                       ──► the joined texts
    a key whose value is None (from Arrow)      ──► left out
    arguments of a tool call as JSON text       ──► an object
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.errors import InvalidValue, require

Message = Mapping[str, Any]

TEXT_PARTS = ("text", "input_text", "output_text", None)


def text_of_content(content: Any) -> str | None:
    """Return a message's content as one text, or None if it is not only text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        return None
    texts = [_text_of_part(part) for part in content]
    return None if None in texts else "".join(text for text in texts if text is not None)


def _text_of_part(part: Any) -> str | None:
    if not isinstance(part, Mapping) or part.get("type") not in TEXT_PARTS:
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None


def plain_messages(value: object, where: str) -> list[dict[str, Any]]:
    """Return the messages of a chat for its template.

    Raises:
        InvalidValue: The value is not a list of messages with a role and a text. The field is
            `where`.
    """
    require(
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and len(value) > 0
        and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in value)
        and all("content" in m or m.get("tool_calls") for m in value),
        where,
        value,
        rule="must be a string or a list of messages",
        fix="Give messages with role and content.",
    )
    assert isinstance(value, Sequence)
    return [_plain_message(message, i, where) for i, message in enumerate(value)]


def _plain_message(message: Message, number: int, where: str) -> dict[str, Any]:
    content = text_of_content(message.get("content"))
    require(
        content is not None,
        f"{where}: content of message {number} (from 0)",
        message.get("content"),
        rule="must be text",
        fix="Give a string, or parts of type text.",
    )
    made: dict[str, Any] = {**without_none(message), "content": content}
    if calls := made.pop("tool_calls", None):
        made["tool_calls"] = [with_object(call) for call in calls]
    return made


def plain_tools(value: object, where: str) -> list[dict[str, Any]]:
    """Return a row's tools for a chat template; none for None and for an empty text or list.

    Raises:
        InvalidValue: The value is neither a list of tool schemas nor such a list as JSON text. The
            field is `where`.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    parsed = _parsed(value)
    tools = [_parsed(one) for one in parsed] if isinstance(parsed, list | tuple) else None
    if tools is None or not all(isinstance(one, Mapping) for one in tools):
        raise InvalidValue(
            where,
            value,
            rule="must be a list of tools",
            fix="Give their JSON schemas as a list or as JSON text.",
        )
    return [without_none(one) for one in tools]


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value


def without_none(value: Any) -> Any:
    """Return a copy without the keys, at any depth, whose value is None."""
    if isinstance(value, Mapping):
        return {key: without_none(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [without_none(one) for one in value]
    return value


def with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object if they are the JSON text of one."""
    if not isinstance(call.get("function"), Mapping):
        return dict(call)
    function = dict(call["function"])
    parsed = _parsed(function.get("arguments"))
    if isinstance(parsed, dict):
        function["arguments"] = parsed
    return {**call, "function": function}


def with_text_arguments(message: Message) -> Message:
    """Return a message whose tool calls have their arguments as JSON text."""
    calls = [dict(call) for call in message.get("tool_calls") or ()]
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
            text = dump_json(function["arguments"], ensure_ascii=False)
            call["function"] = {**function, "arguments": text}
    return {**message, "tool_calls": calls} if calls else message
