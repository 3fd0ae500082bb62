"""OpenAI's Responses API, implemented by chats.

In: the body of a request to /v1/responses. Out: the body of the equivalent chat request, and its
answer as a response, one object or the events of a stream.

A reply becomes up to three kinds of items, in this order: reasoning, message, function calls. Items
that a client sends back become one message again, which is matched with the reply. A reply that is
continued by `previous_response_id` is that reply itself.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.common.safe_json import dump_json
from rlsys.environments.endpoint.openai_answers import MODEL, Decode, Fields, token_logprobs
from rlsys.environments.endpoint.openai_requests import (
    MAX_MESSAGES,
    RequestError,
    RequestOptions,
    flag,
    ignores_parallel_calls,
    invalid,
    token_limit,
)
from rlsys.environments.episode import Turn
from rlsys.errors import InvalidValue
from rlsys.text.messages import Message, without_none

# Supported fields. The answer lists all other fields of the request in `ignored`.
FOLLOWED = {
    *("model", "input", "instructions", "tools", "tool_choice", "text", "max_output_tokens"),
    *("stream", "include", "previous_response_id", "store", "metadata", "background"),
    "parallel_tool_calls",
}
LOGPROBS = "message.output_text.logprobs"


def chat_body(
    body: Mapping[str, Any], known: Mapping[str, Sequence[Message]]
) -> tuple[dict[str, Any], list[str]]:
    """Return the body of the equivalent chat request, and the field that each message is from.

    `known` contains the messages of earlier responses by id, without their instructions. All
    fields are validated here, so that errors name the fields that the client sent. Raises
    RequestError.
    """
    if flag(body, "background"):
        raise invalid("background", body["background"], "is not supported", "Remove it.")
    messages, sources = _messages(body, known)
    if len(messages) > MAX_MESSAGES:
        rule = f"{len(messages)} messages are more than {MAX_MESSAGES}"
        raise RequestError(f"input: {rule}. Send fewer, or join texts of one role.")
    tools = [
        _tool(number, one) for number, one in enumerate(_list(body, "tools")) if _is_function(one)
    ]
    options = {
        "messages": messages,
        "tools": tools or None,
        "tool_choice": _choice(body.get("tool_choice"), tools),
        "parallel_tool_calls": body.get("parallel_tool_calls"),
        "response_format": _format(_text(body).get("format")),
        "max_completion_tokens": token_limit(body, "max_output_tokens"),
        "logprobs": LOGPROBS in _list(body, "include"),
        "stream": body.get("stream"),
    }
    return {name: value for name, value in options.items() if value is not None}, sources


def renamed(error: InvalidValue, sources: Sequence[str]) -> InvalidValue:
    """Return an error about a message as one about the field that the message is from."""
    found = re.match(r"messages(?:\[(\d+)\])?(?:\[\d+:\])?", error.field)
    if found is None:
        return error
    name = sources[int(found[1])] if found[1] is not None else "input"
    field = name + error.field[found.end() :]
    return InvalidValue(field, error.value, rule=error.rule, fix=error.fix)


def ignored_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of unsupported fields and elements, such as `tools[0]`."""
    tools, include = _list(body, "tools"), _list(body, "include")
    return (
        *(name for name, value in body.items() if name not in FOLLOWED and value is not None),
        *(["parallel_tool_calls"] if ignores_parallel_calls(body) else []),
        *(f"tools[{n}]" for n, one in enumerate(tools) if not _is_function(one)),
        *(f"text.{name}" for name in without_none(_text(body)) if name != "format"),
        *(f"include[{n}]" for n, one in enumerate(include) if one != LOGPROBS),
    )


@dataclass(frozen=True, kw_only=True)
class ResponseAnswer:
    """A response, as a JSON object."""

    whole: Fields

    @property
    def id(self) -> str:
        """The id of the response."""
        return str(self.whole["id"])

    def stream(self, options: RequestOptions) -> str:
        """Return the server-sent events of a stream.

        The reply is complete already, so each part of it is one delta.
        """
        initial = {**self.whole, "status": "in_progress", "output": [], "usage": None}
        status = self.whole["status"]
        events = [
            {"type": "response.created", "response": initial},
            {"type": "response.in_progress", "response": initial},
            *(
                event
                for place, item in enumerate(self.whole["output"])
                for event in _item_events(place, item)
            ),
            {"type": f"response.{status}", "response": self.whole},
        ]
        numbered = [{**event, "sequence_number": n} for n, event in enumerate(events)]
        return "".join(f"event: {one['type']}\ndata: {dump_json(one)}\n\n" for one in numbered)


