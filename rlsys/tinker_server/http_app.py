"""The API over HTTP, as the `tinker` client 0.38 speaks it. An ASGI application by starlette.

    POST /api/v1/...  ─► key ─► size ─► JSON or protobuf ─► service ─► {"request_id": ...}
    POST /api/v1/retrieve_future   waits up to LONG_POLL_S for one future; 408: try again
    POST /api/v1/retrieve_futures  waits for any of a sampling client's

An answer of 4xx has the reason as "error" and "detail".
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
from rlsys.tinker_server.tinker_service import Service

logger = logging.getLogger(__name__)

# The client gives an answer 45 s.
LONG_POLL_S = 30.0

# A larger body is decoded beside the event loop, which answers heartbeats meanwhile.
SMALL_BODY = 1 << 18

KEY_PREFIX = "tml-"  # the client takes no other


def check_key(key: str) -> None:
    """Raise ValueError for a key that the client would refuse."""
    if not key.startswith(KEY_PREFIX) or len(key) < 12:
        raise ValueError(
            f"the key must begin with {KEY_PREFIX!r}, as the tinker client asks, and have at least "
            "12 characters."
        )


class Api:
    def __init__(self, service: Service, *, key: str, max_body_bytes: int) -> None:
        check_key(key)
        self._service = service
        self._key = key
        self._max_body_bytes = max_body_bytes
        self._zstd = _zstd_decompressor()

    def application(self) -> Starlette:
        service = self._service
        training, sampling = service.training, service.sampling
        post: Routes = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._answered(service.create_session),
            "session_heartbeat": self._answered(service.heartbeat),
            "create_sampling_session": self._answered(sampling.create_session),
            "join_sampling_session": self._answered(sampling.join_session),
            "get_info": self._answered(training.info),
            "asample": self._answered(sampling.sample),
            "create_model": self._commanded(training.create_model, service.make_room),
            "optim_step": self._commanded(training.optim_step),
            "save_weights": self._commanded(training.save_weights),
            "load_weights": self._commanded(training.load_weights, self._make_room_to_load),
            "save_weights_for_sampler": self._commanded(training.save_weights_for_sampler),
            "save_weights_external": self._commanded(training.save_weights_external),
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
            Route(f"/api/v1/{path}", self._kept(do), methods=[method])
            for method, ways in (("POST", post), ("GET", get), *management.routes)
            for path, do in ways.items()
        ]
        download = self._kept(management.download, has_key=False)
        routes.append(Route(f"/api/v1/{DOWNLOAD}", download, methods=["GET"]))
        routes.append(Route("/{path:path}", self._kept(not_offered), methods=METHODS))

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            async with self._service.running():
                yield

        return Starlette(routes=routes, lifespan=lifespan)

    # Before and after every route.

    def _kept(self, do: Handler, *, has_key: bool = True) -> Handler:
        """Return a handler that checks the key and answers errors as JSON."""

        async def kept(request: Request) -> Response:
            try:
                if has_key:
                    self._check_key(request)
                return await do(request)
            except ApiError as refusal:
                return _refusal(str(refusal), refusal.status)
            except ValueError as error:  # of the backend's
                return _refusal(str(error), 422)
            except ClientDisconnect:
                return Response(status_code=499)

        return kept

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("x-api-key", "")
        if not given:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._key.encode()):
            raise ApiError(
                "the key of this request is not the server's; set TINKER_API_KEY to the one that "
                "it was started with.",
                401,
            )

    async def _body(self, request: Request) -> bytes:
        limit = self._max_body_bytes
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                break
            parts.append(part)
        if size > limit or int(request.headers.get("content-length") or 0) > limit:
            raise ApiError(
                f"the body has more than {limit} bytes, the limit of this server "
                "(--max-body-mib); send less at a time.",
                413,
            )
        body = b"".join(parts)
        if request.headers.get("content-encoding") == "zstd":
            return await asyncio.to_thread(self._decompressed, body)
        return body

    def _decompressed(self, body: bytes) -> bytes:
        if self._zstd is None:
            raise ApiError("zstd is not installed here; send the body as it is.", 415)
        return self._zstd(body, self._max_body_bytes)

    def _answered(self, ask: Callable[[Body], dict[str, Any]]) -> Handler:
        async def answered(request: Request) -> Response:
            return JSONResponse(ask(parse_json(await self._body(request))))

        return answered

    def _commanded(
        self,
        enter: Callable[[Body, bytes], str],
        before: Callable[[Body], Awaitable[None]] | None = None,
    ) -> Handler:
        """Return a handler that answers with the name of a future."""

        async def commanded(request: Request) -> Response:
            body = await self._body(request)
            parsed = parse_json(body)
            if before is not None:
                await before(parsed)
            return JSONResponse({"request_id": enter(parsed, _digest(body))})

        return commanded

    async def _make_room_to_load(self, body: Body) -> None:
        if body.get("session_id") is not None:  # the request creates a model
            await self._service.make_room(body)

    # Routes of their own kind.

    async def _forward_backward(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "")
        if not kind.startswith(PROTOBUF):
            raise ApiError(
                f"content-type {kind!r}: forward_backward is read as {PROTOBUF}; use the tinker "
                "client 0.25 or newer.",
                415,
            )
        body = await self._body(request)
        if len(body) <= SMALL_BODY:
            sent = decode_pass(body)
        else:
            sent = await asyncio.to_thread(decode_pass, body)
        name = self._service.training.forward_backward(sent, _digest(body))
        return JSONResponse({"request_id": name, "model_id": sent.model_id})

    async def _retrieve_future(self, request: Request) -> Response:
        name = request_checks.text(parse_json(await self._body(request)), "request_id")
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
            raise ApiError(f"target={target!r}; name a sampling session.")
        name = request_checks.text(target, "sampling_session_id")
        self._service.sessions.sampling(name)
        client = request_checks.whole(target, "cloned_sampler_id", 0, high=2**62)
        self._service.futures.fetched(request_checks.texts(body, "retrieved_request_ids"))
        timeout_s = request_checks.number(
            body, "timeout", LONG_POLL_S, below=float("inf"), nullable=True
        )
        cursor, found = await self._service.sampling.completions(name, client).wait(
            behind=request_checks.whole(body, "prev_cursor", 0, high=2**62),
            timeout_s=min(timeout_s, LONG_POLL_S),
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
                # One poll for all samples of a client, where each would hold a connection.
                "sample_use_retrieve_futures": True,
                "sample_join_sampling_session": True,
                "custom_loss_server_side": False,
            }
        )

    async def _dynamic_config(self, request: Request) -> Response:
        await self._body(request)
        return JSONResponse({"refresh_interval_sec": 300, "sample_cancel_enabled": True})

    async def _telemetry(self, request: Request) -> Response:
        """Nobody looks at it here."""
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


def _refusal(message: str, status: int) -> Response:
    return JSONResponse({"error": message, "detail": message}, status_code=status)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


def _zstd_decompressor() -> Callable[[bytes, int], bytes] | None:
    """None where the package is not there."""
    try:
        import zstandard
    except ImportError:
        return None

    def decompressed(body: bytes, limit: int) -> bytes:
        try:
            with zstandard.ZstdDecompressor().stream_reader(body) as reader:
                found: bytes = reader.read(limit + 1)
        except zstandard.ZstdError as error:
            raise ApiError(f"the body is no zstd ({error}).", 400) from None
        if len(found) > limit:
            raise ApiError(f"the body has more than {limit} bytes when it is unpacked.", 413)
        return found

    return decompressed
