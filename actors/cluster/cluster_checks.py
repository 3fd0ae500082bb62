"""Join or start a Ray cluster, and check it before a run begins."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import ray
from ray._private.utils import get_num_cpus

from rlsys.common.option_names import option
from rlsys.config import ClusterConfig
from rlsys.errors import InvalidValue, require

from .joined_ray import joined_ray
from .local_ray import check_open_files, local_ray

# Environment variable that Ray sets for the entrypoint of a submitted job.
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"


# A run on one machine may reserve this many times its CPUs; its processes then share cores.
MAX_CPU_OVERSUBSCRIPTION = 4


@contextlib.contextmanager
def connected(config: ClusterConfig, *, num_cpus: float = 0) -> Iterator[str]:
    """Join the cluster of cluster.address or RAY_ADDRESS, or start one on this machine.

    A cluster on this machine has at least `num_cpus` CPUs if that oversubscribes the machine within
    MAX_CPU_OVERSUBSCRIPTION. Yields a warning or "". At the end of the block the cluster is left,
    or ended if it was started here.

    Raises:
        InvalidValue: No cluster answers at the address, or this process is connected already.
        RayFailed: The cluster cannot be joined or started.
    """
    if ray.is_initialized():
        raise InvalidValue(
            "ray.init",
            rule="this process is already connected to Ray, and a run connects by itself",
            fix="Call ray.shutdown() first.",
        )
    if address := _address(config):
        with joined_ray(address):
            yield ""
        return
    ray_cpus, warning = int(get_num_cpus()), ""
    if ray_cpus < num_cpus <= MAX_CPU_OVERSUBSCRIPTION * ray_cpus:
        warning = (
            f"the run reserves {num_cpus:g} CPUs, but this machine has {ray_cpus}: its processes "
            "share cores. If that is too slow, lower num_cpus, layout, num_workers or num_replicas."
        )
        ray_cpus = math.ceil(num_cpus)
    with local_ray(ray_cpus):
        yield warning


def check_limits(config: ClusterConfig) -> None:
    """Raise RayFailed if no Ray could start in this process. Starts nothing."""
    if not _address(config):
        check_open_files()


def _address(config: ClusterConfig) -> str:
    """Return the address of the cluster to join, or "" to start one."""
    address = config.address or os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def check_runs_dir(runs_dir: str) -> None:
    """Raise an InvalidValue unless runs_dir can be a directory that outlives the run.

    In a submitted job it must be absolute: a relative one would be inside Ray's copy of the upload,
    which Ray deletes. Writes nothing.
    """
    nearest = next(
        path for path in (Path(runs_dir), *Path(runs_dir).parents) if os.path.exists(path)
    )
    require(
        nearest.is_dir(),
        "runs_dir",
        runs_dir,
        rule=f"{nearest} is a file",
        fix=f"Use a directory, such as {option('runs_dir', 'runs')}.",
    )
    require(
        SUBMITTED not in os.environ or os.path.isabs(runs_dir),
        "runs_dir",
        runs_dir,
        rule="it is relative to this job's copy of the upload, which Ray deletes",
        fix="Use an absolute path that every node can access, such as "
        f"{option('runs_dir', '/shared/runs')}.",
    )
