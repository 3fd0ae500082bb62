"""Joining or starting a Ray cluster, and a place in it for every actor.

In: what each actor needs. Out: a placement that holds all of it at once, or an error that says what
is missing, before any actor waits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlsys.config import ClusterConfig

from .joined_ray import joined_ray
from .local_ray import is_intact, local_ray, within

# Ray sets it for the entrypoint of a submitted job.
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"

# For giving a reservation back; where Ray's head is dead nobody waits for it.
RELEASE_TIMEOUT_S = 2.0


class ClusterTooSmall(ValueError):
    """The cluster can never hold the run, or did not have the room in time."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What one actor reserves. `fix` names the option that changes it."""

    name: str
    num_cpus: float
    num_gpus: float
    fix: str

    def __str__(self) -> str:
        gpus = f", {self.num_gpus:g} GPU" if self.num_gpus else ""
        return f"{self.name} ({self.num_cpus:g} CPU{gpus})"


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
    """Raise ValueError for a relative directory in a submitted job: it would lie in Ray's copy of
    the upload, and Ray deletes that."""
    if SUBMITTED in os.environ and not os.path.isabs(runs_dir):
        raise ValueError(
            f"runs_dir={runs_dir!r} is relative to this job's copy of the upload, which Ray "
            "deletes; use an absolute path that every node sees, such as --runs-dir /shared/runs."
        )


def check_capacity(needs: Sequence[Need], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise ClusterTooSmall unless the nodes' resources, all free, hold all needs.

    First fit, largest first: a bound on what Ray's own packing achieves, not a placement.
    """
    free = [dict(node) for node in nodes]
    for need in sorted(needs, key=lambda need: (-need.num_gpus, -need.num_cpus)):
        for node in free:
            if node.get("CPU", 0) >= need.num_cpus and node.get("GPU", 0) >= need.num_gpus:
                node["CPU"] = node.get("CPU", 0) - need.num_cpus
                node["GPU"] = node.get("GPU", 0) - need.num_gpus
                break
        else:
            raise ClusterTooSmall(
                f"the run needs {_total(needs)} ({', '.join(map(str, needs))}), the cluster has "
                f"{_describe(nodes)}; {need.name} finds no place. Lower {need.fix}, or add a node."
            )


@contextlib.contextmanager
def reserved(needs: Sequence[Need], config: ClusterConfig) -> Iterator[list[dict[str, Any]]]:
    """Reserve all needs at once; yields, for each, the options of its actor.

    Raises ClusterTooSmall if the cluster is too small, or if others have not freed the room within
    cluster.start_timeout_s.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    check_capacity(needs, nodes)
    group: PlacementGroup = placement_group(
        [{"CPU": need.num_cpus, "GPU": need.num_gpus} for need in needs], strategy="PACK"
    )
    try:
        if not group.wait(config.start_timeout_s):
            raise ClusterTooSmall(
                f"the run needs {_total(needs)}; the cluster is large enough "
                f"({_describe(nodes)}), but others have held it for {config.start_timeout_s:g} s "
                "(cluster.start_timeout_s). Wait for them, or add a node."
            )
        yield [
            {
                "num_cpus": need.num_cpus,
                "num_gpus": need.num_gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index
                ),
            }
            for index, need in enumerate(needs)
        ]
    finally:
        if is_intact():
            within(RELEASE_TIMEOUT_S, lambda: remove_placement_group(group))


def _total(needs: Sequence[Need]) -> str:
    cpus, gpus = sum(need.num_cpus for need in needs), sum(need.num_gpus for need in needs)
    return f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")


def _describe(nodes: Sequence[Mapping[str, float]]) -> str:
    each = [f"{node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs" for node in nodes]
    return f"{len(nodes)} node(s): " + "; ".join(each)