def response_answer(
    turn: Turn, body: Mapping[str, Any], options: RequestOptions, decode: Decode
) -> ResponseAnswer:
    """Return the response for a turn."""
    is_cut = turn.is_truncated
    num_prompt, num_sampled = len(turn.prompt_token_ids), len(turn.token_ids)
    return ResponseAnswer(
        whole={
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "model": MODEL,
            "output": _items(turn, options, decode),
            "usage": {
                "input_tokens": num_prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": num_sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_prompt + num_sampled,
            },
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": body.get("previous_response_id"),
            "text": _text(body) or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": _list(body, "tools"),
            "policy_version": turn.policy_version,
            "ignored": list(options.ignored),
        }
    )


# Requests


def _messages(
    body: Mapping[str, Any], known: Mapping[str, Sequence[Message]]
) -> tuple[list[Message], list[str]]:
    """Return the messages, and the field that each one is from."""
    before: Sequence[Message] = ()
    if (name := body.get("previous_response_id")) is not None:
        if not isinstance(name, str) or name not in known:
            raise invalid(
                "previous_response_id",
                name,
                "is not the id of a response of this episode",
                "Use such an id, or send the items of the response.",
            )
        before = known[name]
    input = body.get("input")
    items = [{"role": "user", "content": input}] if isinstance(input, str) else input
    if not isinstance(items, list) or not (items or before):
        raise invalid("input", input, "must be a text or a list of items", "Send at least one.")
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise invalid("instructions", instructions, "must be a text", "Use a string.")
    first = [{"role": "system", "content": instructions}] if instructions else []
    messages: list[Message] = [*first, *before]
    sources = ["instructions" for _ in first] + ["previous_response_id" for _ in before]
    reasoning = ""  # of the reply whose next items follow
    for number, item in enumerate(items):
        if _kind(item) == "reasoning":
            reasoning = _reasoning(number, item)
            continue
        _append(messages, number, item, begins_reply=bool(reasoning))
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1] = {**messages[-1], "reasoning_content": reasoning}
        reasoning = ""
        sources += [f"input[{number}]"] * (len(messages) - len(sources))
    return messages, sources


def _kind(item: Any) -> Any:
    return item.get("type") or "message" if isinstance(item, dict) else None


