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
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rlsys.common.structural_tags import Format, check_structure, structural_tag
from rlsys.environments.endpoint.openai_answers import (
    MODELS,
    Answer,
    chat_answer,
    error_fields,
    text_answer,
    without_stop,
)
from rlsys.environments.endpoint.openai_requests import (
    MAX_ANSWERS,
    Asked,
    RequestError,
    asked_of,
    body_of,
    echoes,
    forced_tools,
    messages_of,
    prompts_of,
    tools_of,
)
from rlsys.environments.endpoint.openai_responses import (
    ResponseAnswer,
    chat_body,
    ignored_of,
    response_answer,
)
from rlsys.environments.environment import Endpoint, Environment
from rlsys.environments.episode import Episode, EpisodeOver, Turn
from rlsys.environments.tools.tool_formats import ToolFormat, chosen_format
from rlsys.environments.tools.tool_grammars import behind_reasoning, either
from rlsys.text.messages import Message
from rlsys.types import MAX_BRANCHES

# Of one episode at a time; agents that fan out further are told to wait.
MAX_CALLS = 64

# Of a request's body.
MAX_BODY_BYTES = 16 * 2**20

ROUTES = "POST /v1/chat/completions, POST /v1/responses, POST /v1/completions and GET /v1/models"

# For connections to end when the server does; no call is under way by then.
SHUTDOWN_TIMEOUT_S = 1.0


@dataclass(kw_only=True, eq=False)
class _Session:
    """What one key opens."""

    episode: Episode
    calls: set[asyncio.Task[Any]] = field(default_factory=set)  # under way
    # Messages up to the reply of each response, by its id.
    responses: dict[str, list[Message]] = field(default_factory=dict)
    is_told_over: bool = False
    is_shut: bool = False


Answered = tuple[Answer | ResponseAnswer, Asked]


