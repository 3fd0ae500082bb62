"""Management routes of the API: training runs, checkpoints, sessions and downloads.

    GET  training_runs, training_runs/RUN, training_runs/RUN/checkpoints, checkpoints
    GET  training_runs/RUN/checkpoints/external_weights/NAME/external_weights_urls ─► signed URLs
    PUT  training_runs/RUN/checkpoints/KIND/NAME/ttl        DELETE training_runs/.../KIND/NAME
    POST copy_weights, weights_info                         GET sessions, sessions/SESSION

A signed URL needs no key and is valid for an hour: the client downloads it with plain HTTP. All
other paths of the API are refused by name.
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
NEW_URL = "Ask for a new one."

MAX_PAGE = 1000
MAX_QUERY_NUMBER = 10**15

_RUN = "training_runs/{model}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{kind}}/{{name}}"

# Routes of the API that this server lacks, by the end or the beginning of their path.
NOT_OFFERED: Mapping[str, str] = {
    "/publish": "publishing a checkpoint: all holders of the server's key see it",
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
    """Signer of paths for a limited time. `now` returns the Unix time in seconds."""

    def __init__(self, key: str, now: Callable[[], float] = time.time) -> None:
        self._key = key.encode()
        self._now = now

    def sign(self, path: str) -> tuple[str, float]:
        """Return the query that makes a path valid, and the Unix time at which it expires."""
        expires = int(self._now()) + URL_LIFETIME_S
        return urlencode({"expires": expires, "signature": self._signature(path, expires)}), expires

    def check(self, path: str, expires: str, signature: str) -> None:
        """Raise ApiError, 403, unless the path was signed less than an hour ago."""
        is_number = expires.isascii() and expires.isdigit() and len(expires) < 16
        if is_number and hmac.compare_digest(
            signature.encode(), self._signature(path, int(expires)).encode()
        ):
            if int(expires) > self._now():
                return
            raise ApiError("expires", expires, rule="the URL has expired", fix=NEW_URL, status=403)
        raise ApiError("signature", rule="it is not valid for this URL", fix=NEW_URL, status=403)

    def _signature(self, path: str, expires: int) -> str:
        return hmac.new(self._key, f"{expires} {path}".encode(), sha256).hexdigest()


class ManagementRoutes:
    """Handlers of the management routes."""

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
        """Routes of each method."""
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
        await self._management.delete(_path(request))
        return Response(status_code=204)

    async def _urls(self, request: Request) -> Response:
        """Return a signed URL for each file of external weights."""
        model, name = request.path_params["model"], request.path_params["name"]
        if request.path_params["kind"] != "external_weights":
            raise ApiError(
                "path",
                _path(request),
                rule="only external weights can be downloaded",
                fix="Save them with save_weights_external.",
            )
        urls, expires = {}, 0.0
        for file in self._management.files(_path(request)):
            query, expires = self._signer.sign(f"{model}/{name}/{file}")
            where = "/".join(quote(one, safe="/") for one in (model, name, file))
            urls[file] = f"{request.base_url}api/v1/downloads/{where}?{query}"
        at = datetime.fromtimestamp(expires, UTC).isoformat()
        return JSONResponse({"urls": urls, "expires": at})

    async def download(self, request: Request) -> Response:
        """Return one file of external weights for a signed URL."""
        model, name, file = (request.path_params[one] for one in ("model", "name", "file"))
        query = request.query_params
        signed = f"{model}/{name}/{file}"
        self._signer.check(signed, query.get("expires", ""), query.get("signature", ""))
        path = f"{SCHEME}{model}/external_weights/{name}"
        if file not in self._management.files(path):
            raise ApiError(
                "file",
                file,
                rule=f"{path} has no such file",
                fix="Ask for new URLs.",
                status=404,
            )
        return FileResponse(self._management.directory(path) / file)


async def not_offered(request: Request) -> NoReturn:
    """Refuse a route that this server lacks, with the reason if there is one."""
    path = request.url.path.removeprefix("/api/v1/")
    for part, what in NOT_OFFERED.items():
        if path.endswith(part) if part.startswith("/") else path.startswith(part):
            raise ApiError(
                f"{request.method} {request.url.path}",
                rule=f"this server does not offer {what}",
                fix="Leave out this request.",
            )
    raise ApiError(
        f"{request.method} {request.url.path}",
        rule="this server has no such route",
        fix="Check the path.",
        status=404,
    )


def _path(request: Request) -> str:
    parameters = request.path_params
    return f"{SCHEME}{parameters['model']}/{parameters['kind']}/{parameters['name']}"


def _page(request: Request, limit: int) -> Page:
    """Return the part of a list that a request asks for.

    Raises:
        ApiError: limit or offset is not valid.
    """
    found = {"limit": limit, "offset": 0}
    for name in found:
        value = request.query_params.get(name)
        if value is None:
            continue
        is_number = value.isascii() and value.isdigit() and len(value) <= len(str(MAX_QUERY_NUMBER))
        if not is_number or int(value) > MAX_QUERY_NUMBER:
            raise ApiError(
                name,
                value,
                rule=f"must be a whole number from 0 to {MAX_QUERY_NUMBER}",
                fix="Use 100, for example.",
            )
        found[name] = int(value)
    return Page(limit=min(found["limit"], MAX_PAGE), offset=found["offset"])
