"""Starting and joining Ray: failures, signals and cleanup."""

from __future__ import annotations

import asyncio
import functools
import http.server
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import ray
from ray._private import utils as ray_utils
from ray.core.generated import (
    gcs_service_pb2,
    gcs_service_pb2_grpc,
    node_manager_pb2,
    node_manager_pb2_grpc,
)

from actors.cluster import cluster_checks, local_ray
from actors.cluster.cluster_checks import connected
from actors.cluster.janitor import janitor
from actors.cluster.joined_ray import REASONS
from actors.cluster.local_ray import FILES, OWNER, PREFIX, RayFailed, remove_orphans
from actors.cluster.signals import cancel_on_signals
from rlsys.config import ClusterConfig
from tests.errors import invalid
from tests.tiers import rest_slow

TIMEOUT_S = 300.0


@pytest.fixture
def silent() -> Iterator[int]:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def web() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(
        ("0.0.0.0", 0), http.server.SimpleHTTPRequestHandler
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture
def other_grpc() -> Iterator[int]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("0.0.0.0:0")
    server.start()
    yield port
    server.stop(None)


@pytest.fixture
def closed() -> int:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("service", "reason"),
    [
        pytest.param("silent", REASONS[grpc.StatusCode.DEADLINE_EXCEEDED], marks=pytest.mark.slow),
        ("web", REASONS[grpc.StatusCode.UNAVAILABLE]),
        ("other_grpc", REASONS[grpc.StatusCode.UNIMPLEMENTED]),
        ("closed", REASONS[grpc.StatusCode.UNAVAILABLE]),
    ],
)
def test_the_port_of_another_service_is_rejected(
    service: str, reason: str, request: pytest.FixtureRequest
) -> None:
    address = f"127.0.0.1:{request.getfixturevalue(service)}"
    start = time.monotonic()
    with (
        invalid("cluster.address", address) as found,
        connected(ClusterConfig(address=address)),
    ):
        pass
    assert reason in found.value.rule
    assert time.monotonic() - start < TIMEOUT_S


@pytest.mark.parametrize("address", ["garbage", "garbage:port", "ray://127.0.0.1:10001", ":"])
def test_a_malformed_address_is_rejected(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with invalid("cluster.address", address), connected(ClusterConfig()):
        pass


@pytest.mark.parametrize(("wanted", "expected"), [(1.5, 2), (2.2, 3), (8, 8), (9, 2)])
def test_a_machine_gives_out_more_cpus_than_it_has_within_reason(
    wanted: float, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_ray, "_root", lambda: tmp_path)
    monkeypatch.setattr(cluster_checks, "get_num_cpus", lambda: 2)
    found: list[int] = []
    monkeypatch.setattr(ray, "init", lambda **options: found.append(options["num_cpus"]))
    with connected(ClusterConfig(), num_cpus=wanted) as warning:
        assert found == [expected]
        assert (f"{wanted:g} CPUs" in warning) == (expected > 2)


def test_a_start_that_fails_is_tried_once_more_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_ray, "_root", lambda: tmp_path)
    before = dict(os.environ)
    settings: list[tuple[str, ...]] = []
    failures: list[Exception] = [RuntimeError("Traceback:\n  node.py\nthe node timed out")]
    sleeping: list[subprocess.Popen[bytes]] = []

    def init(**options: Any) -> None:
        settings.append((os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]))
        assert Path(options["_temp_dir"]).parent.stat().st_mode & 0o777 == 0o700
        if failures:
            sleeping.append(
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            )
            raise failures.pop()

    monkeypatch.setattr(ray, "init", init)
    with connected(ClusterConfig()):
        assert len(settings) == 2
    failures += [RuntimeError("the node timed out.")] * 2
    with (
        pytest.raises(RayFailed) as failed,
        connected(ClusterConfig()),
    ):
        raise AssertionError("it cannot start")
    assert "in 2 attempts" in str(failed.value)
    assert "the node timed out." in str(failed.value)
    assert len(settings) == 4
    assert len(set(settings)) == 2  # a token for each run
    assert not any(psutil.pid_exists(process.pid) for process in sleeping)
    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == before


