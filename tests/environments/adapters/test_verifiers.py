"""Environments of verifiers: a stub of what is used of it, and the real one where
RLSYS_VERIFIERS_PYTHON names a Python that has it (`pip install verifiers==0.4.0`)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlsys.environments.adapters import verifiers_child
from rlsys.environments.adapters.verifiers import Verifiers
from rlsys.environments.episode_host import Ended, EpisodeHost
from rlsys.environments.tokens.codec import Codec
from rlsys.launcher.tiny_models import build_tokenizer
from tests.environments.playing import LIMITS, InThreads, Scripted, played
from tests.environments.playing import request as request_of
from tests.errors import error_about, invalid

HERE = Path(__file__).parent
PYTHON = os.environ.get("RLSYS_VERIFIERS_PYTHON", "")
LIMIT_S = 60.0

LITTLE = {
    "taskset": {"id": "little"},
    "agent": {"harness": {"id": "little"}, "runtime": {"type": "subprocess"}},
}


def adapter(kind: str, **options: Any) -> Verifiers:
    folder = "verifiers_plugin" if kind == "real" else "verifiers_stub"
    python = PYTHON if kind == "real" else sys.executable
    variables = {"PYTHONPATH": str(HERE / folder)}
    return Verifiers(**{"env": LITTLE, "python": python, "variables": variables, **options})


@pytest.fixture(
    params=[
        "stub",
        pytest.param(
            "real",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(not PYTHON, reason="RLSYS_VERIFIERS_PYTHON is not set"),
            ],
        ),
    ]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Model(BaseHTTPRequestHandler):
    """Replies with the requested number; "no" for the key "wrong", nothing in time for "slow", an
    error for "refused"."""

    keys: list[str]
    asked: threading.Event
    released: threading.Event
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers["Authorization"].removeprefix("Bearer ")
        self.keys.append(key)
        self.asked.set()
        if key == "slow":
            self.released.wait(LIMIT_S)
        prompt = body["messages"][-1]["content"]
        content = "no" if key == "wrong" else prompt.removeprefix("Say ").removesuffix(".")
        message = {"role": "assistant", "content": content}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        answer = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": choices,
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        data = json.dumps(answer).encode()
        self.send_response(401 if key == "refused" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *given: Any) -> None: ...


@dataclass
class Endpoint:
    url: str
    key: str


@pytest.fixture
def url() -> Iterator[str]:
    Model.keys, Model.asked, Model.released = [], threading.Event(), threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    Model.released.set()
    server.shutdown()
    server.server_close()


def run(env: Verifiers, work: Awaitable[None]) -> None:
    async def limited() -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                await work
        finally:
            await env.close()

    asyncio.run(limited())


def test_tasks_are_listed(kind: str) -> None:
    rows = adapter(kind).tasks(3)
    assert rows == [{"index": n, "prompt": f"Say {n}."} for n in range(3)]
    assert len(adapter(kind).tasks(9)) == 5


def test_episodes_are_played_against_their_endpoints(kind: str, url: str) -> None:
    env = adapter(kind)

    async def check() -> None:
        rewards = await asyncio.gather(
            env(Endpoint(url, "a"), {"index": 0}),
            env(Endpoint(url, "b"), {"index": 4}),
            env(Endpoint(url, "wrong"), {"index": 2}),
        )
        assert [one["right"] for one in rewards] == [2.0, 2.0, 0.0]
        assert [one["short"] for one in rewards] == [1.0, 1.0, 1.0]
        assert sorted(Model.keys) == ["a", "b", "wrong"]

    run(env, check())


def test_a_failed_episode_raises(kind: str, url: str) -> None:
    env = adapter(kind)

    async def check() -> None:
        with error_about(RuntimeError, "401"):
            await env(Endpoint(url, "refused"), {"index": 0})
        with error_about(RuntimeError, "task 7:", " 5 tasks"):
            await env(Endpoint(url, "a"), {"index": 7})

    run(env, check())


def test_a_cancelled_episode_does_not_block_others(kind: str, url: str) -> None:
    env = adapter(kind)

    async def check() -> None:
        hung = asyncio.create_task(env(Endpoint(url, "slow"), {"index": 1}))
        await asyncio.to_thread(Model.asked.wait, LIMIT_S)
        hung.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hung
        assert (await env(Endpoint(url, "a"), {"index": 1}))["right"] == 2.0
        Model.released.set()

    run(env, check())


def test_a_process_that_dies_ends_its_episodes_and_starts_again(kind: str, url: str) -> None:
    env = adapter(kind)
    before = set(psutil.Process().children())

    async def check() -> None:
        hung = asyncio.create_task(env(Endpoint(url, "slow"), {"index": 1}))
        await asyncio.to_thread(Model.asked.wait, LIMIT_S)
        [started] = set(psutil.Process().children()) - before
        started.kill()
        with error_about(ConnectionError, "verifiers"):
            await hung
        assert (await env(Endpoint(url, "a"), {"index": 1}))["right"] == 2.0

    run(env, check())


def test_an_environment_that_cannot_be_loaded_is_invalid(kind: str) -> None:
    broken = adapter(kind, env={**LITTLE, "taskset": {"id": "no_such"}})
    with invalid("Verifiers: env") as found:
        broken.tasks(1)
    assert "not found" in found.value.rule
    with error_about(ConnectionError, "not found"):
        asyncio.run(broken(Endpoint("http://127.0.0.1:9", "k"), {"index": 0}))


def test_a_python_without_verifiers_is_invalid() -> None:
    with invalid("Verifiers: env", LITTLE) as found:
        Verifiers(env=LITTLE).tasks(1)
    assert "No module named 'verifiers'" in found.value.rule


def test_it_is_an_agent() -> None:
    made = adapter("stub").environment(timeout_s=300)
    assert (made.name, made.is_agent, made.is_async) == ("little", True, True)
    assert "PYTHONPATH" not in repr(adapter("stub"))


def test_an_environment_is_replaced_after_max_episodes(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.syspath_prepend(str(HERE / "verifiers_stub"))
    monkeypatch.setattr(verifiers_child, "MAX_EPISODES", 2)
    made: list[Served] = []

    class Served(verifiers_child.Served):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config)
            self.has_stopped = asyncio.Event()
            made.append(self)

        async def stop(self) -> None:
            await super().stop()
            self.has_stopped.set()

    monkeypatch.setattr(verifiers_child, "Served", Served)

    async def check() -> None:
        answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        child = verifiers_child.Child(dict(LITTLE), None)
        monkeypatch.setattr(child, "send", answers.put_nowait)
        await child.start()
        assert await answers.get() == {"ready": True}
        request = {"task": 0, "url": url, "model": "m"}
        child.handle({**request, "id": 0, "key": "slow"})
        for number in range(1, 4):
            child.handle({**request, "id": number, "key": "a"})
            answer = await answers.get()
            assert (answer["id"], answer["rewards"]["right"]) == (number, 2.0)
        first, second = made
        assert first.env.is_serving  # one of its episodes runs
        Model.released.set()
        assert (await answers.get())["rewards"]["right"] == 2.0
        await first.has_stopped.wait()
        assert not first.env.is_serving
        assert second.env.is_serving
        await child.stop()

    asyncio.run(check())
    assert not [name for name in os.environ if name.startswith("RLSYS_ENDPOINT_KEY")]


def test_requests_of_its_programs_are_the_rollout(kind: str) -> None:
    env = adapter(kind)
    codec = Codec(build_tokenizer("Say .0123456789"), chat_template="")
    sampler = Scripted(codec, lambda text: "3" if "3" in text else "7")
    host = EpisodeHost(env.environment(), codec, sampler, limits=LIMITS, executor=InThreads())
    ended: list[Ended] = []

    async def check() -> None:
        await host.start()
        try:
            requests = [request_of(n, task={"index": n}) for n in (3, 4)]
            ended.extend(await played(host, requests))
        finally:
            await host.close()

    run(env, check())
    right, wrong = [one.played for one in ended]
    assert right is not None, ended[0].failure
    assert wrong is not None, ended[1].failure
    assert right.components == {"right": 2.0, "short": 1.0}
    assert wrong.components == {"right": 0.0, "short": 1.0}
    assert codec.boundary.decode(list(right.trajectory.prompt_token_ids)) == "Say 3."
