"""Validation of the requests of clients of OpenAI's API.

In: the body of a request, which is not trusted. Out: its parts, or a `RequestError` whose message
goes to the client.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.common.safe_json import dump_json, is_flat, parse_json
from rlsys.common.structural_tags import Format
from rlsys.environments.tools.tool_grammars import json_of
from rlsys.errors import InvalidValue
from rlsys.text.messages import Message, text_of_content, without_none
from rlsys.text.tokenizer_boundary import check_encodable

# Maximum number of answers to one request (`n`).
MAX_ANSWERS = 64

# Maximum numbers of messages, tools and stop texts. Each costs about 0.2 ms of the event loop.
MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_STOPS = 64

# Supported fields. The answer lists all other fields of the request in `ignored`.
SHARED_FIELDS = {
    *("model", "max_tokens", "stop", "n", "logprobs", "stream", "stream_options"),
    *("response_format", "return_token_ids"),
}
CHAT_FIELDS = SHARED_FIELDS | {
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens"),
}
COMPLETION_FIELDS = SHARED_FIELDS | {"prompt", "echo"}

# Fields that would change the format of the answer, with the values that do not.
UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "best_of": (1,),
}


class RequestError(Exception):
    """Error about a request. Its message goes to the client."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options that chats and completions share."""

    max_tokens: int | None  # of each answer; None: no limit of the request's own
    stop: tuple[str, ...]
    num_answers: int
    has_logprobs: bool
    is_stream: bool
    has_usage: bool  # at the end of a stream
    has_token_ids: bool
    format: Format | None  # that each answer must match
    ignored: tuple[str, ...]
    format_field: str = "response_format"  # the field of the request that has the format


def invalid(field: str, value: Any, rule: str, fix: str) -> RequestError:
    """Return the error about a field of a request."""
    return RequestError(f"{field}={reprlib.repr(value)}: {rule}. {fix}")


def body_of(data: bytes) -> Mapping[str, Any]:
    """Return the parsed body of a request.

    Raises RequestError if it is not a JSON object or has half a character in a text.
    """
    try:
        body = parse_json(data)
    except ValueError as error:
        raise RequestError(f"body: is not valid JSON ({error}). Send a JSON object.") from None
    if not isinstance(body, dict):
        raise invalid("body", body, "must be a JSON object", "Send an object.")
    if not is_flat(body):
        raise RequestError("body: is nested too deeply. Send a flatter object.")
    try:
        text = dump_json(body, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise RequestError(
            "body: NaN and infinite numbers are not valid JSON. Send finite numbers."
        ) from None
    try:
        text.encode()
    except UnicodeEncodeError:
        _check_characters(body, "")
    return body


def _check_characters(value: Any, field: str) -> None:
    """Raise RequestError about the first text with half a character, by the name of its field."""
    if isinstance(value, str):
        try:
            check_encodable(value, field or "body", change="the request")
        except InvalidValue as error:
            raise RequestError(str(error)) from None
    elif isinstance(value, list):
        for number, one in enumerate(value):
            _check_characters(one, f"{field}[{number}]")
    elif isinstance(value, dict):
        for name, one in value.items():
            _check_characters(name, field)
            _check_characters(one, f"{field}.{name}" if field else name)


def flag(fields: Mapping[str, Any], name: str, *, within: str = "") -> bool:
    """Return a field that is true or false; false if it is missing.

    `within` is the name of the object that contains it, with a point. Raises RequestError.
    """
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{within}{name}", value, "must be true or false", "Use a JSON boolean.")
    return bool(value)


def token_limit(body: Mapping[str, Any], name: str) -> int | None:
    """Return a limit of tokens; None if it is missing. Raises RequestError."""
    limit = body.get(name)
    if limit is not None and not _is_count(limit):
        raise invalid(name, limit, "must be an integer of at least 1", "Use 1 or more.")
    return limit


def options_of(body: Mapping[str, Any], *, is_chat: bool) -> RequestOptions:
    """Return the options of a chat or completion request."""
    for name, harmless in UNSUPPORTED.items():
        if (value := body.get(name)) is not None and not any(
            type(value) is type(one) and value == one for one in harmless
        ):
            raise invalid(name, value, "is not supported", "Remove it.")
    stream_options = body.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise invalid("stream_options", stream_options, "must be an object", "Use an object.")
    limits = [token_limit(body, "max_completion_tokens")] if is_chat else []
    limits.append(token_limit(body, "max_tokens"))
    return RequestOptions(
        max_tokens=next((limit for limit in limits if limit is not None), None),
        stop=_stop(body.get("stop")),
        num_answers=_num_answers(body.get("n")),
        has_logprobs=flag(body, "logprobs") if is_chat else _has_logprobs(body.get("logprobs")),
        is_stream=flag(body, "stream"),
        has_usage=flag(stream_options, "include_usage", within="stream_options."),
        has_token_ids=flag(body, "return_token_ids"),
        format=_format(body.get("response_format")),
        ignored=_ignored(body, stream_options, is_chat=is_chat),
    )


def _ignored(
    body: Mapping[str, Any], stream_options: Mapping[str, Any], *, is_chat: bool
) -> tuple[str, ...]:
    """Return the names of the fields that are not followed."""
    given = [name for name, value in body.items() if value is not None]
    names = [name for name in given if name not in (CHAT_FIELDS if is_chat else COMPLETION_FIELDS)]
    if is_chat and ignores_parallel_calls(body):
        names.append("parallel_tool_calls")
    if is_chat and {"max_tokens", "max_completion_tokens"} <= set(given):
        names.append("max_tokens")
    nested = without_none(stream_options).keys() - {"include_usage"}
    return (*names, *(f"stream_options.{name}" for name in sorted(nested)))


def ignores_parallel_calls(body: Mapping[str, Any]) -> bool:
    """Return whether a reply may have several calls although the request forbids it.

    The number of calls is limited only where calls are forced.
    """
    is_forbidden = body.get("parallel_tool_calls") is not None and not flag(
        body, "parallel_tool_calls"
    )
    return is_forbidden and body.get("tool_choice") in (None, "auto", "none")


def _has_logprobs(logprobs: Any) -> bool:
    """Return whether a completion has log-probabilities: the field is a number of alternatives."""
    if logprobs is None:
        return False
    if not isinstance(logprobs, int) or isinstance(logprobs, bool) or logprobs < 0:
        raise invalid(
            "logprobs", logprobs, "must be an integer of at least 0", "Use 0, or leave it out."
        )
    return True


def messages_of(body: Mapping[str, Any], known: Sequence[Message] = ()) -> list[Message]:
    """Return the messages as a chat template needs them: lists of parts become text.

    Messages of `known`, the same objects, are not copied, so that they identify their replies.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid(
            "messages", messages, "must be a non-empty list of messages", "Send a message."
        )
    if len(messages) > MAX_MESSAGES:
        rule = f"{len(messages)} messages are more than {MAX_MESSAGES}"
        raise RequestError(f"messages: {rule}. Send fewer, or join texts of one role.")
    is_known = {id(one) for one in known}
    return [
        one if id(one) in is_known else _message(number, one) for number, one in enumerate(messages)
    ]


def tools_of(body: Mapping[str, Any]) -> list[Message]:
    """Return the schemas of the tools; none if `tool_choice` is "none"."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is None or choice == "none":
        return []
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        raise RequestError(f"tools: {len(tools)} tools are more than {MAX_TOOLS}. Send fewer.")
    if not isinstance(tools, list) or not all(_is_tool(one) for one in tools):
        raise invalid(
            "tools",
            tools,
            "must be a list of tools",
            'Use {"type": "function", "function": {"name": ..., "parameters": {...}}} for each.',
        )
    return tools


def forced_tools(body: Mapping[str, Any], tools: Sequence[Message]) -> Sequence[Message]:
    """Return the tools of which the answer must call one; none if it need not call any."""
    choice = body.get("tool_choice")
    flag(body, "parallel_tool_calls")
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required" and tools:
        return tools
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise invalid(
            "tool_choice",
            choice,
            "must be 'auto', 'none', 'required' (with tools) or name one of the tools",
            'For example: {"type": "function", "function": {"name": ...}}.',
        )
    return named


def prompts_of(body: Mapping[str, Any], vocabulary_size: int) -> list[str | list[int]]:
    """Return the prompts of a completion, each a text or token ids below `vocabulary_size`."""
    prompt = body.get("prompt")
    prompts: list[Any] = [prompt]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompts = prompt
    if not all(_is_prompt(one) for one in prompts):
        raise invalid(
            "prompt",
            prompt,
            "must be a text, a list of token ids, or a list of these, not empty",
            "Send at least one token.",
        )
    largest = max((max(one) for one in prompts if isinstance(one, list)), default=0)
    if largest >= vocabulary_size:
        raise invalid(
            "prompt",
            largest,
            f"token ids must be below {vocabulary_size}",
            "Use the tokenizer of the model.",
        )
    return prompts


def echoes(body: Mapping[str, Any], options: RequestOptions) -> bool:
    """Return whether a completion repeats its prompt."""
    if not flag(body, "echo"):
        return False
    if options.has_logprobs:
        raise invalid(
            "echo",
            body["echo"],
            "cannot be combined with logprobs: prompts have no log-probabilities",
            "Remove one of them.",
        )
    return True


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, list):
        return bool(prompt) and all(
            isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in prompt
        )
    return isinstance(prompt, str) and bool(prompt)


