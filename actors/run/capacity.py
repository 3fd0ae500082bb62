"""Check that a run fits onto its machines, before anything starts.

    configuration, graph, shape of the model ─► demands ─┐
    machines                                            ─┴► rlsys.launch.machine_fit ─► verdict

A real start refuses what --dry-run calls "does not fit".
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
from rlsys.config import RunConfig, require
from rlsys.config.machine import CARDS, GIB, Device, Machine, parse_machine, this_machine
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import GenerateStage
from rlsys.engines.models.model_shape import ModelShape
from rlsys.launch.machine_fit import ProcessLayout, Shortage, size
from rlsys.launch.memory_estimate import cache_fault

from ..cluster.cluster_checks import OVERBOOKED
from ..cluster.placement import ClusterTooSmall, check_capacity
from .demands import first_needs, laid_out
from .fit_advice import advice


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The demands of a run on its machines, and the shortages."""

    layout: ProcessLayout
    shortages: Sequence[Shortage]
    advice: str = ""

    @property
    def fits(self) -> bool:
        return not self.shortages

    @property
    def refusals(self) -> list[Shortage]:
        """Return the shortages that a dry run refuses: all except CPU cores."""
        return [one for one in self.shortages if not one.is_of_cpus]

    @property
    def verdict(self) -> str:
        """One paragraph: fits, or what is short and the smallest change."""
        if self.fits:
            return "fits"
        short = "; ".join(one.message for one in self.shortages)
        return f"does not fit: {short}." + (f" {self.advice}" if self.advice else "")


def wants_devices(config: RunConfig, flow: Dataflow) -> bool:
    """Return whether any process reserves a GPU."""
    return any(need.num_gpus for need in first_needs(config, flow))


def stated_machine(config: RunConfig, flow: Dataflow, stated: str | bool) -> Machine | None:
    """Return the machine to check against: the stated one, this one, or None.

    None stands for a cluster that is to be joined: its nodes are known once it has been.
    """
    if isinstance(stated, str):
        return parse_machine(stated)
    if config.cluster.address not in (None, "local") or os.environ.get("RAY_ADDRESS"):
        return None
    return this_machine(with_devices=wants_devices(config, flow))


def require_fit(
    config: RunConfig, flow: Dataflow, shape: ModelShape, machines: Sequence[Machine]
) -> None:
    """Raise ValueError where a run does not fit onto its machines."""
    capacity = check_run(config, flow, shape, machines)
    require(capacity.fits, f"the run {capacity.verdict}")


def machines_of(nodes: Sequence[Mapping[str, float]]) -> list[Machine]:
    """Return the nodes of a Ray cluster, from their resources, with the cards that are known.

    A GPU of another kind counts as unlimited: what it has is seen when a process uses it.
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
    flow: Dataflow,
    shape: ModelShape,
    machines: Sequence[Machine],
    *,
    disk_bytes: int | None = None,
) -> Capacity:
    """Compare what the run takes with the machines; propose the smallest change if it is too much.

    `disk_bytes`: that runs_dir must have free, None where that is known already.
    """
    shortages = [*_fixed_faults(config, flow, shape, machines)]
    if disk_bytes is not None:
        shortages += _of_disk(config, disk_bytes)
    layout = laid_out(config, flow, shape, machines)
    change = advice(config, flow, shape, machines, layout) if layout.shortages else ""
    return Capacity(layout=layout, shortages=[*shortages, *layout.shortages], advice=change)


def _fixed_faults(
    config: RunConfig, flow: Dataflow, shape: ModelShape, machines: Sequence[Machine]
) -> Iterator[Shortage]:
    """Return faults whose messages contain their fix."""
    devices = [device for machine in machines for device in machine.devices]
    smallest = min((device.num_bytes for device in devices), default=None)
    if flow.all(GenerateStage) and (fault := cache_fault(config, shape, smallest)):
        yield Shortage(message=fault)
    for machine in machines:
        if machine.num_cpus is not None:
            yield from _of_cpus(config, flow, machine)


def _of_cpus(config: RunConfig, flow: Dataflow, machine: Machine) -> Iterator[Shortage]:
    """Return the CPUs that this machine lacks, as a Ray of the run's own gives them out."""
    first = first_needs(config, flow)
    asked = sum(need.num_cpus for need in first)
    num_cpus = int(get_num_cpus())
    if num_cpus < asked <= OVERBOOKED * num_cpus:
        return
    try:
        check_capacity([replace(need, num_gpus=0) for need in first], [{"CPU": num_cpus, "GPU": 0}])
    except ClusterTooSmall as error:
        yield Shortage(message=str(error).rstrip("."), is_of_cpus=True)


def _of_disk(config: RunConfig, disk_bytes: int) -> Iterator[Shortage]:
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
    """Return why no file can be made in a directory, or nothing. No name appears there."""
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_WRONLY, 0o600))
    except OSError as error:
        # File systems without nameless files answer so, and older kernels EISDIR.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            return os.strerror(error.errno or 0)
        if not os.access(directory, os.W_OK | os.X_OK):
            return os.strerror(errno.EACCES)
    return ""
