"""Check that a run fits onto its machines, before anything starts.

    configuration, graph, shape of the model ─► demands ─┐
    machines                                            ─┴► rlsys.launcher.machine_fit ─► verdict

A real start and --dry-run use the same check.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ray._private.utils import get_num_cpus

from rlsys.common.option_names import option
from rlsys.config import RunConfig
from rlsys.config.machine import CARDS, GIB, Device, Machine, parse_machines, this_machine
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import GenerateStage
from rlsys.engines.models.model_shape import ModelShape
from rlsys.errors import InvalidValue, require
from rlsys.launcher.machine_fit import ProcessLayout, Shortage, size
from rlsys.launcher.memory_estimate import cache_fault

from ..cluster.cluster_checks import MAX_CPU_OVERSUBSCRIPTION
from ..cluster.placement import ClusterTooSmall, check_capacity
from .demands import first_needs, place_processes
from .fit_advice import advice


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Demands of a run on its machines, and the shortages."""

    layout: ProcessLayout
    shortages: Sequence[Shortage]
    advice: str = ""

    @property
    def fits(self) -> bool:
        """Return whether nothing is short."""
        return not self.shortages

    @property
    def verdict(self) -> str:
        """Return one sentence: the run fits, or what is short and the smallest change."""
        return "fits" if self.fits else f"{self._rule}. {self.advice}".rstrip()

    @property
    def _rule(self) -> str:
        return f"does not fit: {'; '.join(one.message for one in self.shortages)}"

    def require_fit(self) -> None:
        """Raise an InvalidValue with all shortages unless nothing is short."""
        fix = self.advice or "Change the options that are named here, or use other machines."
        require(self.fits, "run", rule=self._rule, fix=fix)


def uses_gpus(config: RunConfig, flow: StageGraph) -> bool:
    """Return whether any process reserves a GPU."""
    return any(need.num_gpus for need in first_needs(config, flow))


def joins_cluster(config: RunConfig) -> bool:
    """Return whether the run joins a Ray cluster instead of starting its own."""
    is_named = config.cluster.address not in (None, "local")
    return is_named or bool(os.environ.get("RAY_ADDRESS"))


def machines_to_check(
    config: RunConfig, flow: StageGraph, dry_run: str | bool
) -> Sequence[Machine] | None:
    """Return the machines to check against: those that --dry-run names, or this one.

    Return None if the run joins a cluster, whose nodes are known only after it has connected.
    """
    if isinstance(dry_run, str):
        return parse_machines(dry_run)
    if joins_cluster(config):
        return None
    return [this_machine(with_devices=uses_gpus(config, flow))]


def cluster_of_dry_run(
    config: RunConfig, dry_run: str | bool, machines: Sequence[Machine] | None
) -> str:
    """Return the devices of a run as the planner names them, or "" if they are unknown."""
    from rlsys.launcher.cluster_choice import cluster_of_devices, plans_gpus
    from rlsys.launcher.step_prediction import cores_of_this_machine

    if isinstance(dry_run, str):
        return dry_run if plans_gpus(config) else ""
    if machines is None:
        return ""
    if not plans_gpus(config):
        return cores_of_this_machine()
    names = [device.name for machine in machines for device in machine.devices]
    try:
        return cluster_of_devices(names) if names else ""
    except InvalidValue:  # an unknown GPU, or several kinds
        return ""


def require_fit(
    config: RunConfig, flow: StageGraph, shape: ModelShape, machines: Sequence[Machine]
) -> None:
    """Raise an InvalidValue if a run does not fit onto its machines."""
    check_run(config, flow, shape, machines).require_fit()


def machines_of(nodes: Sequence[Mapping[str, float]]) -> list[Machine]:
    """Return the nodes of a Ray cluster as machines, from their resources.

    A GPU of an unknown kind counts as unlimited. Its memory is checked when a process uses it.
    """
    machines = []
    for number, node in enumerate(nodes):
        kinds = [name.partition(":")[2] for name in node if name.startswith("accelerator_type:")]
        known = [kind for kind in kinds if kind in CARDS]
        num_bytes = int(CARDS[known[0]] * GIB) if known else 2**62
        device = Device(name=known[0] if known else "GPU", num_bytes=num_bytes)
        devices = (device,) * int(node.get("GPU", 0))
        machines.append(Machine(name=f"node {number}", devices=devices))
    return machines


