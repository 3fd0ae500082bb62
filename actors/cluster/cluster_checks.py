"""Joining or starting a Ray cluster, and what must hold there before a run begins."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import ray
from ray._private.utils import get_num_cpus

from rlsys.common.option_names import option
from rlsys.config import ClusterConfig, require

from .joined_ray import joined_ray
from .local_ray import check_open_files, local_ray

# Ray sets it for the entrypoint of a submitted job.
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"


# Times the CPUs of one machine that a run may ask for there; its processes take turns then.
OVERBOOKED = 4


@contextlib.contextmanager
def connected(config: ClusterConfig, *, asked_cpus: float = 0) -> Iterator[str]:
    """Join the cluster of cluster.address or RAY_ADDRESS, or start one on this machine, that gives
    out `asked_cpus` if that is within reason; leave it, or stop what was started, at the end. Gives
    a warning, or nothing. Raises ValueError or RayFailed with what is wrong.
    """
    if ray.is_initialized():
        raise ValueError(
            "this process is connected to Ray already, and a run connects by itself; call "
            "ray.shutdown() first."
        )
    if address := _address(config):
        with joined_ray(address):
            yield ""
        return
    num_cpus, warning = int(get_num_cpus()), ""
    if num_cpus < asked_cpus <= OVERBOOKED * num_cpus:
        warning = (
            f"the run asks for {asked_cpus:g} CPUs, of which this machine has {num_cpus}: its "
            "processes take turns; lower num_cpus, layout, num_workers or num_replicas where that "
            "is slow."
        )
        num_cpus = math.ceil(asked_cpus)
    with local_ray(num_cpus):
        yield warning


def check_limits(config: ClusterConfig) -> None:
    """Raise RayFailed where no Ray could start in this process. Costs nothing."""
    if not _address(config):
        check_open_files()


def _address(config: ClusterConfig) -> str:
    """Of the cluster to join; empty to start one."""
    address = config.address or os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def check_runs_dir(runs_dir: str) -> None:
    """Raise ValueError where a file is in the way, and for a relative directory in a submitted job:
    it would lie in Ray's copy of the upload, and Ray deletes that. Nothing is written.
    """
    nearest = next(
        path for path in (Path(runs_dir), *Path(runs_dir).parents) if os.path.exists(path)
    )
    require(
        nearest.is_dir(),
        f"runs_dir={runs_dir!r}: {nearest} is a file; give a directory, such as "
        f"{option('runs_dir', 'runs')}.",
    )
    if SUBMITTED in os.environ and not os.path.isabs(runs_dir):
        raise ValueError(
            f"runs_dir={runs_dir!r} is relative to this job's copy of the upload, which Ray "
            "deletes; use an absolute path that every node sees, such as "
            f"{option('runs_dir', '/shared/runs')}."
        )