def _format(response_format: Any) -> Format | None:
    """Return the format of a `response_format`; None for text."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return json_of({"type": "object"})
    described = response_format.get("json_schema") if isinstance(response_format, dict) else None
    schema = described.get("schema") if isinstance(described, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise invalid(
            "response_format",
            response_format,
            "must have the type text, json_object or json_schema (with a schema)",
            'For example: {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.',
        )
    return json_of(schema)


def _message(number: int, message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid(f"messages[{number}]", message, "has no role", "Add a role.")
    checked: dict[str, Any] = without_none(message)
    if isinstance(content := checked.get("content"), list):
        checked["content"] = text_of_content(content)
        if checked["content"] is None:
            raise invalid(
                f"messages[{number}].content", content, "parts must be text", "Send text only."
            )
    calls = checked.get("tool_calls", [])
    if not isinstance(calls, list) or not all(_is_call(one) for one in calls):
        raise invalid(
            f"messages[{number}].tool_calls",
            calls,
            "must be a list of calls",
            'Use {"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}} '
            "for each.",
        )
    if not calls:
        checked.pop("tool_calls", None)
    if checked["role"] == "developer":
        checked["role"] = "system"
    return checked


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and _is_named(call.get("function"))


def _is_tool(tool: Any) -> bool:
    return isinstance(tool, dict) and _is_named(tool.get("function"))


def _is_named(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(texts, list) or not all(isinstance(one, str) and one for one in texts):
        raise invalid("stop", stop, "must be a list of non-empty texts", 'For example: ["\\n"].')
    if len(texts) > MAX_STOPS:
        raise RequestError(f"stop: {len(texts)} texts are more than {MAX_STOPS}. Send fewer.")
    return tuple(texts)


def _num_answers(n: Any) -> int:
    num = 1 if n is None else n
    if not _is_count(num) or num > MAX_ANSWERS:
        raise invalid("n", num, f"must be an integer from 1 to {MAX_ANSWERS}", "Use fewer answers.")
    return int(num)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