def check_run(
    config: RunConfig,
    flow: StageGraph,
    shape: ModelShape,
    machines: Sequence[Machine],
    *,
    disk_bytes: int | None = None,
) -> Capacity:
    """Compare the demands of a run with the machines, and propose the smallest change if needed.

    `disk_bytes` is the free space that runs_dir must have, or None to skip this check.
    """
    shortages = [*_shortages_with_fix(config, flow, shape, machines)]
    layout = place_processes(config, flow, shape, machines)
    change = ""
    if layout.shortages or any(one.is_of_cpus for one in shortages):

        def fits(changed: RunConfig, others: Sequence[Machine]) -> bool:
            found = next(_shortages_with_fix(changed, flow, shape, others), None)
            return found is None and place_processes(changed, flow, shape, others).fits

        change = advice(config, flow, shape, machines, layout, fits)
    shortages += layout.shortages
    if disk_bytes is not None and (of_disk := [*_disk_shortages(config, disk_bytes)]):
        shortages += of_disk
        change = change and f"Besides the free space: {change}"
    return Capacity(layout=layout, shortages=shortages, advice=change)


def _shortages_with_fix(
    config: RunConfig, flow: StageGraph, shape: ModelShape, machines: Sequence[Machine]
) -> Iterator[Shortage]:
    """Yield shortages whose messages contain their fix."""
    devices = [device for machine in machines for device in machine.devices]
    smallest = min((device.num_bytes for device in devices), default=None)
    if flow.all(GenerateStage) and (fault := cache_fault(config, shape, smallest)):
        yield Shortage(message=fault)
    if fault := _transport_fault(config, machines):
        yield Shortage(message=fault)
    for machine in machines:
        if machine.num_cpus is not None:
            yield from _cpu_shortages(config, flow, machine)


def _transport_fault(config: RunConfig, machines: Sequence[Machine]) -> str | None:
    """Return why no replica can be on the node of a trainer rank, if CUDA IPC is asked for."""
    transport, of_rank = config.rollout.weight_transport, config.trainer.num_gpus
    num_gpus = of_rank + config.rollout.num_gpus
    if transport != "cuda_ipc" or any(len(one.devices) >= num_gpus for one in machines):
        return None
    return (
        f"rollout.weight_transport={transport!r}: no node has {num_gpus:g} GPUs, for a trainer "
        f"rank (trainer.num_gpus={of_rank:g}) and a replica "
        f"(rollout.num_gpus={config.rollout.num_gpus:g}); use larger nodes, or "
        f"{option('rollout.weight_transport', 'auto')}"
    )


def _cpu_shortages(config: RunConfig, flow: StageGraph, machine: Machine) -> Iterator[Shortage]:
    """Yield the CPUs that this machine lacks, by the rules of a Ray cluster that the run starts."""
    first = first_needs(config, flow)
    asked = sum(need.num_cpus for need in first)
    num_cpus = int(get_num_cpus())
    if num_cpus < asked <= MAX_CPU_OVERSUBSCRIPTION * num_cpus:
        return
    try:
        check_capacity([replace(need, num_gpus=0) for need in first], [{"CPU": num_cpus, "GPU": 0}])
    except ClusterTooSmall as error:
        yield Shortage(message=f"{error.rule}. {error.fix}".rstrip("."), is_of_cpus=True)


def _disk_shortages(config: RunConfig, disk_bytes: int) -> Iterator[Shortage]:
    nearest = nearest_directory(config.runs_dir)
    free = shutil.disk_usage(nearest).free
    if fault := unwritable(nearest):
        yield Shortage(
            message=f"runs_dir={config.runs_dir!r}: {nearest} cannot be written ({fault}); set "
            f"permissions, or choose another {option('runs_dir')}"
        )
    elif free < disk_bytes:
        yield Shortage(
            message=f"runs_dir={config.runs_dir!r} has {size(free)} free, checkpoints, exports and "
            f"records take {size(disk_bytes)}; make room, lower keep_checkpoints, or choose "
            f"another {option('runs_dir')}"
        )


def nearest_directory(path: str) -> Path:
    """Return the nearest of a path and its parents that exists."""
    return next(one for one in (Path(path), *Path(path).absolute().parents) if one.exists())


def unwritable(directory: Path) -> str:
    """Return why a directory is not writable, or "". No file name appears in it."""
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_WRONLY, 0o600))
    except OSError as error:
        # EOPNOTSUPP, or EISDIR on older kernels: the file system has no unnamed files.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            return os.strerror(error.errno or 0)
        if not os.access(directory, os.W_OK | os.X_OK):
            return os.strerror(errno.EACCES)
    return ""
