"""An OpenAI-compatible endpoint: programs that know nothing of this project play episodes there.

    agent ──HTTP──► EndpointServer ──key──► Episode ──► sampler
                                              └─► its tree of tokens: what was asked is the rollout

One server for all episodes of a worker, on this machine alone; an episode has a key of its own, and
lives as long as its function runs. Whatever is asked with the key belongs to the rollout: a prompt
that goes on from an earlier one reuses its tokens, others are branches.

Sampled is at the run's own temperature, whose probabilities the trainer recomputes: a request's
temperature, top_p, seed and penalties are not followed, and the answer says so in `ignored`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rlsys.environments.episode import Episode, EpisodeFailed, EpisodeOver, Turn
from rlsys.environments.tool_formats import ToolFormat, detect

# Of one episode at a time; agents that fan out further are told to wait.
MAX_CALLS = 64

# Of one request, in answers (`n`).
MAX_ANSWERS = 64

# Of a request's body.
MAX_BODY_BYTES = 16 * 2**20

# What a request may ask for that is not followed.
IGNORED = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What an agent is given. `url` ends with /v1, as clients take it."""

    url: str
    key: str
    model: str = "policy"


class _Refused(Exception):
    """A request that cannot be answered; the message says the value, the rule and the fix."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(kw_only=True, eq=False)
class _Session:
    episode: Episode
    num_running: int = 0


class EndpointServer:
    """`template`: the chat template's text, which says how the model writes calls of tools."""

    def __init__(self, template: str | None) -> None:
        self._template = template
        self._format: ToolFormat | None = None
        self._sessions: dict[str, _Session] = {}
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def start(self) -> None:
        """Listens on a free port of 127.0.0.1."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self._url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, episode: Episode) -> Endpoint:
        """For one episode; `shut` must follow."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = _Session(episode=episode)
        return Endpoint(url=self._url, key=key)

    def shut(self, endpoint: Endpoint) -> None:
        """Its key opens nothing any more."""
        self._sessions.pop(endpoint.key, None)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._session(request)
        except _Refused as refusal:
            return _error(refusal)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "rlsys"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, self._chat_answers)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, self._text_answers)

    async def _answered(self, request: web.Request, answer: Any) -> web.StreamResponse:
        try:
            session = self._session(request)
            if session.num_running >= MAX_CALLS:
                raise _Refused(
                    f"this episode has {session.num_running} calls under way; it may have "
                    f"{MAX_CALLS} at a time. Wait for one to end.",
                    status=429,
                    code="rate_limit_exceeded",
                )
            session.num_running += 1
            try:
                body = await _body(request)
                response: web.StreamResponse = await answer(request, session.episode, body)
                return response
            finally:
                session.num_running -= 1
        except _Refused as refusal:
            return _error(refusal)
        except EpisodeOver:
            return _error(
                _Refused(
                    "this episode is over: its turns (max_turns), its tokens (sampling.max_tokens) "
                    "or its context are used up. Return what it is worth.",
                    code="context_length_exceeded",
                )
            )
        except (ValueError, EpisodeFailed) as error:
            return _error(_Refused(str(error)))

    def _session(self, request: web.Request) -> _Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            raise _Refused(
                "the key is of no episode that runs; use the one that the agent was given "
                "(endpoint.key), while its function runs.",
                status=401,
                code="invalid_api_key",
            )
        return session

    async def _chat_answers(
        self, request: web.Request, episode: Episode, body: Mapping[str, Any]
    ) -> web.StreamResponse:
        messages = _messages(body.get("messages"))
        tools = _tools(body)
        asked = _asked(body)
        turns = await _side_by_side(
            episode.turn(messages, tools=tools, max_tokens=asked.max_tokens, stop=asked.stop)
            for _ in range(asked.num_answers)
        )
        for turn in turns:
            if tools:
                self._split_calls(episode, turn, tools)
        choices = [
            {
                "index": index,
                "message": turn.message,
                "logprobs": {"content": _logprobs(episode, turn)} if asked.logprobs else None,
                "finish_reason": _reason(turn),
            }
            for index, turn in enumerate(turns)
        ]
        head = _head("chat.completion", turns, body)
        if asked.stream:
            return await _streamed(request, head, [_deltas(choice) for choice in choices])
        return web.json_response({**head, "choices": choices, "usage": _usage(turns)})

    async def _text_answers(
        self, request: web.Request, episode: Episode, body: Mapping[str, Any]
    ) -> web.StreamResponse:
        prompt = body.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise _Refused(f"prompt={prompt!r:.80} is no text; give one, not empty.")
        asked = _asked(body)
        turns = await _side_by_side(
            episode.complete(prompt, max_tokens=asked.max_tokens, stop=asked.stop)
            for _ in range(asked.num_answers)
        )
        choices: list[dict[str, Any]] = [
            {
                "index": index,
                "text": turn.text,
                "logprobs": _text_logprobs(episode, turn) if asked.logprobs else None,
                "finish_reason": _reason(turn),
            }
            for index, turn in enumerate(turns)
        ]
        head = _head("text_completion", turns, body)
        if asked.stream:
            return await _streamed(request, head, [[choice] for choice in choices])
        return web.json_response({**head, "choices": choices, "usage": _usage(turns)})

    def _split_calls(
        self, episode: Episode, turn: Turn, tools: Sequence[Mapping[str, Any]]
    ) -> None:
        if self._format is None:
            self._format = detect(self._template)
        reply = self._format.parse(
            turn.message["content"], tools, num_before=episode.num_tool_calls
        )
        if reply.calls:
            episode.num_tool_calls += len(reply.calls)
            turn.message["content"] = reply.content
            turn.message["tool_calls"] = reply.tool_calls