def _reasoning(number: int, item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item; "" if it has only a summary or encrypted content."""
    return _content(number, item.get("content") or "")


def _append(messages: list[Message], number: int, item: Any, *, begins_reply: bool) -> None:
    """Append an item as a message, or merge it into the reply that it is part of."""
    kind, last = _kind(item), messages[-1] if messages else {}
    is_in_reply = last.get("role") == "assistant" and not begins_reply
    match kind:
        case "message":
            role = item.get("role")
            if not isinstance(role, str):
                raise invalid(f"input[{number}].role", role, "must be a text", "Add a role.")
            message = {"role": role, "content": _content(number, item.get("content"))}
            messages.append(message)
        case "function_call":
            if not isinstance(item.get("name"), str):
                raise invalid(
                    f"input[{number}].name", item.get("name"), "must be a text", "Name a function."
                )
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            before = messages.pop() if is_in_reply else {"role": "assistant", "content": ""}
            calls = [*before.get("tool_calls", ()), call]
            messages.append({**before, "tool_calls": calls})
        case "function_call_output":
            output = _content(number, item.get("output"), "output")
            tool = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            messages.append(tool)
        case _:
            raise invalid(
                f"input[{number}]",
                item,
                "must be a message, function_call, function_call_output or reasoning",
                "Send one of these.",
            )


def _content(number: int, content: Any, name: str = "content") -> str:
    """Return the text of a content, a string or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text", part.get("refusal")) for part in parts if isinstance(part, dict)]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise invalid(f"input[{number}].{name}", content, "must be text", "Send text only.")
    return "".join(map(str, texts))


def _is_function(tool: Any) -> bool:
    return not isinstance(tool, dict) or tool.get("type") == "function"


def _tool(number: int, tool: Any) -> Fields:
    """Return a tool in the format of chats."""
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise invalid(
            f"tools[{number}]",
            tool,
            "must be a tool",
            'Use {"type": "function", "name": ..., "parameters": {...}}.',
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _choice(choice: Any, tools: Sequence[Fields]) -> Any:
    """Return a choice of tools in the format of chats."""
    if choice in (None, "auto", "none") or (choice == "required" and tools):
        return choice
    name = choice.get("name") if isinstance(choice, dict) else None
    is_function = isinstance(choice, dict) and choice.get("type") == "function"
    if not is_function or all(tool["function"]["name"] != name for tool in tools):
        raise invalid(
            "tool_choice",
            choice,
            "must be 'auto', 'none', 'required' (with tools) or name one of the tools",
            'For example: {"type": "function", "name": ...}.',
        )
    return {"type": "function", "function": {"name": name}}


def _text(body: Mapping[str, Any]) -> Fields:
    """Return the options of the text."""
    text = body.get("text") or {}
    if not isinstance(text, dict):
        raise invalid("text", text, "must be an object", 'For example: {"format": {...}}.')
    return text


def _format(format: Any) -> Any:
    """Return a format of the text in the format of chats."""
    kind = format.get("type") if isinstance(format, dict) else None
    if format is None or kind in ("text", "json_object"):
        return format
    if kind != "json_schema" or not isinstance(format.get("schema"), dict):
        raise invalid(
            "text.format",
            format,
            "must have the type text, json_object or json_schema (with a schema)",
            'For example: {"type": "json_schema", "name": ..., "schema": {...}}.',
        )
    described = {name: value for name, value in format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": described}


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name) or []
    if not isinstance(value, list):
        raise invalid(name, value, "must be a list", "Use a list.")
    return value


# Answers


def _items(turn: Turn, options: RequestOptions, decode: Decode) -> list[Fields]:
    message = turn.message
    status = "incomplete" if turn.is_truncated else "completed"
    items: list[Fields] = []
    if thoughts := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thoughts}]
        items.append(
            {"id": _id("rs"), "type": "reasoning", "summary": [], "content": content}
            | {"status": status}
        )
    calls = message.get("tool_calls") or []
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": []}
        part["logprobs"] = token_logprobs(turn, decode) if options.has_logprobs else []
        items.append(
            {"id": _id("msg"), "type": "message", "role": "assistant", "status": status}
            | {"content": [part]}
        )
    items += [
        {
            "id": _id("fc"),
            "type": "function_call",
            "status": status,
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
        }
        for call in calls
    ]
    return items


def _item_events(place: int, item: Fields) -> Iterator[Fields]:
    """Return the events of one item of the output."""
    at = {"output_index": place, "item_id": item["id"]}
    initial = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        initial["arguments"] = ""
    else:
        initial["content"] = []
    yield {"type": "response.output_item.added", "output_index": place, "item": initial}
    if item["type"] == "function_call":
        name, arguments = "response.function_call_arguments", item["arguments"]
        yield {**at, "type": f"{name}.delta", "delta": arguments}
        yield {**at, "type": f"{name}.done", "name": item["name"], "arguments": arguments}
    else:
        part = item["content"][0]
        yield from _part_events({**at, "content_index": 0}, part, part["type"])
    yield {"type": "response.output_item.done", "output_index": place, "item": item}


def _part_events(at: Fields, part: Fields, kind: str) -> Iterator[Fields]:
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    empty = {**part, "text": "", **({"logprobs": []} if logprobs else {})}
    yield {**at, "type": "response.content_part.added", "part": empty}
    yield {**at, "type": f"response.{kind}.delta", "delta": part["text"], **logprobs}
    yield {**at, "type": f"response.{kind}.done", "text": part["text"], **logprobs}
    yield {**at, "type": "response.content_part.done", "part": part}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
