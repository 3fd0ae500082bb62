"""A run whose replicas are vLLM servers of others: one is killed and comes back."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rlsys import metrics
from rlsys.engines.generation.vllm.vllm_server_client import SCHEDULER, WORKER
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.runs.audit import audit
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.run_history import read_evidence
from tests.e2e.job import PATIENCE_S, ROOT, SMALL_QUICKSTART, Job, start, start_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(4 * PATIENCE_S),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

SAMPLED = 'POST /inference/v1/generate HTTP/1.1" 200'  # in the log of a server

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def start_server(model: Path, port: int, directory: Path) -> Job:
    own = [
        "--enable-scale-out",
        "--worker-cls",
        WORKER,
        "--scheduler-cls",
        SCHEDULER,
        "--scheduling-policy",
        "priority",
    ]
    own += ["--logprobs-mode", "processed_logprobs", "--hf-overrides", '{"head_dtype": "float32"}']
    sizes = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "16"]
    sizes += ["--kv-cache-memory-bytes", str(64 * 2**20), "--block-size", "32", "--enforce-eager"]
    where = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *where, *own, *sizes]
    return start_command(command, directory, **ENVIRONMENT)


def wait_until_healthy(server: Job, port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        assert server.process.poll() is None, server.output
        assert time.monotonic() < deadline, server.output
        time.sleep(0.2)  # the server gives no notice


def test_a_server_is_killed_and_comes_back_while_the_run_goes_on(tmp_path: Path) -> None:
    directory = tmp_path
    model = build_tiny_model(directory / "model", max_context=256)
    ports = [free_port(), free_port()]
    servers = [start_server(model, port, directory) for port in ports]
    job: Job | None = None
    try:
        for server, port in zip(servers, ports, strict=True):
            wait_until_healthy(server, port)
        urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        own = ["--model.path", str(model), "--rollout.engine", "vllm", "--rollout.urls", urls]
        # The rewards are 0. The decay alone changes the weights by a hundredth in each step, and
        # the warm start has changed them before.
        ends = ["--num-steps", "100000", "--trainer.learning-rate", "0.01"]
        ends += ["--trainer.weight-decay", "1", "--asynchrony.max-staleness", "0"]
        where = ["--runs-dir", str(directory / "runs")]
        job = start("recipes/quickstart.py", [*SMALL_QUICKSTART, *own, *ends, *where], directory)
        run = directory / "runs" / "quickstart"
        job.wait_for_step(run, 2)
        servers[0].end()
        done = job.wait_for_step(run, 3)
        job.wait_for_step(run, done + 3)  # with the other server alone
        servers[0] = start_server(model, ports[0], directory)
        job.wait_for_output("rollout-0.1 samples with the weights of step")
        done = job.wait_for_step(run, 1)
        job.wait_for_step(run, done + 3)
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130, job.output
        for server in servers:
            assert server.process.poll() is None, server.output  # the run leaves them running
            assert server.output.count(SAMPLED) > 1  # besides the trial of its admission
    finally:
        for one in [*servers, *([job] if job is not None else [])]:
            one.end()
    lines = read_metrics(run / "metrics.jsonl")
    for line in lines:  # a token of other weights would be off by more
        assert abs(line[metrics.KL_SAMPLER_TRAINER]) < 1e-6
        assert line["staleness/max"] == 0
    evidence, faults = read_evidence(run)
    assert [*faults, *audit(evidence).faults] == []