class EndpointServer:
    """Of the episodes of one worker. `template`: the chat template's text, which says how the model
    writes calls of tools where the environment does not.
    """

    def __init__(self, environment: Environment, template: str | None) -> None:
        self._environment = environment
        self._template = template
        self._sessions: dict[str, _Session] = {}
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def start(self) -> None:
        """Listens on a free port of 127.0.0.1."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._answers(self._chat))
        app.router.add_post("/v1/responses", self._answers(self._response))
        app.router.add_post("/v1/completions", self._answers(self._completion))
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_server_logger(),
            handler_cancellation=True,  # a client that has gone wants no reply
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self._url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @contextlib.contextmanager
    def opened(self, episode: Episode) -> Iterator[Endpoint]:
        """What an agent is given, for as long as it runs: behind it the key opens nothing, and what
        was still asked with it is given up. Raises EpisodeOver where the agent was told that its
        episode is over, and raised because it could not go on.
        """
        key = secrets.token_urlsafe(24)
        session = self._sessions[key] = _Session(episode=episode)
        try:
            yield Endpoint(url=self._url, key=key)
        except Exception as error:
            if session.is_told_over:
                told = f"the agent raised {type(error).__name__} when it was told that it is over"
                raise EpisodeOver(told) from None
            raise
        finally:
            del self._sessions[key]
            session.is_shut = True
            for call in session.calls:
                call.cancel()

    # Requests

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._session(request)
        except RequestError as refusal:
            return _refused(refusal)
        return web.json_response(MODELS)

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        return _refused(
            RequestError(
                f"{request.method} {request.path} is not served here; there are {ROUTES}.",
                status=404,
                code="not_found",
            )
        )

    def _answers(
        self, answer: Callable[[_Session, Mapping[str, Any]], Coroutine[Any, Any, Answered]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The handler of a route."""

        async def work(request: web.Request, session: _Session) -> Answered:
            return await answer(session, body_of(await _read(request)))

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                session = self._session(request)
                made, asked = await self._done(session, work(request, session))
            except RequestError as refusal:
                return _refused(refusal)
            if not asked.is_stream:
                return web.json_response(made.whole)
            return await _streamed(request, made.stream(asked))

        return handle

    def _session(self, request: web.Request) -> _Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            raise RequestError(
                "the key is of no episode that runs; use the one that the agent was given "
                "(endpoint.key), while its function runs.",
                status=401,
                code="invalid_api_key",
            )
        return session

    async def _done(self, session: _Session, work: Coroutine[Any, Any, Answered]) -> Answered:
        """Raises Refused for whatever the client is to be told, and CancelledError where it has
        gone.
        """
        episode = session.episode
        if (num_calls := len(session.calls)) >= MAX_CALLS:
            work.close()
            raise RequestError(
                f"this episode has {num_calls} calls under way; it may have {MAX_CALLS} at a "
                "time. Wait for one to end.",
                status=429,
                code="rate_limit_exceeded",
            )
        call = asyncio.create_task(work)
        session.calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if not session.is_shut:
                raise
            raise RequestError(
                "the agent's function has ended, and with it the calls that were under way; await "
                "them before it returns.",
                status=401,
                code="invalid_api_key",
            ) from None
        except EpisodeOver:
            session.is_told_over = True
            raise _over(episode) from None
        except RequestError:
            raise
        # Of what a sampler raises nothing is known.
        except Exception as error:
            if episode.failure is None and isinstance(error, ValueError):
                raise RequestError(str(error)) from None
            episode.failure = episode.failure or error
            raise RequestError(
                f"the episode cannot go on, through no fault of the agent's: {episode.failure!r}",
                status=500,
                code="episode_failed",
            ) from error
        finally:
            session.calls.discard(call)

    # Answers

    async def _chat(self, session: _Session, body: Mapping[str, Any]) -> Answered:
        asked, episode = asked_of(body), session.episode
        turns = await self._replies(episode, body, asked)
        return chat_answer(turns, asked, episode.codec.boundary.decode_written), asked

    async def _response(self, session: _Session, body: Mapping[str, Any]) -> Answered:
        chat, episode = chat_body(body, session.responses), session.episode
        asked = replace(asked_of(chat), ignored=ignored_of(body))
        (turn,) = await self._replies(episode, chat, asked)
        made = response_answer(turn, body, asked, episode.codec.boundary.decode_written)
        messages = chat["messages"][1 if body.get("instructions") else 0 :]
        session.responses[made.id] = [*messages, turn.message]
        return made, asked

    async def _replies(self, episode: Episode, body: Mapping[str, Any], asked: Asked) -> list[Turn]:
        messages, tools = messages_of(body), tools_of(body)
        tool_format = self._format if tools else None  # refused before anything is sampled
        structure = await _checked(self._structure(episode, body, asked, tools))
        turns = await _side_by_side(
            episode.turn(
                messages,
                tools=tools,
                max_tokens=asked.max_tokens,
                stop=asked.stop,
                structure=structure,
            )
            for _ in range(asked.num_answers)
        )
        for turn in turns:
            without_stop(turn, asked.stop)
            if tool_format is not None:
                _split_calls(episode, turn, tool_format, tools)
        return turns

    async def _completion(self, session: _Session, body: Mapping[str, Any]) -> Answered:
        asked, episode = asked_of(body), session.episode
        prompts, is_echoed = prompts_of(body), echoes(body, asked)
        if (num := len(prompts) * asked.num_answers) > MAX_ANSWERS:
            raise RequestError(
                f"{len(prompts)} prompts with n={asked.num_answers} are {num} answers; ask for at "
                f"most {MAX_ANSWERS} at a time."
            )
        for prompt in prompts:
            _check_token_ids(episode, prompt)
        structure = await _checked(asked.format)
        turns = await _side_by_side(
            episode.complete(
                prompt, max_tokens=asked.max_tokens, stop=asked.stop, structure=structure
            )
            for prompt in prompts
            for _ in range(asked.num_answers)
        )
        decode = episode.codec.boundary.decode_written
        texts = [one if isinstance(one, str) else decode(one) for one in prompts]
        echoed = [text if is_echoed else "" for text in texts for _ in range(asked.num_answers)]
        for turn in turns:
            without_stop(turn, asked.stop)
        return text_answer(turns, asked, decode, echoed=echoed), asked

    def _structure(
        self, episode: Episode, body: Mapping[str, Any], asked: Asked, tools: list[Message]
    ) -> Format | None:
        """Return the format that a reply to a chat must have; None if it may have any."""
        forced = forced_tools(body, tools)
        if not forced and asked.format is None:
            return None
        calls = self._format.calls if tools else None
        if forced and calls is None:
            raise RequestError(
                f"tool_choice={body['tool_choice']!r}: calls in the format {self._format.name!r} "
                "cannot be forced. Use 'auto', or give the ToolFormat its calls."
            )
        several = body.get("parallel_tool_calls") is not False
        formats = [calls(forced or tools, several)] if calls is not None else []
        if not forced and asked.format is not None:
            formats.append(asked.format)
        codec = episode.codec
        if codec.writes_channels:
            raise RequestError(
                "response_format and tool_choice are not supported for a model that writes "
                "channels. Leave them out."
            )
        if (thinking := codec.thinking) is None:
            return either(formats)
        return behind_reasoning(
            either(formats), start=thinking.start, end=thinking.end, is_begun=thinking.is_begun
        )

    @cached_property
    def _format(self) -> ToolFormat:
        return chosen_format(self._environment.tool_format, self._template)