def test_ray_rejects_clients_without_the_runs_token() -> None:
    with local_ray.local_ray(1):
        own = os.environ["RAY_AUTH_TOKEN"]
        gcs = ray.get_runtime_context().gcs_address
        (node,) = ray.nodes()
        raylet = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"

        def answer(token: str | None, address: str, ask: Callable[[grpc.Channel], Any]) -> str:
            metadata = None if token is None else [("authorization", f"Bearer {token}")]
            with grpc.insecure_channel(address) as channel:
                try:
                    ask(channel)(timeout=TIMEOUT_S, metadata=metadata)
                except grpc.RpcError as error:
                    return str(error.code().name)
            return "OK"

        def actors(channel: grpc.Channel) -> Callable[..., Any]:
            request = gcs_service_pb2.GetAllActorInfoRequest()
            stub = gcs_service_pb2_grpc.ActorInfoGcsServiceStub(channel)
            return functools.partial(stub.GetAllActorInfo, request)

        def stats(channel: grpc.Channel) -> Callable[..., Any]:
            request = node_manager_pb2.GetNodeStatsRequest()
            stub = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
            return functools.partial(stub.GetNodeStats, request)

        for address, ask in ((gcs, actors), (raylet, stats)):
            assert answer(own, address, ask) == "OK"
            for other in (None, "0" * len(own)):
                assert answer(other, address, ask) == "UNAUTHENTICATED"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("within", ["a fork", "nothing"])
def test_a_signal_while_ray_starts_ends_the_run_and_leaves_no_lock_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals, within: str
) -> None:
    """Python holds the lock of logging around each fork."""
    monkeypatch.setattr(local_ray, "_root", lambda: tmp_path)
    to_send: list[int] = []

    def send() -> None:
        if to_send:
            os.kill(os.getpid(), to_send.pop())

    def init(**options: Any) -> None:
        ray_utils.set_sigterm_handler(lambda *_: sys.exit(15))  # as Ray itself does
        to_send.append(number)
        if within == "nothing":
            send()
        process = subprocess.Popen([sys.executable, "-c", ""], preexec_fn=lambda: None)
        assert process.wait() == 0
        time.sleep(TIMEOUT_S)  # for processes that have had the signal too
        raise AssertionError("the signal is lost")

    before = [signal.getsignal(one) for one in signal.valid_signals()]
    os.register_at_fork(after_in_parent=send)
    monkeypatch.setattr(ray, "init", init)
    start = time.monotonic()
    with pytest.raises(asyncio.CancelledError) as ended, connected(ClusterConfig()):
        raise AssertionError("the run continues")
    assert number.name in str(ended.value)
    assert time.monotonic() - start < TIMEOUT_S / 2
    assert [signal.getsignal(one) for one in signal.valid_signals()] == before
    assert list(tmp_path.iterdir()) == []
    logged = threading.Thread(target=logging.getLogger, args=("other",), daemon=True)
    logged.start()
    logged.join(TIMEOUT_S)
    assert not logged.is_alive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_start_of_ray_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    monkeypatch.setattr(local_ray, "_root", lambda: tmp_path)
    monkeypatch.setattr(ray, "init", lambda **_: started.append(1))
    started: list[int] = []
    cancelling: list[int] = []

    async def run() -> None:
        cancel_on_signals()
        os.kill(os.getpid(), number)
        try:
            with connected(ClusterConfig()):
                raise AssertionError("the run continues")
        finally:
            task = asyncio.current_task()
            assert task is not None
            cancelling.append(task.cancelling())

    before = [signal.getsignal(one) for one in signal.valid_signals()]
    with pytest.raises((asyncio.CancelledError, KeyboardInterrupt)):
        asyncio.run(run())
    assert cancelling == [1]
    assert started == []
    assert [signal.getsignal(one) for one in signal.valid_signals()] == before


STUCK = """
import asyncio, signal, sys, time
from actors.cluster import local_ray
from actors.cluster.signals import cancel_on_signals
local_ray.STUCK_S = local_ray.DEAF_S = 0.2
local_ray.SUMMARY_TIMEOUT_S = 2.0
case = sys.argv[1]
is_dead = case != "signal"

def on_early_end(outcome):
    print("summary of a run that", outcome, flush=True)
    if case == "hangs":
        time.sleep(600)

async def run():
    cancel_on_signals()
    local_ray.dead_processes = lambda kinds=None: ["raylet"] if is_dead else []
    async with local_ray.ends_with_ray(on_early_end):
        if case == "signal":
            signal.raise_signal(signal.SIGTERM)
        time.sleep(600)  # as a call of Ray's does

asyncio.run(run())
"""


