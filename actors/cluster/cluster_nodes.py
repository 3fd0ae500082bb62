"""Nodes of the running Ray cluster, for the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray

from rlsys.errors import require

from .joined_ray import joined_ray


def live_nodes(address: str) -> Sequence[Mapping[str, float]]:
    """Return the total resources of the live nodes of the cluster at an address.

    Raises:
        InvalidValue: The address is empty, or no cluster answers there.
        RayFailed: The cluster cannot be joined.
    """
    require(
        bool(address) and address != "local",
        "RAY_ADDRESS",
        address,
        rule="does not name a running cluster",
        fix="Set it to the address of the cluster, such as 10.0.0.1:6379, or name the devices.",
    )
    if ray.is_initialized():
        return _resources()
    with joined_ray(address):
        return _resources()


def _resources() -> list[Mapping[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
