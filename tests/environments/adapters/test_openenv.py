"""Environments behind a server of OpenEnv: a stub of its protocol, and the real one where
RLSYS_OPENENV_PYTHON names a Python that has it (`pip install openenv==0.10.0`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlsys.environments.adapters.openenv import OpenEnv
from rlsys.environments.chat import RefusedTurn
from tests.environments.adapters.scripted import AsyncChat, Script
from tests.errors import error_about, invalid

pytest.importorskip("websockets", reason="the extra rlsys[openenv]")

LIMIT_S = 60.0
PYTHON = os.environ.get("RLSYS_OPENENV_PYTHON", "")
SERVER = Path(__file__).with_name("openenv_server.py")


@contextlib.asynccontextmanager
async def real(max_sessions: int) -> AsyncIterator[tuple[str, list[int]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = started(port, max_sessions)
    try:
        await asyncio.to_thread(wait_for, port)
        yield f"http://127.0.0.1:{port}", [0]
    finally:
        process.kill()
        process.wait(LIMIT_S)


def started(port: int, max_sessions: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([PYTHON, str(SERVER), str(port), str(max_sessions)])


def wait_for(port: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError("the server did not start")


@pytest.fixture(
    params=[
        "stub",
        pytest.param(
            "real",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(not PYTHON, reason="RLSYS_OPENENV_PYTHON is not set"),
            ],
        ),
    ]
)
def server(request: pytest.FixtureRequest) -> Callable[[int], Any]:
    from tests.environments.adapters.openenv_stub import stub

    return real if request.param == "real" else stub


def run(work: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work

    asyncio.run(limited())


def test_an_episode(server: Callable[[int], Any]) -> None:
    async def check() -> None:
        async with server(8) as (url, sessions):
            env = OpenEnv(url=url, text="text", prompt="Guess. ")
            script = Script(["1", "2", "3"])
            [_, _, _, task] = env.tasks(4)
            await env(AsyncChat(script), task)  # type: ignore[arg-type]
            assert script.received() == ["Guess. 0-9?", "no", "no"]
            assert [value for _, _, value in script.rewards] == [-0.1, -0.1, 1.0]
            short = Script(["1", "1"], max_turns=2)
            await env(AsyncChat(short), task)  # type: ignore[arg-type]
            assert len(short.rewards) == 2
            assert sessions == [0]  # closed by now

    run(check())


def test_concurrent_sessions_are_independent(server: Callable[[int], Any]) -> None:
    async def check() -> None:
        async with server(8) as (url, _):
            env = OpenEnv(url=url, text=lambda observation: f"{observation['tries']} tries")
            scripts = [Script([str(n) for n in range(10)]) for _ in range(8)]
            await asyncio.gather(
                *(
                    env(AsyncChat(script), task)  # type: ignore[arg-type]
                    for script, task in zip(scripts, env.tasks(8), strict=True)
                )
            )
            assert [script.num_turns for script in scripts] == list(range(1, 9))
            assert scripts[2].received() == ["0 tries", "1 tries", "2 tries"]

    run(check())


def test_a_whole_observation_is_sent_as_json(server: Callable[[int], Any]) -> None:
    async def check() -> None:
        async with server(8) as (url, _):
            script = Script(["0"])
            await OpenEnv(url=url)(AsyncChat(script), {"seed": 0})  # type: ignore[arg-type]
            assert script.received() == ['{"text": "0-9?", "tries": 0}']

    run(check())


async def play(env: OpenEnv, *replies: str) -> None:
    await env(AsyncChat(Script(replies)), {"seed": 0})  # type: ignore[arg-type]


def test_errors_of_the_policy_and_of_the_environment(server: Callable[[int], Any]) -> None:
    def number(reply: str) -> dict[str, Any]:
        return {"message": str(int(reply))}

    async def check() -> None:
        async with server(8) as (url, _):
            with error_about(RefusedTurn, "'five'"):
                await play(OpenEnv(url=url, action=number), "five")
            with error_about(RefusedTurn, "'message': 5"):
                await play(OpenEnv(url=url, action=lambda reply: {"message": 5}), "5")
            with invalid("OpenEnv: action", "code"):
                await play(OpenEnv(url=url, action="code"), "5")
            with error_about(ConnectionError, "a bug of the environment"):
                await play(OpenEnv(url=url), "crash")
            with error_about(KeyError, "text, tries"):
                await play(OpenEnv(url=url, text="screen"), "5")

    run(check())


def test_the_error_of_a_full_server_names_its_limit(server: Callable[[int], Any]) -> None:
    async def check() -> None:
        async with server(1) as (url, _):
            env = OpenEnv(url=url)

            class Waiting(AsyncChat):
                async def __call__(self, text: str | None = None, *, parse: Any = None) -> Any:
                    with error_about(ConnectionError, "max_concurrent_envs"):
                        await play(env, "0")
                    return await super().__call__(text, parse=parse)

            await env(Waiting(Script(["0"])), {"seed": 0})  # type: ignore[arg-type]

    run(check())


def test_no_server_and_no_address() -> None:
    with error_about(OSError, "9"):
        run(play(OpenEnv(url="http://127.0.0.1:9"), "0"))
    with invalid("OpenEnv: url", "localhost:8000"):
        OpenEnv(url="localhost:8000")


def test_it_is_an_async_environment() -> None:
    assert OpenEnv(url="ws://127.0.0.1:8000").environment().is_async
