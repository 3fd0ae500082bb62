"""Connections to the server: its end, slow bodies, and encodings."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from uvicorn.importer import import_from_string

from actors.tinker_server import http_server
from actors.tinker_server.http_server import HttpServer, TimedConnection
from rlsys.tinker_server import http_app
from rlsys.tinker_server.http_app import Api
from rlsys.tinker_server.request_waits import RequestWaits
from rlsys.tinker_server.server_checkpoints import ServerCheckpoints
from rlsys.tinker_server.tinker_service import Service
from tests.tinker_server.fake_backend import FakeBackend
from tests.tinker_server.refusals import refused

KEY = "tml-a-key-for-tests"
LIMIT_S = 20.0


class AnnouncedServer(HttpServer):
    """A server that sets `is_up` when it listens."""

    def __init__(self, api: Api, **options: Any) -> None:
        super().__init__(api, **options)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


@dataclass
class Connected:
    service: Service
    server: HttpServer
    client: httpx.AsyncClient
    port: int
    serving: asyncio.Task[None]

    async def end(self) -> None:
        """End the server as a signal does."""
        self.server.should_exit = True
        await self.serving

    async def raw(self, key: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection that has sent a request with the first byte of its body."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST /api/v1/create_session HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n"
        writer.write(f"{head}content-length: 1000\r\n\r\n{{".encode())
        return reader, writer


@asynccontextmanager
async def connected(
    tmp_path: Path, grace_s: int, headers_s: float = 30.0
) -> AsyncIterator[Connected]:
    service = Service(FakeBackend(), ServerCheckpoints(tmp_path), clock=time.monotonic)
    api = Api(service, key=KEY, max_body_bytes=1000)
    server = AnnouncedServer(api, grace_s=grace_s, headers_s=headers_s, port=0)
    serving = asyncio.create_task(server.serve())
    await server.is_up.wait()
    port = server.servers[0].sockets[0].getsockname()[1]
    url, headers = f"http://127.0.0.1:{port}/api/v1/", {"x-api-key": KEY}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=LIMIT_S) as client:
        made = Connected(service, server, client, port, serving)
        try:
            yield made
        finally:
            await made.end()


def run(
    tmp_path: Path,
    scenario: Callable[[Connected], Awaitable[None]],
    *,
    grace_s: int = 60,
    headers_s: float = 30.0,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), connected(tmp_path, grace_s, headers_s) as made:
            await scenario(made)

    asyncio.run(main())


def noticed(function: Callable[..., Any], called: asyncio.Event) -> Callable[..., Any]:
    """Return the function, which also sets `called`."""

    def wrapped(*args: Any, **options: Any) -> Any:
        called.set()
        return function(*args, **options)

    return wrapped


def test_polls_are_answered_when_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before they would end by themselves."""

    async def scenario(made: Connected) -> None:
        called = asyncio.Event()
        made.service.futures.open("late", owner="session")
        wait = noticed(made.service.futures.wait, called)
        monkeypatch.setattr(made.service.futures, "wait", wait)
        poll = asyncio.create_task(made.client.post("retrieve_future", json={"request_id": "late"}))
        await called.wait()
        await made.end()
        answer = await poll
        assert (answer.status_code, answer.json()["error"].split(":")[0]) == (503, "server")

    run(tmp_path, scenario)


def test_a_request_that_does_not_end_is_answered_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(made: Connected) -> None:
        called = asyncio.Event()
        copy = noticed(lambda *_: asyncio.sleep(1000), called)
        monkeypatch.setattr(made.service.management, "copy", copy)
        request = asyncio.create_task(made.client.post("copy_weights", json={}))
        await called.wait()
        await made.end()
        assert (await request).status_code == 503

    run(tmp_path, scenario, grace_s=0)


