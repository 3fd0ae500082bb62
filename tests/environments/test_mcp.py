"""Tools of a real MCP server in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import rlsys
from rlsys.environments.tools import mcp as module
from rlsys.environments.tools.mcp import McpTools
from rlsys.environments.tools.tool_call import ToolCall
from rlsys.environments.tools.tool_use import ToolUse
from rlsys.environments.tools.tools import ToolSet
from tests.errors import error_about, invalid
from tests.tiers import rest_slow

pytest.importorskip("mcp", reason="the extra rlsys[mcp]")

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]

# Within which something must have happened on a busy machine.
LIMIT_S = 60.0


def with_tools(
    check: Callable[[Callable[..., Awaitable[str]], ToolSet], Awaitable[None]],
    *tools: McpTools,
) -> None:
    async def run() -> None:
        async with asyncio.timeout(LIMIT_S), ToolSet(tools) as opened:

            async def say(name: str, /, **arguments: Any) -> str:
                [message] = await opened.call_all([ToolCall("i", name, arguments)])
                return str(message["content"])

            await check(say, opened)

    asyncio.run(run())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)


def test_its_tools_are_called_and_its_schemas_passed_through() -> None:
    pids = []

    async def check(say: Callable[..., Awaitable[str]], tools: ToolSet) -> None:
        function = tools.schemas[0]["function"]
        assert function["name"] == "add"
        assert function["description"] == "Adds."
        assert function["parameters"]["properties"]["a"]["type"] == "integer"
        assert function["parameters"]["required"] == ["a"]
        assert await say("add", a=2, b=3) == "5"
        assert "no such file" in await say("fail")
        assert (await say("fail")).startswith("Error: ")
        assert (await say("add", a="x")).startswith("Error: ")
        assert (await say("nothing")).startswith("Error: there is no tool 'nothing'")
        assert await say("picture") == "A picture:\n[image, image/png]"
        # All concurrent calls use one process.
        pids.extend(await asyncio.gather(*(say("pid") for _ in range(8))))

    with_tools(check, rlsys.mcp_tools(command=SERVER))
    assert len(set(pids)) == 1
    assert not is_alive(int(pids[0]))


def test_the_server_gets_only_its_own_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")

    async def check(say: Callable[..., Awaitable[str]], tools: ToolSet) -> None:
        assert tools.names == ("little_variable",)
        assert await say("little_variable", name="SOME_API_KEY") == "none"
        assert await say("little_variable", name="GIVEN") == "this"

    spec = rlsys.mcp_tools(
        command=SERVER, env={"GIVEN": "this"}, names=["variable"], prefix="little_"
    )
    with_tools(check, pickle.loads(pickle.dumps(spec)))
    assert "this" not in repr(spec)


@pytest.mark.slow
def test_a_call_that_takes_too_long_does_not_block_others() -> None:
    async def check(say: Callable[..., Awaitable[str]], tools: ToolSet) -> None:
        begin = time.monotonic()
        waited = asyncio.ensure_future(say("wait", seconds=600))
        assert await say("add", a=1) == "2"
        assert (await waited).startswith("Error: wait ")
        assert time.monotonic() - begin < LIMIT_S / 2

    with_tools(check, rlsys.mcp_tools(command=SERVER, timeout_s=1))


def test_a_server_that_dies_in_a_call_fails_it_and_starts_again() -> None:
    async def check(say: Callable[..., Awaitable[str]], tools: ToolSet) -> None:
        first = await say("pid")
        with error_about(ConnectionError, "die"):
            await say("die")
        assert await say("pid") != first

    with_tools(check, rlsys.mcp_tools(command=SERVER))


@pytest.mark.slow
def test_an_idempotent_call_is_repeated(tmp_path: Path) -> None:
    async def check(say: Callable[..., Awaitable[str]], tools: ToolSet) -> None:
        assert await say("die_once", mark=str(tmp_path / "mark")) == "alive"

    with_tools(check, rlsys.mcp_tools(command=SERVER))


def test_a_server_that_was_killed_is_started_for_the_next_call() -> None:
    async def check(say: Callable[..., Awaitable[str]], tools: ToolSet) -> None:
        first = int(await say("pid"))
        os.kill(first, signal.SIGKILL)
        await asyncio.to_thread(wait_for_end, first)

        async def pid() -> int:
            while True:
                with contextlib.suppress(ConnectionError):  # its end had not been noticed yet
                    return int(await say("pid"))

        others = set(await asyncio.gather(*(pid() for _ in range(4))))
        assert len(others) == 1
        assert first not in others

    with_tools(check, rlsys.mcp_tools(command=SERVER))


@pytest.mark.slow
def test_a_server_that_answers_nothing_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNANSWERED", 2)

    async def check(say: Callable[..., Awaitable[str]], tools: ToolSet) -> None:
        first = int(await say("pid"))
        os.kill(first, signal.SIGSTOP)
        for _ in range(2):
            assert (await say("add", a=1)).startswith("Error: add ")
        while True:  # a new one may take longer to start than a call may take
            answer = await say("pid")
            if not answer.startswith("Error: "):
                break
        assert int(answer) != first
        assert not is_alive(first)

    with_tools(check, rlsys.mcp_tools(command=SERVER, timeout_s=1))


@pytest.mark.parametrize(
    ("spec", "field", "value"),
    rest_slow(
        [
            (McpTools(command=("/no/such/program",)), "mcp_tools", "/no/such/program"),
            (McpTools(command=("true",)), "mcp_tools", "true"),
            (McpTools(command=("sleep", "600"), start_timeout_s=0.5), "mcp_tools", "sleep 600"),
            (McpTools(url="http://127.0.0.1:9/mcp"), "mcp_tools", "http://127.0.0.1:9/mcp"),
            (McpTools(command=tuple(SERVER), names=("add", "sub")), "mcp_tools: names", ["sub"]),
        ],
        first=2,
    ),
)
def test_servers_that_cannot_be_used(spec: McpTools, field: str, value: Any) -> None:
    async def check(say: Callable[..., Awaitable[str]], tools: ToolSet) -> None:
        raise AssertionError("it was opened")

    with invalid(field, value):
        with_tools(check, spec)


@pytest.mark.parametrize(
    ("options", "option", "value"),
    [
        ({}, "command", []),
        ({"command": ["x"], "url": "http://y"}, "command", ["x"]),
        ({"command": "run this"}, "command", "run this"),
        ({"command": ["x"], "start_timeout_s": 0}, "start_timeout_s", 0),
    ],
)
def test_invalid_options(options: dict[str, Any], option: str, value: Any) -> None:
    with invalid(f"mcp_tools: {option}", value):
        rlsys.mcp_tools(**options)


def test_an_environment_may_have_a_server_among_its_tools() -> None:
    @rlsys.environment(tools=[rlsys.mcp_tools(command=SERVER)])
    async def play(chat: Any, task: Any) -> float:
        return 0.0

    async def check() -> None:
        tools = ToolUse(play, "{{ tools }}<tool_call>", asyncio.to_thread)
        assert tools.schemas == []
        await tools.open()
        try:
            names = [schema["function"]["name"] for schema in tools.schemas]
            assert names[:2] == ["add", "fail"]
            message = {"content": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'}
            tools.split_calls(message)
            [answer] = await tools.call_all(message["tool_calls"])  # type: ignore[arg-type]
            assert answer["content"] == "2"
        finally:
            await tools.close()

    asyncio.run(check())


def serve(port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([*SERVER, str(port)])
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.05)
    process.kill()
    raise TimeoutError("the server did not start")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_server_with_a_url() -> None:
    port = free_port()
    process = serve(port)

    async def check(say: Callable[..., Awaitable[str]], tools: ToolSet) -> None:
        nonlocal process
        assert await say("add", a=2) == "3"
        assert "no such file" in await say("fail")
        process.kill()
        process.wait(LIMIT_S)
        with pytest.raises(ConnectionError):
            await say("add", a=2)
        process = serve(port)
        assert await say("add", a=2) == "3"

    try:
        with_tools(check, rlsys.mcp_tools(url=f"http://127.0.0.1:{port}/mcp"))
    finally:
        process.kill()
        process.wait(LIMIT_S)
