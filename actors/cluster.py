"""Joining or starting a Ray cluster, and what must hold there before a run begins."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import ray

from rlsys.config import ClusterConfig, require

from .joined_ray import joined_ray
from .local_ray import local_ray

# Ray sets it for the entrypoint of a submitted job.
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@contextlib.contextmanager
def connected(config: ClusterConfig) -> Iterator[None]:
    """Join the cluster of cluster.address or RAY_ADDRESS, or start one on this machine; leave it,
    or stop what was started, at the end. Raises ValueError or RayFailed with what is wrong."""
    if ray.is_initialized():
        raise ValueError(
            "this process is connected to Ray already, and a run connects by itself; call "
            "ray.shutdown() first."
        )
    address = config.address or os.environ.get("RAY_ADDRESS")
    with local_ray() if address in (None, "", "local") else joined_ray(address):
        yield


def check_runs_dir(runs_dir: str) -> None:
    """Raise ValueError where a file is in the way, and for a relative directory in a submitted job:
    it would lie in Ray's copy of the upload, and Ray deletes that. Nothing is written."""
    nearest = next(
        path for path in (Path(runs_dir), *Path(runs_dir).parents) if os.path.exists(path)
    )
    require(
        nearest.is_dir(),
        f"runs_dir={runs_dir!r}: {nearest} is a file; give a directory, such as --runs-dir runs.",
    )
    if SUBMITTED in os.environ and not os.path.isabs(runs_dir):
        raise ValueError(
            f"runs_dir={runs_dir!r} is relative to this job's copy of the upload, which Ray "
            "deletes; use an absolute path that every node sees, such as --runs-dir /shared/runs."
        )
