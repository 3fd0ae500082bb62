"""HTTP routes of the API for the `tinker` client 0.38, an ASGI application (starlette).

    POST /api/v1/...  ─► key ─► size ─► JSON or protobuf ─► service ─► {"request_id": ...}
    POST /api/v1/retrieve_future   waits up to LONG_POLL_S for one future; 408: try again
    POST /api/v1/retrieve_futures  waits for any future of a sampling client

An answer with a 4xx status has the reason as "error" and "detail". When the server ends, requests
that wait are answered with 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlsys.errors import InvalidValue
from rlsys.tinker_server import request_checks
from rlsys.tinker_server.api_errors import ApiError
from rlsys.tinker_server.futures import Failure
from rlsys.tinker_server.management_routes import (
    DOWNLOAD,
    METHODS,
    Handler,
    ManagementRoutes,
    Routes,
    UrlSigner,
    not_offered,
)
from rlsys.tinker_server.protobuf_messages import PROTOBUF, decode_pass
from rlsys.tinker_server.request_checks import Body, parse_json
from rlsys.tinker_server.request_waits import RequestWaits, server_ends
from rlsys.tinker_server.tinker_service import Service

logger = logging.getLogger(__name__)

# The client waits 45 s for an answer.
LONG_POLL_S = 30.0

# A body has so many seconds to arrive, and one more for each part of this many bytes. So a slow
# network may send a large body, and a client that sends a few bytes per second holds no connection.
BODY_S = 30.0
BODY_BYTES_PER_S = 1 << 16

# A larger body is decoded in a thread, so that the event loop can answer heartbeats.
SMALL_BODY = 1 << 18

KEY_PREFIX = "tml-"  # required by the client


def check_key(key: str) -> None:
    """Raise InvalidValue for a key that the client would refuse."""
    if not key.startswith(KEY_PREFIX) or len(key) < 12:
        raise InvalidValue(
            "TINKER_API_KEY",
            rule=f"must begin with {KEY_PREFIX!r}, as the client requires, and have at least 12 "
            "characters",
            fix="Set another key.",
        )


class Api:
    """The ASGI application of a service."""

    def __init__(self, service: Service, *, key: str, max_body_bytes: int) -> None:
        check_key(key)
        self._service = service
        self._key = key
        self._max_body_bytes = max_body_bytes
        self._zstd = _zstd_decompressor()
        self._waits = RequestWaits()

    def end_waits(self) -> None:
        """Answer the requests that wait, because the server ends."""
        self._waits.end()

    def application(self) -> Starlette:
        """Return the application."""
        service = self._service
        training, sampling = service.training, service.sampling
        post: Routes = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._answer(service.create_session),
            "session_heartbeat": self._answer(service.heartbeat),
            "create_sampling_session": self._answer(sampling.create_session),
            "join_sampling_session": self._answer(sampling.join_session),
            "get_info": self._answer(training.info),
            "asample": self._answer(sampling.sample),
            "create_model": self._command(training.create_model, service.make_room),
            "optim_step": self._command(training.optim_step),
            "save_weights": self._command(training.save_weights),
            "load_weights": self._command(training.load_weights, self._make_room_to_load),
            "save_weights_for_sampler": self._command(training.save_weights_for_sampler),
            "save_weights_external": self._command(training.save_weights_external),
            "unload_model": self._unload,
            "forward_backward": self._forward_backward,
            "retrieve_future": self._retrieve_future,
            "retrieve_futures": self._retrieve_futures,
            "cancel_future": self._cancel_future,
            "telemetry": self._telemetry,
            "sessions/{session}/finish": self._finish,
        }
        get: Routes = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._sampler,
        }
        management = ManagementRoutes(service.management, self._body, UrlSigner(self._key))
        routes = [
            Route(f"/api/v1/{path}", self._guarded(do), methods=[method])
            for method, ways in (("POST", post), ("GET", get), *management.routes)
            for path, do in ways.items()
        ]
        download = self._guarded(management.download, has_key=False)
        routes.append(Route(f"/api/v1/{DOWNLOAD}", download, methods=["GET"]))
        routes.append(Route("/{path:path}", self._guarded(not_offered), methods=METHODS))

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            async with self._service.running():
                yield

        return Starlette(routes=routes, lifespan=lifespan)

    # Wrappers of all routes.

    def _guarded(self, do: Handler, *, has_key: bool = True) -> Handler:
        """Return a handler that checks the key and answers errors as JSON."""

        async def guarded(request: Request) -> Response:
            response = await answered(request)
            if _is_unread(request) and response.status_code != 413:
                # The rest of the body, which may never come, would occupy the connection. After
                # 413 the client still sends, and would miss the answer.
                response.headers["connection"] = "close"
            return response

        async def answered(request: Request) -> Response:
            try:
                if has_key:
                    self._check_key(request)
                return await do(request)
            except ApiError as error:
                return _refusal(str(error), error.status)
            except ValueError as error:  # from the backend
                return _refusal(str(error), 422)
            except OSError as error:  # a full disk; the client would repeat a 5xx for minutes
                return _refusal(str(error), 422)
            except ClientDisconnect:
                return Response(status_code=499)
            except asyncio.CancelledError:
                if not self._waits.is_ending:
                    raise
                return _refusal(str(server_ends()), 503)

        return guarded

    def _check_key(self, request: Request) -> None:
        key = request.headers.get("x-api-key", "")
        if not key:
            key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(key.encode(), self._key.encode()):
            raise ApiError(
                "TINKER_API_KEY",
                rule="it is not the key of this server",
                fix="Set it to the key with which the server was started.",
                status=401,
            )

    async def _body(self, request: Request) -> bytes:
        limit = self._max_body_bytes
        parts, size = [], 0
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        try:
            async with self._waits.wait(), asyncio.timeout_at(start_s + BODY_S) as time_limit:
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        break
                    parts.append(part)
                    time_limit.reschedule(start_s + BODY_S + size / BODY_BYTES_PER_S)
                else:
                    request.state.is_read = True
        except TimeoutError:
            raise ApiError(
                "body",
                rule=f"only {size} bytes arrived in {loop.time() - start_s:.0f} s, and a body has "
                f"{BODY_S:g} s and one more for each {BODY_BYTES_PER_S} bytes",
                fix="Use a faster connection.",
                status=408,
            ) from None
        if size > limit or int(request.headers.get("content-length") or 0) > limit:
            raise ApiError(
                "body",
                rule=f"it has more than {limit} bytes, the limit of this server (--max-body-mib)",
                fix="Send less at a time.",
                status=413,
            )
        body = b"".join(parts)
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if encoding in ("", "identity"):
            return body
        if encoding != "zstd":
            raise ApiError(
                "content-encoding",
                encoding,
                rule="only zstd is supported",
                fix="Send the body without compression.",
                status=415,
            )
        return await asyncio.to_thread(self._decompressed, body)

    def _decompressed(self, body: bytes) -> bytes:
        if self._zstd is None:
            raise ApiError(
                "content-encoding",
                "zstd",
                rule="zstd is not installed on the server",
                fix="Send the body without compression.",
                status=415,
            )
        return self._zstd(body, self._max_body_bytes)

    def _answer(self, ask: Callable[[Body], dict[str, Any]]) -> Handler:
        async def answer(request: Request) -> Response:
            return JSONResponse(ask(parse_json(await self._body(request))))

        return answer

    def _command(
        self,
        enter: Callable[[Body, bytes], str],
        before: Callable[[Body], Awaitable[None]] | None = None,
    ) -> Handler:
        """Return a handler that enters a command and answers with the name of its future."""

        async def command(request: Request) -> Response:
            body = await self._body(request)
            parsed = parse_json(body)
            if before is not None:
                async with self._waits.wait():
                    await before(parsed)
            return JSONResponse({"request_id": enter(parsed, _digest(body))})

        return command

    async def _make_room_to_load(self, body: Body) -> None:
        if body.get("session_id") is not None:  # the request creates a model
            await self._service.make_room(body)

    # Other routes.

    async def _forward_backward(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "")
        if not kind.startswith(PROTOBUF):
            raise ApiError(
                "content-type",
                kind,
                rule=f"forward_backward requires {PROTOBUF}",
                fix="Use the tinker client 0.25 or newer.",
                status=415,
            )
        body = await self._body(request)
        if len(body) <= SMALL_BODY:
            sent = decode_pass(body)
        else:
            sent = await asyncio.to_thread(decode_pass, body)
        name = self._service.training.forward_backward(sent, _digest(body), len(body))
        return JSONResponse({"request_id": name, "model_id": sent.model_id})

    async def _retrieve_future(self, request: Request) -> Response:
        name = request_checks.text(parse_json(await self._body(request)), "request_id")
        async with self._waits.wait():
            outcome = await self._service.futures.wait(name, LONG_POLL_S)
        if outcome is None:
            again = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(again, status_code=408)
        self._service.futures.fetched([name])
        if isinstance(outcome, Failure):
            return JSONResponse({"error": outcome.message, "category": outcome.category})
        return Response(outcome.body, media_type=outcome.content_type)

    async def _retrieve_futures(self, request: Request) -> Response:
        body = parse_json(await self._body(request))
        target = body.get("target")
        if not isinstance(target, dict):
            raise ApiError(
                "target", target, rule="must be an object", fix="Name a sampling session."
            )
        name = request_checks.text(target, "sampling_session_id")
        self._service.sessions.sampling(name)
        client = request_checks.whole_number(target, "cloned_sampler_id", 0, high=2**62)
        self._service.futures.fetched(request_checks.texts(body, "retrieved_request_ids"))
        timeout_s = request_checks.number(
            body, "timeout", LONG_POLL_S, below=float("inf"), nullable=True
        )
        behind = request_checks.whole_number(body, "prev_cursor", 0, high=2**62)
        async with self._waits.wait():
            cursor, found = await self._service.sampling.completions(name, client).wait(
                behind=behind, timeout_s=min(timeout_s, LONG_POLL_S)
            )
        completions: list[dict[str, Any]] = []
        for one in found:
            if one.size is None:
                completions.append({"state": "failed", "request_id": one.request})
            else:
                completions.append(
                    {
                        "state": "finished",
                        "request_id": one.request,
                        "response_payload_uncompressed_size": one.size,
                    }
                )
        return JSONResponse({"completions": completions, "cursor": cursor})

    async def _cancel_future(self, request: Request) -> Response:
        self._service.sampling.cancel(parse_json(await self._body(request)))
        return Response(status_code=204)

    async def _unload(self, request: Request) -> Response:
        name = self._service.training.unload(parse_json(await self._body(request)))
        return JSONResponse({"request_id": name})

    async def _client_config(self, request: Request) -> Response:
        await self._body(request)
        return JSONResponse(
            {
                "pjwt_auth_enabled": False,
                "parallel_fwdbwd_chunks": True,
                "proto_compress_fwdbwd": self._zstd is not None,
                # One poll for all samples of a client, instead of a connection for each.
                "sample_use_retrieve_futures": True,
                "sample_join_sampling_session": True,
                "custom_loss_server_side": False,
            }
        )

    async def _dynamic_config(self, request: Request) -> Response:
        await self._body(request)
        return JSONResponse({"refresh_interval_sec": 300, "sample_cancel_enabled": True})

    async def _telemetry(self, request: Request) -> Response:
        """Accept and discard the client's telemetry."""
        await self._body(request)
        return JSONResponse({"status": "accepted"})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _capabilities(self, request: Request) -> Response:
        models = [
            {
                "model_name": one.name,
                "max_context_length": one.limits.max_context,
                "trainable": True,
                "sampleable": True,
            }
            for one in self._service.base_models
        ]
        return JSONResponse({"supported_models": models})

    async def _sampler(self, request: Request) -> Response:
        return JSONResponse(self._service.sampling.sampler(request.path_params["sampler"]))

    async def _finish(self, request: Request) -> Response:
        await self._body(request)
        self._service.finish_session(request.path_params["session"])
        return Response(status_code=204)


def _is_unread(request: Request) -> bool:
    """Return whether a part of the request's body may still have to arrive."""
    size = request.headers.get("content-length", "0")
    has_body = size != "0" or "transfer-encoding" in request.headers
    return has_body and not getattr(request.state, "is_read", False)


def _refusal(message: str, status: int) -> Response:
    return JSONResponse({"error": message, "detail": message}, status_code=status)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


def _zstd_decompressor() -> Callable[[bytes, int], bytes] | None:
    """Return a function that decompresses a body, or None without the package zstandard."""
    try:
        import zstandard
    except ImportError:
        return None

    def decompressed(body: bytes, limit: int) -> bytes:
        try:
            with zstandard.ZstdDecompressor().stream_reader(body) as reader:
                found: bytes = reader.read(limit + 1)
        except zstandard.ZstdError as error:
            raise ApiError(
                "body", rule=f"it is not zstd ({error})", fix="Send valid zstd.", status=400
            ) from None
        if len(found) > limit:
            raise ApiError(
                "body",
                rule=f"it has more than {limit} bytes when it is decompressed",
                fix="Send less at a time.",
                status=413,
            )
        return found

    return decompressed
