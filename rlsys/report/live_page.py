"""A web server on this machine that shows a run while it continues.

    GET /            the page, with the model of this moment
    GET /model.json  the model; 304 if it has not changed since the ETag of the request

The server reads only what the run has added to its files. It answers requests for its own address
only, so that another web page cannot read completions through a name that it points here (DNS
rebinding).
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rlsys.errors import InvalidValue
from rlsys.report.page import page_html, safe_json
from rlsys.report.report_model import RunReader, page_model

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
FRESH_S = 1.0  # requests within this time get the same model
ANEW_S = 10.0  # after this time the model is read again, though no file has changed

Signature = tuple[tuple[str, int, int], ...]


class LiveModel:
    """The model of a run, read again when its files change."""

    def __init__(self, run: Path, clock: Callable[[], float] = time.time) -> None:
        self._reader = RunReader(run)
        self._run = run
        self._clock = clock
        self._lock = threading.Lock()
        self._model: dict[str, Any] = {}
        self._signature: Signature = ()
        self._looked_s = self._read_s = float("-inf")
        self._number = 0

    def current(self) -> tuple[str, dict[str, Any]]:
        """Return the tag and the model."""
        with self._lock:
            now = self._clock()
            if now - self._looked_s >= FRESH_S:
                self._looked_s = now
                signature = self._files()
                if signature != self._signature or now - self._read_s >= ANEW_S:
                    self._signature, self._read_s = signature, now
                    model = page_model([self._reader], now_s=now, live=True)
                    if model["runs"] != self._model.get("runs"):
                        self._number += 1
                        self._model = model
            return f'"{self._number}"', self._model

    def _files(self) -> Signature:
        """Return name, size and time of each file of the run directory."""
        found = []
        for path in sorted(self._run.iterdir()):
            try:
                status = path.stat()
            except OSError:
                continue
            found.append((path.name, status.st_size, status.st_mtime_ns))
        return tuple(found)


class ReportServer(ThreadingHTTPServer):
    """Server of the live page of one run.

    Raises:
        InvalidValue: The directory holds no run, or the address cannot be used.
    """

    daemon_threads = True

    def __init__(self, run: Path, *, host: str, port: int) -> None:
        self.model = LiveModel(run)
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise _unusable(host, port, error) from error
        self.names = {*LOCAL_NAMES, host}

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{self.server_address[0]!s}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version = "rlsys"
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        if self._host() not in self.server.names:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "unknown host\n")
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/model.json"):
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "no such page\n")
            return
        try:
            tag, model = self.server.model.current()
        except (OSError, ValueError) as error:  # the directory was deleted or damaged
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{error}\n")
            return
        if path == "/":
            self._answer(HTTPStatus.OK, "text/html", page_html(model, live=True))
        elif self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, "application/json", "", tag)
        else:
            self._answer(HTTPStatus.OK, "application/json", safe_json(model), tag)

    def _host(self) -> str:
        host = self.headers.get("Host", "")
        name, separator, port = host.rpartition(":")
        return name if separator and port.isdigit() else host

    def _answer(self, status: HTTPStatus, kind: str, text: str, tag: str = "") -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        if status != HTTPStatus.NOT_MODIFIED:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line per request."""


def _unusable(host: str, port: int, error: Exception) -> InvalidValue:
    if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES):
        return InvalidValue(
            "port",
            port,
            rule=f"this port of {host} is in use, or this user may not use it",
            fix="Choose another port, or 0 for any free one.",
        )
    if isinstance(error, OverflowError):
        return InvalidValue("port", port, rule="must be 0 to 65535", fix="Use 0 for any free one.")
    return InvalidValue(
        "host",
        host,
        rule=f"it is no address of this machine ({error})",
        fix="Use 127.0.0.1, which only this machine can reach.",
    )
