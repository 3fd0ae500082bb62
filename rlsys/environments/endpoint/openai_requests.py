"""What clients of OpenAI's API ask, read and checked.

In: the body of a request, which anybody may have written. Out: an `Asked`, or a `RequestError` that
tells the client the value, the rule and the fix.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.common.safe_json import is_flat, parse_json
from rlsys.common.structural_tags import Format
from rlsys.environments.tools.tool_grammars import json_of
from rlsys.text.messages import Message, text_of_content, without_none

# Of one request, in answers (`n`).
MAX_ANSWERS = 64

# Of what a request may hold, what is looked at here; an answer names the rest in `ignored`.
FOLLOWED = {
    *("model", "messages", "prompt", "tools", "tool_choice", "max_tokens"),
    *("max_completion_tokens", "stop", "n", "logprobs", "stream", "stream_options"),
    *("response_format", "echo", "return_token_ids"),
}

# What would change the answer's shape, and the values that change nothing.
UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "best_of": (1,),
}


class RequestError(Exception):
    """A request that is not answered; its text goes to the client."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a chat and a completion have in common."""

    max_tokens: int | None  # of each answer; None: as many as there is room for
    stop: tuple[str, ...]
    num_answers: int
    has_logprobs: bool
    is_stream: bool
    has_usage: bool  # at the end of a stream
    has_token_ids: bool
    format: Format | None  # what each answer must look like
    ignored: tuple[str, ...]


def body_of(data: bytes) -> Mapping[str, Any]:
    """Raises Refused for what is no object of JSON."""
    try:
        body = parse_json(data)
    except ValueError as error:
        raise RequestError(f"the body is no JSON ({error}); send an object.") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body is {short(body)}; send an object.")
    if not is_flat(body):
        raise RequestError("the body is nested too deeply; send a flatter one.")
    return body


def asked_of(body: Mapping[str, Any]) -> Asked:
    for name, harmless in UNSUPPORTED.items():
        if (value := body.get(name)) is not None and not any(
            type(value) is type(one) and value == one for one in harmless
        ):
            raise RequestError(f"{name}={short(value)} is not supported here; leave it out.")
    options = body.get("stream_options") or {}
    # A chat asks whether, a completion for how many others beside.
    logprobs = body.get("logprobs")
    return Asked(
        max_tokens=_limit(body),
        stop=_stop(body.get("stop")),
        num_answers=_num_answers(body.get("n")),
        has_logprobs=logprobs is not None and logprobs is not False,
        is_stream=body.get("stream") is True,
        has_usage=isinstance(options, dict) and options.get("include_usage") is True,
        has_token_ids=body.get("return_token_ids") is True,
        format=_format(body.get("response_format")),
        ignored=tuple(
            name for name, value in body.items() if name not in FOLLOWED and value is not None
        ),
    )


def messages_of(body: Mapping[str, Any]) -> list[Message]:
    """As a chat template takes them: contents of parts become their texts."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise RequestError(f"messages={short(given)} is no list of messages; give at least one.")
    return [_message(number, message) for number, message in enumerate(given)]


def tools_of(body: Mapping[str, Any]) -> list[Message]:
    """Return the schemas of the tools; none if the request says that none is to be called."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is None or choice == "none":
        return []
    if not isinstance(tools, list) or not all(_is_tool(one) for one in tools):
        raise RequestError(
            f"tools={short(tools)} is no list of tools; give each as "
            '{"type": "function", "function": {"name": ..., "parameters": {...}}}.'
        )
    return tools


def forced_tools(body: Mapping[str, Any], tools: Sequence[Message]) -> Sequence[Message]:
    """Return those of the tools of which the answer must call one; none if it need not."""
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required" and tools:
        return tools
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise RequestError(
            f"tool_choice={short(choice)} is none of 'auto', 'none', 'required' (with tools) and "
            '{"type": "function", "function": {"name": ...}} with the name of a tool. Use one.'
        )
    return named


def prompts_of(body: Mapping[str, Any]) -> list[str | list[int]]:
    """Return the prompts of a completion: one or several, each a text or its tokens."""
    given = body.get("prompt")
    prompts: list[Any] = [given]
    if isinstance(given, list) and given and not isinstance(given[0], int):
        prompts = given
    if not all(_is_prompt(one) for one in prompts):
        raise RequestError(
            f"prompt={short(given)} is no prompt; give a text or a list of token ids, or a list "
            "of such, none empty."
        )
    return prompts


def echoes(body: Mapping[str, Any], asked: Asked) -> bool:
    """Return whether a completion repeats its prompt."""
    if not body.get("echo"):
        return False
    if asked.has_logprobs:
        raise RequestError(
            f"echo={short(body['echo'])} with logprobs: prompts have no log-probabilities here. "
            "Leave one of the two out."
        )
    return True


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, list):
        return bool(prompt) and all(
            isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in prompt
        )
    return isinstance(prompt, str) and bool(prompt)


def _format(given: Any) -> Format | None:
    """Return the format of a `response_format`; None if it asks for text."""
    kind = given.get("type") if isinstance(given, dict) else None
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return json_of({"type": "object"})
    described = given.get("json_schema") if isinstance(given, dict) else None
    schema = described.get("schema") if isinstance(described, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise RequestError(
            f"response_format={short(given)} is no format; give "
            '{"type": "json_object"}, or {"type": "json_schema", "json_schema": {"name": ..., '
            '"schema": {...}}}.'
        )
    return json_of(schema)


def _message(number: int, message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{number}]={short(message)} has no role; give one.")
    made: dict[str, Any] = without_none(message)
    if isinstance(made.get("content"), list):
        made["content"] = text_of_content(made["content"])
        if made["content"] is None:
            raise RequestError(f"messages[{number}] has parts that are no text; give text alone.")
    calls = made.get("tool_calls", [])
    if not isinstance(calls, list) or not all(_is_call(one) for one in calls):
        raise RequestError(
            f"messages[{number}]: tool_calls={short(calls)} is no list of calls; give each as "
            '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}.'
        )
    if not calls:
        made.pop("tool_calls", None)
    if made["role"] == "developer":
        made["role"] = "system"
    return made


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and _is_named(call.get("function"))


def _is_tool(tool: Any) -> bool:
    return isinstance(tool, dict) and _is_named(tool.get("function"))


def _is_named(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _limit(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if (limit := body.get(name)) is not None:
            if not _is_count(limit):
                raise RequestError(
                    f"{name}={short(limit)} is no number of tokens; give at least 1."
                )
            return int(limit)
    return None


def _stop(given: Any) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(texts, list) or not all(isinstance(one, str) and one for one in texts):
        raise RequestError(f"stop={short(given)} is no list of texts; give some, none empty.")
    return tuple(texts)


def _num_answers(given: Any) -> int:
    num = 1 if given is None else given
    if not _is_count(num) or num > MAX_ANSWERS:
        raise RequestError(f"n={short(num)} is no number of answers; give 1 to {MAX_ANSWERS}.")
    return int(num)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def short(value: Any) -> str:
    return reprlib.repr(value)
