"""Start of a Tinker API server: its output and its socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from actors.tinker_server import serving
from rlsys.tinker_server.server_config import BaseModelConfig, ServerConfig


def test_the_start_of_ray_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []

    def connected(_: object) -> contextlib.AbstractContextManager[str]:
        printed.append(capsys.readouterr().out)
        return contextlib.nullcontext("few cores")

    monkeypatch.setattr(serving, "connected", connected)
    with serving.connected_to_ray(ServerConfig(model=BaseModelConfig(path="tiny"))):
        assert len(printed) == 1
        assert "Ray" in printed[0]
    assert "few cores" in capsys.readouterr().out


def test_an_answer_does_not_wait_for_the_clients_acknowledgement_of_its_first_part() -> None:
    """Otherwise each answer takes 40 ms: asyncio writes its head and its body."""

    async def has_no_delay() -> bool:
        found = asyncio.get_running_loop().create_future()

        def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            found.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        config = ServerConfig(model=BaseModelConfig(path="tiny"), port=0)
        listening = serving.listening_socket(config)
        async with await asyncio.start_server(accepted, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            async with asyncio.timeout(20):
                is_set = bool(await found)
            writer.close()
        return is_set

    assert asyncio.run(has_no_delay())