@pytest.mark.parametrize("answered", [0, 1], ids=["first request", "second request"])
@pytest.mark.parametrize("parser", ["h11_impl:H11Protocol", "httptools_impl:HttpToolsProtocol"])
def test_headers_that_do_not_end_close_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parser: str, answered: int
) -> None:
    """Each byte comes soon after the one before, so that no wait for a byte is long."""
    if "httptools" in parser:
        pytest.importorskip("httptools")
    make = import_from_string(f"uvicorn.protocols.http.{parser}")
    made_by = functools.partial(TimedConnection, make=make)
    monkeypatch.setattr(http_server, "TimedConnection", made_by)

    request = "GET /api/v1/healthz HTTP/1.1\r\nhost: x\r\n"

    async def scenario(made: Connected) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        for _ in range(answered):
            writer.write(f"{request}x-api-key: {KEY}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            (size,) = re.findall(rb"content-length: (\d+)", head.lower())
            await reader.readexactly(int(size))
        writer.write(f"{request}slow: ".encode())
        ended = asyncio.create_task(reader.read())
        while not ended.done():
            writer.write(b"a")
            await asyncio.wait([ended], timeout=0.02)
        with contextlib.suppress(ConnectionResetError):  # a byte came after the end
            assert await ended == b""
        writer.close()

    run(tmp_path, scenario, headers_s=0.3)


def test_a_request_may_take_longer_than_its_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(made: Connected) -> None:
        monkeypatch.setattr(made.service.management, "copy", lambda *_: asyncio.sleep(0.5, {}))
        for _ in range(2):  # on one connection
            assert (await made.client.post("copy_weights", json={})).status_code == 200

    run(tmp_path, scenario, headers_s=0.2)


def test_a_slow_body_is_refused_and_its_connection_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_app, "BODY_S", 0.1)

    async def scenario(made: Connected) -> None:
        reader, writer = await made.raw(KEY)
        answer = await reader.read()  # to the end of the connection
        assert answer.startswith(b"HTTP/1.1 408 ")
        writer.close()

    run(tmp_path, scenario)


def test_each_part_of_a_body_gets_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_app, "BODY_S", 0.5)
    monkeypatch.setattr(http_app, "BODY_BYTES_PER_S", 1 / LIMIT_S)

    async def scenario(made: Connected) -> None:
        reader, writer = await made.raw(KEY)
        await asyncio.sleep(0.6)
        writer.write(b" " * 998 + b"}")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()

    run(tmp_path, scenario)


def test_a_wrong_key_closes_a_connection_whose_body_has_not_arrived(tmp_path: Path) -> None:
    async def scenario(made: Connected) -> None:
        reader, writer = await made.raw("tml-another-key")
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        writer.close()

    run(tmp_path, scenario)


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("br", 415), ("identity", 200)])
def test_encodings_other_than_zstd_are_refused(tmp_path: Path, encoding: str, status: int) -> None:
    async def scenario(made: Connected) -> None:
        headers = {"content-encoding": encoding}
        answer = await made.client.post("create_session", headers=headers, content=b"{}")
        assert answer.status_code == status
        if status == 415:
            assert answer.json()["error"].startswith(f"content-encoding='{encoding}': ")

    run(tmp_path, scenario)


def test_waits_end_together_and_none_begins_later() -> None:
    async def scenario() -> None:
        waits, begun = RequestWaits(), asyncio.Barrier(3)

        async def wait() -> None:
            async with waits.wait():
                await begun.wait()
                await asyncio.sleep(1000)

        async with waits.wait():
            pass  # it has ended by itself
        tasks = [asyncio.create_task(wait()) for _ in range(2)]
        await begun.wait()
        waits.end()
        waits.end()
        for task in [*tasks, asyncio.create_task(wait())]:
            with refused("server", status=503):
                await task
        assert begun.n_waiting == 0

    asyncio.run(scenario())


def test_a_time_limit_within_a_wait_is_its_own() -> None:
    async def scenario() -> None:
        waits = RequestWaits()
        with pytest.raises(TimeoutError):
            async with waits.wait(), asyncio.timeout(0):
                await asyncio.sleep(1000)

    asyncio.run(scenario())
