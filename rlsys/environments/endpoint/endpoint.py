"""OpenAI-compatible HTTP endpoint, through which any program can play episodes.

    agent ──HTTP──► EndpointServer ──key──► Episode ──► sampler
                                              └─► token tree: requests and replies are the rollout

One server on 127.0.0.1 serves all episodes of a worker. Each episode has its own API key, which is
valid while its function runs. All requests with the key are part of the rollout: a prompt that
continues an earlier one reuses its tokens, other prompts start branches.

The trainer recomputes log-probabilities at the run's temperature, so replies are sampled at it. A
request's temperature, top_p, seed and penalties are not used; the answer lists them in `ignored`.
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
    RequestError,
    RequestOptions,
    body_of,
    echoes,
    forced_tools,
    invalid,
    messages_of,
    options_of,
    prompts_of,
    tools_of,
)
from rlsys.environments.endpoint.openai_responses import (
    ResponseAnswer,
    chat_body,
    ignored_of,
    renamed,
    response_answer,
)
from rlsys.environments.environment import Endpoint, Environment
from rlsys.environments.episode import Episode, EpisodeOver, Turn
from rlsys.environments.tools.tool_formats import ToolFormat, chosen_format
from rlsys.environments.tools.tool_grammars import behind_reasoning, either
from rlsys.errors import InvalidValue
from rlsys.text.messages import Message
from rlsys.types import MAX_BRANCHES

# Maximum number of concurrent calls of an episode. Further ones are answered with status 429.
MAX_CALLS = 64

# Maximum length of a request's body.
MAX_BODY_BYTES = 16 * 2**20

# Time for the body of a request to arrive, after which a client gets an answer.
BODY_TIMEOUT_S = 60.0

# Maximum length of the schemas of a request. The engine compiles them, in up to some seconds.
MAX_STRUCTURE_BYTES = 32 * 2**10

ROUTES = "POST /v1/chat/completions, POST /v1/responses, POST /v1/completions and GET /v1/models"

# Time for connections to close when the server stops. No call is running by then.
SHUTDOWN_TIMEOUT_S = 1.0


@dataclass(kw_only=True, eq=False)
class _Session:
    """The episode of one API key."""

    episode: Episode
    calls: set[asyncio.Task[Any]] = field(default_factory=set)  # running ones
    # Messages up to the reply of each response, by its id. The reply is the turn's own object.
    responses: dict[str, list[Message]] = field(default_factory=dict)
    has_reported_end: bool = False  # a call was not answered, or not in full: the episode is over
    is_closed: bool = False


Answered = tuple[Answer | ResponseAnswer, RequestOptions]


class EndpointServer:
    """HTTP server of the episodes of one worker.

    `template` is the text of the chat template. It determines the format of tool calls unless the
    environment does.
    """

    def __init__(self, environment: Environment, template: str | None) -> None:
        self._environment = environment
        self._template = template
        self._sessions: dict[str, _Session] = {}
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def start(self) -> None:
        """Listen on a free port of 127.0.0.1."""
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
            handler_cancellation=True,  # stop sampling when the client disconnects
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self._url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        """Stop the server."""
        if self._runner is not None:
            await self._runner.cleanup()

    @contextlib.contextmanager
    def opened(self, episode: Episode) -> Iterator[Endpoint]:
        """Return the endpoint of an episode for an agent.

        When the block ends, the key becomes invalid and running calls are cancelled. If the agent
        raises after a call was answered that the episode is over, EpisodeOver is raised instead.
        """
        key = secrets.token_urlsafe(24)
        session = self._sessions[key] = _Session(episode=episode)
        try:
            yield Endpoint(url=self._url, key=key)
        except Exception as error:
            if session.has_reported_end:
                raise EpisodeOver(
                    f"the agent raised {type(error).__name__} after the episode was over"
                ) from None
            raise
        finally:
            del self._sessions[key]
            session.is_closed = True
            for call in session.calls:
                call.cancel()

    # Requests

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._session(request)
        except RequestError as error:
            return _error_response(error)
        return web.json_response(MODELS)

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        return _error_response(
            RequestError(
                f"{request.method} {request.path}: there is no such route. Use {ROUTES}.",
                status=404,
                code="not_found",
            )
        )

    def _answers(
        self, answer: Callable[[_Session, Mapping[str, Any]], Coroutine[Any, Any, Answered]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return the handler of a route."""

        async def work(request: web.Request, session: _Session) -> Answered:
            data = await _read(request)
            if session.episode.is_over:  # do not parse megabytes for nothing
                raise EpisodeOver("the episode is over")
            return await answer(session, body_of(data))

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                session = self._session(request)
                reply, options = await self._run(session, work(request, session))
            except RequestError as error:
                return _error_response(error)
            if not options.is_stream:
                return web.json_response(reply.whole)
            return await _streamed(request, reply.stream(options))

        return handle

    def _session(self, request: web.Request) -> _Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            raise RequestError(
                "the API key is not that of a running episode. Use endpoint.key, while the agent's "
                "function runs.",
                status=401,
                code="invalid_api_key",
            )
        return session

    async def _run(self, session: _Session, work: Coroutine[Any, Any, Answered]) -> Answered:
        """Run a call and return its answer.

        Raises RequestError for the client, and CancelledError if it has disconnected.
        """
        episode = session.episode
        if (num_calls := len(session.calls)) >= MAX_CALLS:
            work.close()
            raise RequestError(
                f"this episode has {num_calls} running calls, at most {MAX_CALLS} are possible. "
                "Wait until one ends.",
                status=429,
                code="rate_limit_exceeded",
            )
        call = asyncio.create_task(work)
        session.calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if not session.is_closed:
                raise
            raise RequestError(
                "the agent's function has ended, which cancels its running calls. Await them "
                "before it returns.",
                status=401,
                code="invalid_api_key",
            ) from None
        except EpisodeOver:
            session.has_reported_end = True
            raise _over(episode) from None
        except RequestError:
            raise
        # A sampler may raise any error.
        except Exception as error:
            if episode.failure is None and isinstance(error, ValueError):
                raise RequestError(str(error)) from None
            episode.failure = episode.failure or error
            raise RequestError(
                f"the episode has failed, not because of the agent: {episode.failure!r}",
                status=500,
                code="episode_failed",
            ) from error
        finally:
            session.calls.discard(call)

    # Answers

    async def _chat(self, session: _Session, body: Mapping[str, Any]) -> Answered:
        options, episode = options_of(body, is_chat=True), session.episode
        turns = await self._replies(session, body, messages_of(body), options)
        return chat_answer(turns, options, episode.codec.boundary.decode_written), options

    async def _response(self, session: _Session, body: Mapping[str, Any]) -> Answered:
        (chat, sources), episode = chat_body(body, session.responses), session.episode
        options = replace(
            options_of(chat, is_chat=True), ignored=ignored_of(body), format_field="text.format"
        )
        known = session.responses.get(body.get("previous_response_id") or "", ())
        messages = messages_of(chat, known)
        try:
            (turn,) = await self._replies(session, chat, messages, options)
        except InvalidValue as error:
            raise renamed(error, sources) from None
        assert turn is not None
        response = response_answer(turn, body, options, episode.codec.boundary.decode_written)
        if body.get("instructions"):  # a later response has its own
            messages = messages[1:]
        session.responses[response.id] = [*messages, turn.message]
        return response, options

    async def _replies(
        self,
        session: _Session,
        body: Mapping[str, Any],
        messages: list[Message],
        options: RequestOptions,
    ) -> list[Turn | None]:
        tools, episode = tools_of(body), session.episode
        tool_format = self._format if tools else None  # raises before anything is sampled
        structure = await _checked(self._structure(episode, body, options, tools), options)
        turns = await episode.replies(
            messages,
            num=options.num_answers,
            tools=tools,
            max_tokens=options.max_tokens,
            stop=options.stop,
            structure=structure,
        )
        session.has_reported_end |= None in turns
        for turn in turns:
            if turn is not None:
                without_stop(turn, options.stop)
                if tool_format is not None:
                    _split_calls(episode, turn, tool_format, tools)
        return turns

    async def _completion(self, session: _Session, body: Mapping[str, Any]) -> Answered:
        options, episode = options_of(body, is_chat=False), session.episode
        is_echoed = echoes(body, options)
        prompts = prompts_of(body, episode.codec.vocabulary_size)
        if (num := len(prompts) * options.num_answers) > MAX_ANSWERS:
            raise RequestError(
                f"n={options.num_answers}: {len(prompts)} prompts would get {num} answers. Request "
                f"at most {MAX_ANSWERS} at a time."
            )
        structure = await _checked(options.format, options)
        given = [episode.text_prompt(one) for one in prompts]
        turns = await episode.complete(
            given,
            num=options.num_answers,
            max_tokens=options.max_tokens,
            stop=options.stop,
            structure=structure,
        )
        session.has_reported_end |= None in turns
        for turn in turns:
            if turn is not None:
                without_stop(turn, options.stop)
        echoed = [
            one.text if is_echoed else "" for one in given for _ in range(options.num_answers)
        ]
        decode = episode.codec.boundary.decode_written
        return text_answer(turns, options, decode, echoed=echoed), options

    def _structure(
        self,
        episode: Episode,
        body: Mapping[str, Any],
        options: RequestOptions,
        tools: list[Message],
    ) -> Format | None:
        """Return the format that a reply to a chat must match; None if there is none."""
        forced = forced_tools(body, tools)
        if not forced and options.format is None:
            return None
        calls = self._format.calls if tools else None
        if forced and calls is None:
            raise invalid(
                "tool_choice",
                body["tool_choice"],
                f"calls in the format {self._format.name!r} cannot be forced",
                "Use 'auto', or define `calls` in the ToolFormat.",
            )
        several = body.get("parallel_tool_calls") is not False
        formats = [calls(forced or tools, several)] if calls is not None else []
        if not forced and options.format is not None:
            formats.append(options.format)
        codec = episode.codec
        if codec.writes_channels:
            raise RequestError(
                f"{options.format_field} and tool_choice are not supported for a model that writes "
                "channels. Remove them."
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
    """Move the tool calls of a reply from its content to `tool_calls`.

    A reply with a malformed call stays a text, since clients raise on calls without a name or
    with arguments that are not an object.
    """
    message = turn.message
    reply = tool_format.parse(message["content"], tools, num_before=episode.num_tool_calls)
    if reply.calls and not any(call.error for call in reply.calls):
        episode.num_tool_calls += len(reply.calls)
        message["content"] = reply.content
        message["tool_calls"] = reply.tool_calls


async def _checked(format: Format | None, options: RequestOptions) -> str:
    """Return the structural tag of a format. Raises RequestError if it cannot be compiled."""
    if format is None:
        return ""
    structure = structural_tag(format)
    if len(structure.encode()) > MAX_STRUCTURE_BYTES:
        raise RequestError(
            f"the schemas of {options.format_field} or tools are longer than "
            f"{MAX_STRUCTURE_BYTES} bytes. Simplify them."
        )
    try:
        await asyncio.to_thread(check_structure, structure)  # imports xgrammar the first time
    except ValueError as error:
        raise RequestError(
            f"the schemas of {options.format_field} or tools are not supported: {error}. Simplify "
            "them."
        ) from None
    return structure


def _over(episode: Episode) -> RequestError:
    if episode.is_truncated:
        return RequestError(
            "this episode is over: its tokens (sampling.max_tokens) or its context are used up. "
            "Return its reward.",
            code="context_length_exceeded",
        )
    if episode.is_out_of_branches:
        return RequestError(
            f"this episode is over: its {MAX_BRANCHES} branches (conversations that do not "
            "continue each other) are used up. Return its reward.",
            code="max_branches_exceeded",
        )
    return RequestError(
        f"this episode is over: its {episode.environment.max_turns} turns (max_turns) are used up. "
        "Return its reward.",
        code="max_turns_exceeded",
    )


async def _read(request: web.Request) -> bytes:
    """Return the body of a request. Raises RequestError if it does not arrive or is malformed.

    After a malformed chunk, aiohttp waits for the rest of the body without an error.
    """
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise RequestError(
            f"the request is longer than {MAX_BODY_BYTES} bytes. Send less.",
            status=413,
            code="request_too_large",
        ) from None
    except TimeoutError:
        raise RequestError(
            f"the body of the request did not arrive within {BODY_TIMEOUT_S:g} s, or a chunk of it "
            "is malformed. Send it again.",
            status=408,
            code="request_timeout",
        ) from None
    # A disconnected client (OSError) gets no answer, and must not fail its episode.
    except (web.RequestPayloadError, HttpProcessingError, OSError) as error:
        raise RequestError(
            f"body: cannot be decoded ({' '.join(str(error).split())}). Send JSON with its "
            "Content-Length and without Content-Encoding."
        ) from None


async def _streamed(request: web.Request, events: str) -> web.StreamResponse:
    """Send server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(events.encode())
    return response


def _server_logger() -> logging.Logger:
    """Return aiohttp's logger without tracebacks of malformed requests and bodies (status 400)."""
    logger = logging.getLogger("rlsys.environments.endpoint.endpoint")
    logger.addFilter(_is_our_error)  # adding it again has no effect
    return logger


def _is_our_error(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


def _error_response(error: RequestError) -> web.Response:
    """Return the response for an error.

    Its headers make OpenAI's client retry after status 429 and not after 500.
    """
    status = error.status
    headers = {429: {"Retry-After": "1"}, 500: {"x-should-retry": "false"}}.get(status, {})
    fields = error_fields(str(error), error.code, status)
    return web.json_response(fields, status=status, headers=headers)
