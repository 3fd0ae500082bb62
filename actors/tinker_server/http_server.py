"""HTTP server of the Tinker API: uvicorn, which first ends the waits of requests when it ends."""

from __future__ import annotations

import socket

import uvicorn

from rlsys.tinker_server.http_app import Api


class HttpServer(uvicorn.Server):
    """Server of an application. Requests have `grace_s` to end after a signal."""

    def __init__(self, api: Api, *, grace_s: int = 5, port: int = 8000) -> None:
        super().__init__(
            uvicorn.Config(
                api.application(),
                port=port,  # unused if `serve` gets sockets
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