def _split_calls(
    episode: Episode, turn: Turn, tool_format: ToolFormat, tools: list[Message]
) -> None:
    """Take the calls out of a reply. A reply with a call that cannot be read stays a text: clients
    raise on a call without a name or with arguments that are no object.
    """
    message = turn.message
    reply = tool_format.parse(message["content"], tools, num_before=episode.num_tool_calls)
    if reply.calls and not any(call.error for call in reply.calls):
        episode.num_tool_calls += len(reply.calls)
        message["content"] = reply.content
        message["tool_calls"] = reply.tool_calls


async def _checked(format: Format | None) -> str:
    """Return the structural tag of a format. Raises Refused for one that cannot be compiled."""
    if format is None:
        return ""
    structure = structural_tag(format)
    try:
        await asyncio.to_thread(check_structure, structure)  # imports xgrammar the first time
    except ValueError as error:
        raise RequestError(
            f"the schemas of response_format or tools cannot be followed: {error}. Simplify them."
        ) from None
    return structure


def _check_token_ids(episode: Episode, prompt: str | list[int]) -> None:
    if not isinstance(prompt, str) and max(prompt) >= episode.codec.vocabulary_size:
        raise RequestError(
            f"prompt has token {max(prompt)}; the model knows 0 to "
            f"{episode.codec.vocabulary_size - 1}. Use its own tokenizer."
        )


def _over(episode: Episode) -> RequestError:
    if episode.is_truncated:
        return RequestError(
            "this episode is over: its tokens (sampling.max_tokens) or its context are used up. "
            "Return what it is worth.",
            code="context_length_exceeded",
        )
    if episode.is_out_of_branches:
        return RequestError(
            f"this episode is over: its {MAX_BRANCHES} branches (conversations that do not go on "
            "from each other) are used up. Return what it is worth.",
            code="max_branches_exceeded",
        )
    return RequestError(
        f"this episode is over: its {episode.environment.max_turns} turns (max_turns) are used up. "
        "Return what it is worth.",
        code="max_turns_exceeded",
    )


async def _read(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise RequestError(
            f"the request is longer than {MAX_BODY_BYTES} bytes; send less.",
            status=413,
            code="request_too_large",
        ) from None


async def _side_by_side(works: Iterator[Coroutine[Any, Any, Turn]]) -> list[Turn]:
    """The turns, in order; the first error of any, once the others have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    if len(tasks) == 1:
        return [await tasks[0]]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _streamed(request: web.Request, events: str) -> web.StreamResponse:
    """Send server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(events.encode())
    return response


def _server_logger() -> logging.Logger:
    """Return aiohttp's logger, less the tracebacks of requests that are no HTTP: the client gets
    status 400, and nothing is wrong here.
    """
    logger = logging.getLogger("rlsys.environments.endpoint.endpoint")
    logger.addFilter(_is_ours)  # the same one once
    return logger


def _is_ours(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


def _refused(refusal: RequestError) -> web.Response:
    """OpenAI's client tries again what was refused for its number, and, but for the header, what
    failed.
    """
    status = refusal.status
    headers = {429: {"Retry-After": "1"}, 500: {"x-should-retry": "false"}}.get(status, {})
    fields = error_fields(str(refusal), refusal.code, status)
    return web.json_response(fields, status=status, headers=headers)
