"""A Ray of one's own that does not start, and addresses at which there is none."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import ray

from actors import local_ray
from actors.cluster import connected
from actors.local_ray import FILES, OWNER, PREFIX, RayFailed, remove_orphans
from rlsys.config import ClusterConfig

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
def nobody() -> int:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("service", "reason"),
    [
        ("silent", "no answer within 10 s"),
        ("web", "nothing there speaks Ray's protocol"),
        ("other_grpc", "it is another service"),
        ("nobody", "nothing there speaks Ray's protocol"),
    ],
)
def test_another_services_port_is_refused(
    service: str, reason: str, request: pytest.FixtureRequest
) -> None:
    address = f"127.0.0.1:{request.getfixturevalue(service)}"
    start = time.monotonic()
    with (
        pytest.raises(ValueError, match=f"no Ray cluster answers at '{address}' .{reason}"),
        connected(ClusterConfig(address=address)),
    ):
        raise AssertionError("there is nothing to join")
    assert time.monotonic() - start < TIMEOUT_S


@pytest.mark.parametrize("address", ["garbage", "garbage:port", "ray://127.0.0.1:10001", ":"])
def test_what_is_no_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with (
        pytest.raises(ValueError, match=r"no Ray cluster answers at .* HOST:PORT"),
        connected(ClusterConfig()),
    ):
        raise AssertionError("there is nothing to join")


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
        pytest.raises(RayFailed, match=r"tried 2 times: the node timed out\. See whether"),
        connected(ClusterConfig()),
    ):
        raise AssertionError("it cannot start")
    assert len(settings) == 4
    assert len(set(settings)) == 2  # a token for each run
    assert not any(psutil.pid_exists(process.pid) for process in sleeping)
    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == before


KILLED_RUN = """
import os, pathlib, sys
from actors import local_ray
with local_ray._own_directory(pathlib.Path(sys.argv[1])) as directory:
    (directory / local_ray.FILES).mkdir()
    os.kill(os.getpid(), 9)
"""


def test_only_directories_of_the_dead_are_removed(tmp_path: Path) -> None:
    with local_ray._own_directory(tmp_path) as living:
        subprocess.run([sys.executable, "-c", KILLED_RUN, str(tmp_path)], check=False, timeout=300)
        strange = tmp_path / f"{PREFIX}strange"
        strange.mkdir()
        (dead,) = set(tmp_path.iterdir()) - {living, strange}
        assert (dead / FILES).is_dir()
        remove_orphans(tmp_path)
        assert set(tmp_path.iterdir()) == {living, strange}
        assert (living / OWNER).exists()
    assert list(tmp_path.iterdir()) == [strange]


@pytest.mark.parametrize(
    ("log", "said"),
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
def test_rays_own_complaint_is_the_cause(log: str, said: str, tmp_path: Path) -> None:
    logs = tmp_path / local_ray.FILES / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text(log + "\n")
    assert local_ray._said(tmp_path) == said
