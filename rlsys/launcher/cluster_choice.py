"""Cluster that the planner plans for: named, running, or this machine.

"2x8xH100"       ─► parse_cluster
"cpu", "1x2xCPU" ─► cores of this machine, with the rates of a probe
"ray"            ─► nodes of the Ray cluster at RAY_ADDRESS (actors/cluster/cluster_nodes.py)
"auto"           ─► that cluster if RAY_ADDRESS is set, else this machine
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rlsys.config import RunConfig
from rlsys.config.machine import this_machine
from rlsys.errors import InvalidValue, require
from rlsys.planner.cpu_device import CPU, CpuProbe, cpu_cluster
from rlsys.planner.cpu_probe import known_probe
from rlsys.planner.hardware import Cluster, find_gpu, gpu_named, parse_cluster
from rlsys.planner.stack_profile import StackProfile

# Address of a Ray cluster ─► resources of its live nodes.
FindNodes = Callable[[str], Sequence[Mapping[str, float]]]

RAY, AUTO = "ray", "auto"
_CORES = re.compile(r"(?:(\d{1,6})x)?(?:(\d{1,6})x)?cpu", re.IGNORECASE | re.ASCII)
_NAMED = "Name the devices, such as --cluster 2x8xH100."


def plans_gpus(config: RunConfig) -> bool:
    """Return whether the planner plans a run for GPUs: the policy trains or samples on them.

    The planner has one kind of device. Other models may have GPUs while the policy has CPUs.
    """
    return bool(config.trainer.num_gpus or config.rollout.num_gpus)


def chosen_cluster(
    text: str,
    profile: StackProfile | None,
    find_nodes: FindNodes,
    *,
    address: str | None = None,
) -> tuple[Cluster, CpuProbe | None]:
    """Return the cluster that a text names, and the rates of its CPUs if it has no GPUs.

    CPUs need a probe: that of the profile, or the saved one. Without both they are measured.

    Args:
        text: A name, or cpu, ray or auto.
        profile: Profile of the stack, which may have a probe.
        find_nodes: Returns the resources of the nodes of a Ray cluster.
        address: Address of the Ray cluster; RAY_ADDRESS by default.

    Raises:
        InvalidValue: The text names no cluster, or the cluster's nodes differ.
    """
    name = text.strip()
    address = address or os.environ.get("RAY_ADDRESS", "")
    if name.lower() == AUTO:
        name = RAY if address and address != "local" else ""
    if name.lower() == RAY:
        name = cluster_of_nodes(find_nodes(address))
    if not name:
        devices = [device.name for device in this_machine(with_devices=True).devices]
        name = cluster_of_devices(devices)
    if (cores := cores_named(name)) is None:
        return parse_cluster(name), None
    found = (profile.probe if profile else None) or known_probe()
    return cpu_cluster(found, "float32", *cores), found


def cores_named(text: str) -> tuple[int, int | None] | None:
    """Return nodes and cores per node of a text such as cpu, 2xCPU or 1x2xCPU, else None.

    One number counts the cores of this machine. Without a number, all of them count.
    """
    match = _CORES.fullmatch(text.strip())
    if match is None:
        return None
    first, second = (int(number) if number else None for number in match.groups())
    require(
        first != 0 and second != 0,
        "cluster",
        text,
        rule="has no cores",
        fix="Write such as 1x2xCPU.",
    )
    return (1, first) if second is None else (first or 1, second)


def cluster_of_devices(names: Sequence[str]) -> str:
    """Return the name of a machine with these GPUs, as the driver calls them, or of its CPUs.

    Raises:
        InvalidValue: A GPU is unknown, or the GPUs differ.
    """
    if not names:
        return CPU
    known = {name: find_gpu(name) for name in names}
    for name, gpu in known.items():
        if gpu is None:
            raise InvalidValue("--cluster", name, rule="is not a known GPU", fix=_NAMED)
    kinds = {gpu.name for gpu in known.values() if gpu is not None}
    require(
        len(kinds) == 1,
        "--cluster",
        sorted(kinds),
        rule="are different GPUs in one machine, and a plan needs equal ones",
        fix=_NAMED,
    )
    return f"1x{len(names)}x{kinds.pop()}"


def cluster_of_nodes(nodes: Sequence[Mapping[str, float]]) -> str:
    """Return the name of a Ray cluster from the resources of its nodes.

    Nodes without GPUs, such as a head node, are left out if other nodes have GPUs.

    Raises:
        InvalidValue: There is no node, a GPU's type is unknown, or nodes with GPUs differ.
    """
    require(
        bool(nodes),
        "--cluster",
        RAY,
        rule="has no live node",
        fix="Start Ray on the nodes, or name the devices.",
    )
    kinds = Counter(_kind(node) for node in nodes if node.get("GPU", 0) >= 1)
    if not kinds:
        cores = min(int(node.get("CPU", 0)) for node in nodes)
        require(
            cores >= 1,
            "--cluster",
            RAY,
            rule="has a node without CPUs",
            fix=_NAMED,
        )
        return f"{len(nodes)}x{cores}x{CPU}"
    described = ", ".join(f"{count} x ({gpus} {gpu})" for (gpu, gpus), count in kinds.items())
    require(
        len(kinds) == 1,
        "--cluster",
        described,
        rule="has nodes with different GPUs, and a plan needs equal nodes",
        fix="Name the part of the cluster to use, such as --cluster 2x8xH100.",
    )
    ((gpu, num_gpus), num_nodes) = next(iter(kinds.items()))
    return f"{num_nodes}x{num_gpus}x{gpu}"


def _kind(node: Mapping[str, float]) -> tuple[str, int]:
    """Return the GPU of a node and its number."""
    types = [name.partition(":")[2] for name in node if name.startswith("accelerator_type:")]
    require(
        len(types) == 1,
        "--cluster",
        types,
        rule="a node does not say what its GPUs are (resource accelerator_type)",
        fix=_NAMED,
    )
    return gpu_named(types[0]).name, int(node["GPU"])
