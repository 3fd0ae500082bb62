"""A run over two nodes that share neither an address nor memory.

Each node has its own network namespace and /dev/shm. This needs root and a kernel and container
that allow it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rlsys.runs.observe.metrics_file import read_metrics
from tests.e2e.job import SMALL_QUICKSTART, Job, start_command

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
HEAD, OTHER = "10.99.0.1", "10.99.0.2"
PRIVATE_MEMORY = 'mount -t tmpfs -o size=2g tmpfs /dev/shm && exec "$@"'


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=300)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Create two connected network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"rl{uuid.uuid4().hex[:8]}" for _ in range(2)]
    with contextlib.ExitStack() as cleanup:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
            cleanup.callback(ip, "netns", "del", name)
        first, second = names
        ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "cable", "netns", second)
        for name, address in ((first, HEAD), (second, OTHER)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for link in ("lo", "cable"):
                ip("-n", name, "link", "set", link, "up")
        yield first, second


def start_node(namespace: str, options: Sequence[str], directory: Path) -> Job:
    """Run `ray start` in a namespace with its own shared memory."""
    inside = ["ip", "netns", "exec", namespace, "unshare", "--mount", "sh", "-c", PRIVATE_MEMORY]
    ray = [str(BIN / "ray"), "start", "--block", "--object-store-memory=80000000", *options]
    job = start_command(
        [*inside, "sh", *ray],
        directory,
        RAY_AUTH_MODE="disabled",
        RAY_worker_niceness="0",
        PATH=f"{BIN}:{os.environ['PATH']}",
    )
    try:
        job.wait_for_output("will now block forever")
    except AssertionError:
        job.end()
        raise
    return job


def test_ranks_and_replica_over_the_network(namespaces: tuple[str, str], tmp_path: Path) -> None:
    first, second = namespaces
    # Three ranks fit only onto both nodes.
    options = (
        "--trainer.layout dp3 --trainer.num-cpus 0.9 --rollout.num-cpus 0.1 "
        f"--prompts-per-step 6 --warm-start-batch 9 --runs-dir {tmp_path / 'runs'}"
    )
    # Socket paths are below it, and limited to 107 characters.
    short = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
    with short as directory, contextlib.ExitStack() as cleanup:
        head_options = f"--head --port=6379 --dashboard-host={HEAD} --temp-dir={directory}"
        for namespace, node in (
            (first, f"{head_options} --node-ip-address={HEAD} --num-cpus=1"),
            (second, f"--address={HEAD}:6379 --node-ip-address={OTHER} --num-cpus=2"),
        ):
            cleanup.callback(start_node(namespace, node.split(), tmp_path).end)
        submit = ["ip", "netns", "exec", second, sys.executable, "-m", "rlsys", "submit"]
        job = start_command(
            [*submit, "recipes/quickstart.py", *SMALL_QUICKSTART, *options.split()],
            tmp_path,
            RAY_AUTH_MODE="disabled",
            RAY_API_SERVER_ADDRESS=f"http://{HEAD}:8265",
        )
        cleanup.callback(job.end)
        assert job.wait() == 0, job.output
    lines = read_metrics(tmp_path / "runs" / "quickstart" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert abs(lines[0]["kl/sampler_trainer"]) <= 1e-6
