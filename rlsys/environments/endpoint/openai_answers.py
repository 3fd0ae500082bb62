"""The policy's replies in the shapes in which OpenAI's API tells them.

In: the turns that a request asked for. Out: objects for JSON, whole or as the chunks of a stream.

Beside OpenAI's fields an answer has `policy_version`, the newest weights that sampled it, and
`ignored`, what of the request was not followed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.common.safe_json import dump_json
from rlsys.environments.endpoint.openai_requests import Asked
from rlsys.environments.episode import Turn

MODEL = "policy"
MODELS = {
    "object": "list",
    "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "rlsys"}],
}

Decode = Callable[[list[int]], str]
Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """To one request: `whole`, or the `chunks` of a stream."""

    head: Fields
    choices: list[Fields]
    usage: Fields

    @property
    def whole(self) -> Fields:
        return {**self.head, "choices": self.choices, "usage": self.usage}

    def stream(self, asked: Asked) -> str:
        """Return the server-sent events of a stream."""
        told = [*map(dump_json, self.chunks(has_usage=asked.has_usage)), "[DONE]"]
        return "".join(f"data: {one}\n\n" for one in told)

    def chunks(self, *, has_usage: bool) -> list[Fields]:
        """The reply is there by now, so each choice is one chunk, and one that says why it ended;
        a stream of it is for clients that only read streams.
        """
        is_chat = self.head["object"] == "chat.completion"
        head = {**self.head, "object": "chat.completion.chunk"} if is_chat else self.head
        said = [delta for one in self.choices for delta in (_deltas(one) if is_chat else [one])]
        told = [{**head, "choices": [one]} for one in said]
        return [*told, {**head, "choices": [], "usage": self.usage}] if has_usage else told


def chat_answer(turns: Sequence[Turn], asked: Asked, decode: Decode) -> Answer:
    head = _head("chatcmpl", "chat.completion", turns, asked)
    if asked.has_token_ids:
        head["prompt_token_ids"] = list(turns[0].prompt_token_ids)
    return Answer(
        head=head,
        choices=[
            {
                "index": index,
                "message": _message(turn),
                "logprobs": chat_logprobs(turn, decode) if asked.has_logprobs else None,
                "finish_reason": _finish_reason(turn),
                **({"token_ids": list(turn.token_ids)} if asked.has_token_ids else {}),
            }
            for index, turn in enumerate(turns)
        ],
        usage=_usage(turns, asked),
    )


def text_answer(
    turns: Sequence[Turn], asked: Asked, decode: Decode, *, echoed: Sequence[str]
) -> Answer:
    """`echoed`: what each text begins with, beside what was sampled."""
    return Answer(
        head=_head("cmpl", "text_completion", turns, asked),
        choices=[
            {
                "index": index,
                "text": before + turn.message["content"],
                "logprobs": _text_logprobs(turn, decode) if asked.has_logprobs else None,
                "finish_reason": _finish_reason(turn),
                **(_token_ids(turn) if asked.has_token_ids else {}),
            }
            for index, (turn, before) in enumerate(zip(turns, echoed, strict=True))
        ],
        usage=_usage(turns, asked),
    )


def _token_ids(turn: Turn) -> Fields:
    return {
        "prompt_token_ids": list(turn.prompt_token_ids),
        "token_ids": list(turn.token_ids),
    }


def without_stop(turn: Turn, stop: Sequence[str]) -> None:
    """Take off the text at which the reply ended, which clients do not expect to be told. Its
    tokens stay where they were sampled.
    """
    if turn.is_truncated:
        return
    content = turn.message["content"]
    ends = [content.find(one) for one in stop if one in content]
    if ends:
        turn.message["content"] = content[: min(ends)]


def error_fields(message: str, code: str, status: int) -> Fields:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}


def _head(prefix: str, kind: str, turns: Sequence[Turn], asked: Asked) -> Fields:
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "policy_version": max(turn.policy_version for turn in turns),
        "ignored": list(asked.ignored),
    }


def _message(turn: Turn) -> Mapping[str, Any]:
    """Empty beside calls, a content is None, as clients expect."""
    message = turn.message
    if message.get("tool_calls") and not message["content"]:
        return {**message, "content": None}
    return message


def _finish_reason(turn: Turn) -> str:
    if turn.is_truncated:
        return "length"
    return "tool_calls" if turn.message.get("tool_calls") else "stop"


def _usage(turns: Sequence[Turn], asked: Asked) -> Fields:
    """In tokens. A prompt counts once, however many answers there are to it."""
    prompt = sum(len(turn.prompt_token_ids) for turn in turns[:: asked.num_answers])
    said = sum(len(turn.token_ids) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def chat_logprobs(turn: Turn, decode: Decode) -> Fields:
    """Of all that was sampled: reasoning, calls and the end of the turn too."""
    return {"content": token_logprobs(turn, decode), "refusal": None}


def token_logprobs(turn: Turn, decode: Decode) -> list[Fields]:
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
    """The message, then why it ended."""
    message = dict(choice["message"])
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": n, **call} for n, call in enumerate(calls)]
    first = {**choice, "delta": message, "finish_reason": None}
    del first["message"]
    last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
    return [first, last]
