"""Answers of OpenAI's chat and completion API, made from the policy's turns.

In: the turns of a request. Out: JSON objects, one or the chunks of a stream.

An answer has two fields more than OpenAI's: `policy_version`, the newest weights that sampled it,
and `ignored`, the fields of the request that are not supported.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.common.safe_json import dump_json
from rlsys.environments.endpoint.openai_requests import RequestOptions
from rlsys.environments.episode import Turn
from rlsys.environments.tokens.text_prompts import before_stop

MODEL = "policy"
MODELS = {
    "object": "list",
    "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "rlsys"}],
}

Decode = Callable[[list[int]], str]
Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer to one request."""

    head: Fields
    choices: list[Fields]
    usage: Fields

    @property
    def whole(self) -> Fields:
        """The answer as one JSON object."""
        return {**self.head, "choices": self.choices, "usage": self.usage}

    def stream(self, options: RequestOptions) -> str:
        """Return the server-sent events of a stream."""
        events = [*map(dump_json, self.chunks(has_usage=options.has_usage)), "[DONE]"]
        return "".join(f"data: {one}\n\n" for one in events)

    def chunks(self, *, has_usage: bool) -> list[Fields]:
        """Return the chunks of a stream, for clients that only read streams.

        The reply is complete already, so each choice of a chat is one chunk and a second one with
        its finish reason.
        """
        is_chat = self.head["object"] == "chat.completion"
        head = {**self.head, "object": "chat.completion.chunk"} if is_chat else self.head
        deltas = [delta for one in self.choices for delta in (_deltas(one) if is_chat else [one])]
        chunks = [{**head, "choices": [one]} for one in deltas]
        return [*chunks, {**head, "choices": [], "usage": self.usage}] if has_usage else chunks


def chat_answer(turns: Sequence[Turn | None], options: RequestOptions, decode: Decode) -> Answer:
    """Return the answer to a chat, with a choice for each turn.

    For None, where tokens or branches were used up, there is no choice with its index.
    """
    head = _head("chatcmpl", "chat.completion", turns, options)
    if options.has_token_ids:
        head["prompt_token_ids"] = list(_first(turns).prompt_token_ids)
    return Answer(
        head=head,
        choices=[
            {
                "index": index,
                "message": _message(turn),
                "logprobs": chat_logprobs(turn, decode) if options.has_logprobs else None,
                "finish_reason": _finish_reason(turn),
                **({"token_ids": list(turn.token_ids)} if options.has_token_ids else {}),
            }
            for index, turn in enumerate(turns)
            if turn is not None
        ],
        usage=_usage(turns, options),
    )


def text_answer(
    turns: Sequence[Turn | None], options: RequestOptions, decode: Decode, *, echoed: Sequence[str]
) -> Answer:
    """Return the answer to a completion, with a choice for each turn that is not None.

    `echoed` contains the prompts to repeat before each sampled text.
    """
    return Answer(
        head=_head("cmpl", "text_completion", turns, options),
        choices=[
            {
                "index": index,
                "text": before + turn.message["content"],
                "logprobs": _text_logprobs(turn, decode) if options.has_logprobs else None,
                "finish_reason": _finish_reason(turn),
                **(_token_ids(turn) if options.has_token_ids else {}),
            }
            for index, (turn, before) in enumerate(zip(turns, echoed, strict=True))
            if turn is not None
        ],
        usage=_usage(turns, options),
    )


def _token_ids(turn: Turn) -> Fields:
    return {
        "prompt_token_ids": list(turn.prompt_token_ids),
        "token_ids": list(turn.token_ids),
    }


def without_stop(turn: Turn, stop: Sequence[str]) -> None:
    """Remove the stop text from the message of a reply, as OpenAI's API does.

    It may be in the reasoning. The tokens of the turn stay unchanged.
    """
    if not turn.is_truncated:
        for name in ("reasoning_content", "content"):
            if name in turn.message:
                turn.message[name] = before_stop(turn.message[name], stop)


def error_fields(message: str, code: str, status: int) -> Fields:
    """Return the JSON object of an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}


def _first(turns: Sequence[Turn | None]) -> Turn:
    return next(turn for turn in turns if turn is not None)


def _head(prefix: str, kind: str, turns: Sequence[Turn | None], options: RequestOptions) -> Fields:
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "policy_version": max(turn.policy_version for turn in turns if turn is not None),
        "ignored": list(options.ignored),
    }


def _message(turn: Turn) -> Mapping[str, Any]:
    """Return the message, with content None if it has only calls, as clients expect."""
    message = turn.message
    if message.get("tool_calls") and not message["content"]:
        return {**message, "content": None}
    return message


def _finish_reason(turn: Turn) -> str:
    if turn.is_truncated:
        return "length"
    return "tool_calls" if turn.message.get("tool_calls") else "stop"


def _usage(turns: Sequence[Turn | None], options: RequestOptions) -> Fields:
    """Return the numbers of tokens. A prompt counts once, not once per answer."""
    num = options.num_answers
    by_prompt = [turns[first : first + num] for first in range(0, len(turns), num)]
    asked = [_first(some) for some in by_prompt if any(some)]
    prompt = sum(len(turn.prompt_token_ids) for turn in asked)
    sampled = sum(len(turn.token_ids) for turn in turns if turn is not None)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def chat_logprobs(turn: Turn, decode: Decode) -> Fields:
    """Return the log-probabilities of all sampled tokens, with reasoning, calls and end of turn."""
    return {"content": token_logprobs(turn, decode), "refusal": None}


def token_logprobs(turn: Turn, decode: Decode) -> list[Fields]:
    """Return the log-probability of each sampled token."""
    tokens = [decode([token]) for token in turn.token_ids]
    return [
        {
            "token": token,
            "logprob": logprob,
            "bytes": None if "\ufffd" in token else list(token.encode()),  # part of a character
            "top_logprobs": [],
        }
        for token, logprob in zip(tokens, turn.logprobs, strict=True)
    ]


def _text_logprobs(turn: Turn, decode: Decode) -> Fields:
    return {
        "tokens": [decode([token]) for token in turn.token_ids],
        "token_logprobs": list(turn.logprobs),
        "top_logprobs": None,
        "text_offset": None,
    }


def _deltas(choice: Mapping[str, Any]) -> list[Fields]:
    """Return the delta with the message and the one with the finish reason."""
    message = dict(choice["message"])
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": n, **call} for n, call in enumerate(calls)]
    first = {**choice, "delta": message, "finish_reason": None}
    del first["message"]
    last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
    return [first, last]
