"""HTTP server of the Tinker API: uvicorn, which first ends the waits of requests when it ends.

connection ─► TimedConnection: closed if a request's headers take too long ─► uvicorn ─► Api
"""

from __future__ import annotations

import asyncio
import functools
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rlsys.tinker_server.http_app import Api

# Longest time from the start of a connection, or of a request, to the end of its headers. Api
# limits the time of a body.
HEADERS_S = 30.0


class TimedConnection(asyncio.Protocol):
    """A connection of uvicorn that is closed if the headers of a request take `headers_s` or more.

    uvicorn itself only limits the time between requests.
    """

    def __init__(self, *, headers_s: float, make: Any = AutoHTTPProtocol, **options: Any) -> None:
        self._http = make(**options)
        self._headers_s = headers_s
        self._limit: asyncio.TimerHandle | None = None
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the time of the first request."""
        self._transport = transport
        self._http.connection_made(transport)
        self._start_limit()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time."""
        self._stop_limit()
        self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and stop the time when the headers are complete."""
        before = self._http.cycle
        self._http.data_received(data)
        cycle = self._http.cycle  # of the newest request with complete headers
        if cycle is not before:
            self._stop_limit()
        elif cycle is None or cycle.response_complete:
            self._start_limit()

    def eof_received(self) -> None:
        """Pass the end of the client's bytes on."""
        self._http.eof_received()

    def pause_writing(self) -> None:
        """Pass the transport's request on."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Pass the transport's request on."""
        self._http.resume_writing()

    def _start_limit(self) -> None:
        if self._limit is None and self._transport is not None:
            loop = asyncio.get_running_loop()
            self._limit = loop.call_later(self._headers_s, self._transport.close)

    def _stop_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None


class HttpServer(uvicorn.Server):
    """Server of an application.

    Args:
        api: The application.
        grace_s: Seconds that requests have to end after a signal.
        headers_s: Seconds that the headers of a request have to arrive.
        port: Port, if `serve` gets no sockets.
    """

    def __init__(
        self, api: Api, *, grace_s: int = 5, headers_s: float = HEADERS_S, port: int = 8000
    ) -> None:
        connection: Any = functools.partial(TimedConnection, headers_s=headers_s)
        super().__init__(
            uvicorn.Config(
                api.application(),
                http=connection,
                port=port,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=60,
                timeout_graceful_shutdown=grace_s,
            )
        )
        self._api = api

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End polls with an answer, then all connections."""
        self._api.end_waits()
        await super().shutdown(sockets)