@dataclass(frozen=True, kw_only=True)
class _Asked:
    max_tokens: int | None
    stop: tuple[str, ...]
    num_answers: int
    logprobs: bool
    stream: bool


def _asked(body: Mapping[str, Any]) -> _Asked:
    for name in ("response_format", "audio", "functions", "echo", "suffix", "best_of"):
        if body.get(name) not in (None, False, 1, {"type": "text"}):
            raise _Refused(f"{name}={body[name]!r:.80} is not supported here; leave it out.")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise _Refused(f"max_tokens={limit!r:.40} is no number of tokens; give at least 1.")
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(one, str) for one in stop):
        raise _Refused(f"stop={stop!r:.80} is no list of texts; give some.")
    num = body.get("n") or 1
    if not isinstance(num, int) or not 1 <= num <= MAX_ANSWERS:
        raise _Refused(f"n={num!r:.40} is no number of answers; give 1 to {MAX_ANSWERS}.")
    return _Asked(
        max_tokens=limit,
        stop=stop,
        num_answers=num,
        logprobs=bool(body.get("logprobs")),
        stream=bool(body.get("stream")),
    )


def _messages(given: Any) -> list[dict[str, Any]]:
    """As a chat template takes them: contents of parts become their texts."""
    if not isinstance(given, list) or not given:
        raise _Refused(f"messages={given!r:.80} is no list of messages; give at least one.")
    messages = []
    for number, message in enumerate(given):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _Refused(f"messages[{number}]={message!r:.80} has no role; give one.")
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            if len(parts) < len(content) or not all(isinstance(part, str) for part in parts):
                raise _Refused(f"messages[{number}] has parts that are no text; give text alone.")
            message = {**message, "content": "".join(map(str, parts))}
        if message["role"] == "developer":
            message = {**message, "role": "system"}
        messages.append({key: value for key, value in message.items() if value is not None})
    return messages


def _tools(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise _Refused(f"tools={tools!r:.80} is no list of schemas; give some in OpenAI's shape.")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise _Refused(f"tool_choice={body['tool_choice']!r:.80} cannot be forced; use 'auto'.")
    return [] if body.get("tool_choice") == "none" else tools


async def _body(request: web.Request) -> Mapping[str, Any]:
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise _Refused(
            f"the request is longer than {MAX_BODY_BYTES} bytes; send less.", status=413
        ) from None
    except ValueError as error:
        raise _Refused(f"the body is no JSON ({error}); send an object.") from None
    if not isinstance(body, dict):
        raise _Refused(f"the body is {body!r:.80}; send an object.")
    return body


async def _side_by_side(works: Any) -> list[Turn]:
    """The turns, in order; the first error of any, once the others were ended."""
    works = list(works)
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _reason(turn: Turn) -> str:
    if turn.message.get("tool_calls"):
        return "tool_calls"
    return "length" if turn.is_truncated else "stop"


def _head(kind: str, turns: Sequence[Turn], body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": "policy",
        # Beside OpenAI's: which weights sampled it, and what of the request was not followed.
        "policy_version": max(turn.policy_version for turn in turns),
        "ignored": [name for name in IGNORED if body.get(name) is not None],
    }


def _usage(turns: Sequence[Turn]) -> dict[str, int]:
    prompt, said = turns[0].num_prompt_tokens, sum(len(turn.token_ids) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def _logprobs(episode: Episode, turn: Turn) -> list[dict[str, Any]]:
    texts = [episode.codec.text.decode([token]) for token in turn.token_ids]
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, turn.logprobs, strict=True)
    ]


def _text_logprobs(episode: Episode, turn: Turn) -> dict[str, Any]:
    return {
        "tokens": [episode.codec.text.decode([token]) for token in turn.token_ids],
        "token_logprobs": list(turn.logprobs),
    }


def _deltas(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A choice as the chunks of a stream: the message, then why it ended."""
    message = dict(choice["message"])
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": n, **call} for n, call in enumerate(calls)]
    first = {"index": choice["index"], "delta": message, "finish_reason": None}
    if choice["logprobs"] is not None:
        first["logprobs"] = choice["logprobs"]
    last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
    return [first, last]


async def _streamed(
    request: web.Request, head: Mapping[str, Any], chunks: Sequence[Sequence[Mapping[str, Any]]]
) -> web.StreamResponse:
    """Server-sent events. The reply is whole by now: a stream of it is a convenience of clients."""
    kind = head["object"]
    told = {**head, "object": f"{kind}.chunk" if kind.startswith("chat") else kind}
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for of_choice in chunks:
        for chunk in of_choice:
            await response.write(f"data: {json.dumps({**told, 'choices': [chunk]})}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def _error(refusal: _Refused) -> web.Response:
    error = {"message": str(refusal), "type": "invalid_request_error", "code": refusal.code}
    return web.json_response({"error": {**error, "param": None}}, status=refusal.status)
