"""Joining or starting a Ray cluster, and what must hold there before a run begins."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator

import ray

from rlsys.config import ClusterConfig

# Ray's own objects are metadata here; rollouts and weights have shared memory of their own.
OBJECT_STORE_BYTES = 128 * 2**20

# Ray sets it for the entrypoint of a submitted job.
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"

PROBE_TIMEOUT_S = 10.0


@contextlib.contextmanager
def connected(config: ClusterConfig) -> Iterator[None]:
    """Join the cluster of cluster.address or RAY_ADDRESS, or start one on this machine; leave it,
    or stop what was started, at the end."""
    address = config.address or os.environ.get("RAY_ADDRESS")
    if address is None:
        # Ray would run actors at a low priority, behind whatever else the machine does.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level="ERROR",
            _temp_dir=os.environ.get("RAY_TMPDIR", os.path.join(tempfile.gettempdir(), "ray")),
        )
    else:
        try:
            _probe(address)
            ray.init(address=address, logging_level="ERROR")
        except OSError as error:
            raise ValueError(
                f"cluster.address={address!r} does not answer ({error}); it must be the address of "
                "a cluster that runs (`ray start --head` prints it), whose token this process has "
                "(~/.ray/auth_token). Or leave cluster.address and RAY_ADDRESS unset to run on "
                "this machine."
            ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _probe(address: str) -> None:
    """Raise OSError if nobody listens at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit():  # else "auto"
        socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S).close()


def check_runs_dir(runs_dir: str) -> None:
    """Raise ValueError for a relative directory in a submitted job: it would lie in Ray's copy of
    the upload, and Ray deletes that."""
    if SUBMITTED in os.environ and not os.path.isabs(runs_dir):
        raise ValueError(
            f"runs_dir={runs_dir!r} is relative to this job's copy of the upload, which Ray "
            "deletes; use an absolute path that every node sees, such as --runs-dir /shared/runs."
        )