@pytest.mark.parametrize(
    ("case", "code", "outcome", "reason"),
    rest_slow(
        [
            ("signal", 130, "interrupted", "Interrupted"),
            ("dies", 1, "failed", "raylet"),
            ("hangs", 1, "failed", "raylet"),
        ],
        only=[("hangs", 1, "failed", "raylet")],
    ),
)
def test_a_process_blocked_in_a_call_of_a_dead_ray_ends_with_a_summary(
    case: str, code: int, outcome: str, reason: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUCK, case], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == f"summary of a run that {outcome}\n"
    assert reason in ended.stderr


def test_too_few_open_files_are_an_error_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 1024))
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("it starts"))
    with pytest.raises(RayFailed) as failed, connected(ClusterConfig()):
        raise AssertionError("it cannot start")
    assert "64 open files" in str(failed.value)
    assert "256" in str(failed.value)


KILLED_RUN = """
import os, pathlib, sys
from actors.cluster import local_ray
with local_ray.own_directory(pathlib.Path(sys.argv[1])) as directory:
    (directory / local_ray.FILES).mkdir()
    os.kill(os.getpid(), 9)
"""


def test_only_directories_of_the_dead_are_removed(tmp_path: Path) -> None:
    with local_ray.own_directory(tmp_path) as living:
        subprocess.run([sys.executable, "-c", KILLED_RUN, str(tmp_path)], check=False, timeout=300)
        strange = tmp_path / f"{PREFIX}strange"
        strange.mkdir()
        (dead,) = set(tmp_path.iterdir()) - {living, strange}
        assert (dead / FILES).is_dir()
        remove_orphans(tmp_path)
        assert set(tmp_path.iterdir()) == {living, strange}
        assert (living / OWNER).exists()
    assert list(tmp_path.iterdir()) == [strange]


STOPPED_RUN = """
import pathlib, subprocess, sys
from actors.cluster import local_ray
from actors.cluster.janitor import janitor
from actors.cluster.joined_ray import REASONS
with local_ray.own_directory(pathlib.Path(sys.argv[1])) as directory:
    (directory / local_ray.FILES).mkdir()
    with (
        janitor(directory, directory / local_ray.OWNER),
        (directory / local_ray.FILES / "log").open("w") as log,
        subprocess.Popen(["sleep", "3600"], stdout=log, stdin=subprocess.DEVNULL),
    ):
        print("ready", flush=True)
        sys.stdin.read()
"""


def test_the_next_run_ends_suspended_processes_of_a_killed_run(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED_RUN, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        started = psutil.Process(run.pid).children(recursive=True)
        assert len(started) == 2
        for process in started:
            process.suspend()
        run.kill()
    remove_orphans(tmp_path)
    gone, alive = psutil.wait_procs(started, timeout=60)
    assert set(gone) == set(started), alive
    assert list(tmp_path.iterdir()) == []


def test_a_suspended_janitor_does_not_block_its_run(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with local_ray.own_directory(tmp_path) as directory, janitor(directory, directory / OWNER):
        (process,) = set(psutil.Process().children()) - before
        process.suspend()
    assert not process.is_running()


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            "[2026-11-22 12:31:36,072 C 1 1] node.cc:9: Check failed: statussetor3576.has_value() "
            "Timed out waiting for file /tmp/port.",
            "raylet: Timed out waiting for file /tmp/port",
        ),
        ("x\nCheck failed: port > 0 it is 0", "raylet: port > 0 it is 0"),
        ("[2026-11-22 02:41:33,383 E 1 1] server.cc:1: no room", "raylet: server.cc:1: no room"),
        ("[2026-11-22 02:41:33,383 I 1 1] server.cc:1: well", ""),
    ],
)
def test_the_last_error_of_rays_logs_is_found(log: str, expected: str, tmp_path: Path) -> None:
    logs = tmp_path / local_ray.FILES / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text(log + "\n")
    assert local_ray.last_error_in_logs(tmp_path) == expected


def test_a_later_run_removes_files_written_after_a_run(tmp_path: Path) -> None:
    remainder, starting = tmp_path / f"{PREFIX}old", tmp_path / f"{PREFIX}new"
    for directory in (remainder, starting):
        (directory / FILES / "session").mkdir(parents=True)
    os.utime(remainder, (0, 0))
    remove_orphans(tmp_path)
    assert not remainder.exists()
    assert starting.exists()
