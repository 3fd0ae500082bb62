"""Management routes of the API: training runs, checkpoints, sessions and downloads.

    GET  training_runs, training_runs/RUN, training_runs/RUN/checkpoints, checkpoints
    GET  training_runs/RUN/checkpoints/external_weights/NAME/external_weights_urls ─► signed URLs
    PUT  training_runs/RUN/checkpoints/KIND/NAME/ttl        DELETE training_runs/.../KIND/NAME
    POST copy_weights, weights_info                         GET sessions, sessions/SESSION

A signed URL needs no key and is valid for an hour: the client downloads it with plain HTTP. Every
other path of the API is refused by name.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import NoReturn
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from rlsys.tinker_server.api_errors import ApiError
from rlsys.tinker_server.management import Management, Page
from rlsys.tinker_server.request_checks import parse_json
from rlsys.tinker_server.server_checkpoints import SCHEME

Handler = Callable[[Request], Awaitable[Response]]
Routes = dict[str, Handler]

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")

DOWNLOAD = "downloads/{model}/{name}/{file:path}"
URL_LIFETIME_S = 3600

MAX_PAGE = 1000

_RUN = "training_runs/{model}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{kind}}/{{name}}"

# Routes of the API that have no meaning here, by the end or the beginning of their path.
NOT_OFFERED: Mapping[str, str] = {
    "/publish": "publishing a checkpoint: the server has one key, whose holders see all",
    "/project": "projects",
    "/trace_export": "traces",
    "sessions/search": "searching sessions; GET sessions lists them",
    "audit": "an audit log",
    "billing/": "billing",
    "auth/": "accounts; the server has one key",
    "create_custom_loss": "custom losses on the server; forward_backward_custom runs in the client",
    "/archive": "archives; save_weights_external makes files for a download",
}


class UrlSigner:
    """Signs paths for a limited time. `now`: Unix time in seconds."""

    def __init__(self, key: str, now: Callable[[], float] = time.time) -> None:
        self._key = key.encode()
        self._now = now

    def sign(self, path: str) -> tuple[str, float]:
        """Return the query that makes a path valid, and the Unix time at which it ends."""
        expires = int(self._now()) + URL_LIFETIME_S
        return urlencode({"expires": expires, "signature": self._signature(path, expires)}), expires

    def check(self, path: str, expires: str, signature: str) -> None:
        """Raise Refused, 403, for a path that was not signed, or whose time is over."""
        is_number = expires.isascii() and expires.isdigit() and len(expires) < 16
        if is_number and hmac.compare_digest(
            signature.encode(), self._signature(path, int(expires)).encode()
        ):
            if int(expires) > self._now():
                return
            raise ApiError("this URL has expired. Ask for a new one.", 403)
        raise ApiError("this URL has no valid signature. Ask for a new one.", 403)

    def _signature(self, path: str, expires: int) -> str:
        return hmac.new(self._key, f"{expires} {path}".encode(), sha256).hexdigest()


class ManagementRoutes:
    def __init__(
        self,
        management: Management,
        body: Callable[[Request], Awaitable[bytes]],
        signer: UrlSigner,
    ) -> None:
        self._management = management
        self._body = body
        self._signer = signer

    @property
    def routes(self) -> Sequence[tuple[str, Routes]]:
        """Return the routes of each method."""
        get: Routes = {
            "training_runs": self._runs,
            _RUN: self._run,
            f"{_RUN}/checkpoints": self._checkpoints_of,
            f"{_CHECKPOINT}/external_weights_urls": self._urls,
            "checkpoints": self._checkpoints,
            "sessions": self._sessions,
            "sessions/{session}": self._session,
        }
        post: Routes = {"copy_weights": self._copy, "weights_info": self._weights_info}
        put: Routes = {f"{_CHECKPOINT}/ttl": self._set_ttl}
        delete: Routes = {_CHECKPOINT: self._delete}
        return (("GET", get), ("POST", post), ("PUT", put), ("DELETE", delete))

    # Listings read many small files, so they run in threads.

    async def _runs(self, request: Request) -> Response:
        found = await asyncio.to_thread(self._management.runs, _page(request, 20))
        return JSONResponse(found)

    async def _run(self, request: Request) -> Response:
        found = await asyncio.to_thread(self._management.run, request.path_params["model"])
        return JSONResponse(found)

    async def _checkpoints(self, request: Request) -> Response:
        found = await asyncio.to_thread(self._management.checkpoints, _page(request, 100))
        return JSONResponse(found)

    async def _checkpoints_of(self, request: Request) -> Response:
        found = await asyncio.to_thread(
            self._management.checkpoints_of, request.path_params["model"]
        )
        return JSONResponse(found)

    async def _sessions(self, request: Request) -> Response:
        return JSONResponse(self._management.sessions(_page(request, 20)))

    async def _session(self, request: Request) -> Response:
        return JSONResponse(self._management.session(request.path_params["session"]))

    async def _weights_info(self, request: Request) -> Response:
        return JSONResponse(self._management.weights_info(parse_json(await self._body(request))))

    async def _copy(self, request: Request) -> Response:
        key = request.headers.get("x-idempotency-key", "")
        body = parse_json(await self._body(request))
        return JSONResponse(await self._management.copy(body, key))

    async def _set_ttl(self, request: Request) -> Response:
        self._management.set_ttl(_path(request), parse_json(await self._body(request)))
        return Response(status_code=204)

    async def _delete(self, request: Request) -> Response:
        self._management.delete(_path(request))
        return Response(status_code=204)

    async def _urls(self, request: Request) -> Response:
        """Sign one URL for each file of external weights."""
        model, name = request.path_params["model"], request.path_params["name"]
        if request.path_params["kind"] != "external_weights":
            raise ApiError(
                f"{_path(request)!r} cannot be downloaded. Save it with save_weights_external."
            )
        urls, expires = {}, 0.0
        for file in self._management.files(_path(request)):
            query, expires = self._signer.sign(f"{model}/{name}/{file}")
            where = "/".join(quote(one, safe="/") for one in (model, name, file))
            urls[file] = f"{request.base_url}api/v1/downloads/{where}?{query}"
        at = datetime.fromtimestamp(expires, UTC).isoformat()
        return JSONResponse({"urls": urls, "expires": at})

    async def download(self, request: Request) -> Response:
        """Send one file of external weights to the holder of a signed URL."""
        model, name, file = (request.path_params[one] for one in ("model", "name", "file"))
        query = request.query_params
        signed = f"{model}/{name}/{file}"
        self._signer.check(signed, query.get("expires", ""), query.get("signature", ""))
        path = f"{SCHEME}{model}/external_weights/{name}"
        if file not in self._management.files(path):
            raise ApiError(f"{path} has no file {file!r}.", 404)
        return FileResponse(self._management.directory(path) / file)


async def not_offered(request: Request) -> NoReturn:
    """Refuse a route that this server does not have, with the reason where there is one."""
    path = request.url.path.removeprefix("/api/v1/")
    for part, what in NOT_OFFERED.items():
        if path.endswith(part) if part.startswith("/") else path.startswith(part):
            raise ApiError(f"{request.method} {request.url.path}: not offered here: {what}.")
    raise ApiError(f"{request.method} {request.url.path}: this server has no such route.", 404)


def _path(request: Request) -> str:
    named = request.path_params
    return f"{SCHEME}{named['model']}/{named['kind']}/{named['name']}"


def _page(request: Request, limit: int) -> Page:
    """Return the part of a list that a request asks for. Raises Refused."""
    found = {"limit": limit, "offset": 0}
    for name in found:
        value = request.query_params.get(name)
        if value is None:
            continue
        if not (value.isascii() and value.isdigit() and len(value) < 16):
            raise ApiError(f"{name}={value!r}. Give a whole number of at least 0.")
        found[name] = int(value)
    return Page(limit=min(found["limit"], MAX_PAGE), offset=found["offset"])
