"""A head node whose agent's port is taken."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from actors.run import job_submission as submit
from rlsys.commands import machine_checks

LOCAL = "http://127.0.0.1:8265"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of a program that speaks no HTTP: it closes every connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def close_all() -> None:
            try:
                while True:
                    server.accept()[0].close()
            except OSError:
                return

        threading.Thread(target=close_all, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


class Agent(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if "healthz" in self.path else 404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_another_program_at_the_agents_port_is_named(taken: int) -> None:
    fault = submit.agent_fault(LOCAL, taken)
    assert fault is not None
    assert f"port {taken}" in fault
    assert submit.agent_fault("http://head.example:8265", taken) is None  # seen from elsewhere


def test_an_agent_or_nothing_is_no_fault() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Agent) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        port = server.server_address[1]
        assert submit.agent_fault(LOCAL, port) is None
        server.shutdown()
        thread.join()
    assert submit.agent_fault(LOCAL, port) is None


class NoAgent:
    def submit_job(self, **_: object) -> str:
        raise RuntimeError("Request failed with status code 500: No available agent to submit job")


def test_a_submission_ends_with_the_cause_and_the_option(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "agent_fault", lambda address: f"port {taken} is used")
    with pytest.raises(RuntimeError, match=r"--dashboard-agent-listen-port") as refused:
        submit.submit(NoAgent(), "python x.py", {}, LOCAL)
    assert str(taken) in str(refused.value)
    assert "500" not in str(refused.value)
    monkeypatch.setattr(submit, "agent_fault", lambda address: None)
    monkeypatch.setattr(submit, "AGENT_TIMEOUT_S", -1.0)
    with pytest.raises(RuntimeError, match=r"52365") as refused:
        submit.submit(NoAgent(), "python x.py", {}, LOCAL)
    assert "500" not in str(refused.value)


def test_doctor_checks_every_port_that_a_cluster_needs(taken: int) -> None:
    assert {port for port, *_ in machine_checks.PORTS} == {6379, 8265, 52365, 10001}
    check = machine_checks.check_port(taken, "Ray's agent", "--dashboard-agent-listen-port")
    assert check.status == "warn"
    assert "--dashboard-agent-listen-port" in check.fix
