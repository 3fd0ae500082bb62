"""Placement of a run's processes on machines, and the resources that are missing.

    demands of the processes ─┐
    machines                 ─┴► lay_out ─► ProcessLayout: sums per node and device, shortages

The largest processes are placed first, each on the first machine with free GPUs. Ray's own
placement is at most as good. Nothing is read or started here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rlsys.common.number_text import counted
from rlsys.config.machine import GIB, Machine

# Parts of a GPU, as Ray counts them.
UNITS = 10_000


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Resources of one process, or of two that share a place and take turns.

    Attributes:
        name: Name of the process.
        fix: Options that change the demand.
        num_gpus: Reserved GPUs; 0.5 is half of one.
        device_bytes: Memory on each of its GPUs.
        device_frac: Fraction of the memory of each of its GPUs, instead of device_bytes.
        host_bytes: Host memory.
        takes_turns: Whether only one of the processes like this uses a device at a time.
    """

    name: str
    fix: str
    num_gpus: float = 0
    device_bytes: int = 0
    device_frac: float = 0.0
    host_bytes: int = 0
    takes_turns: bool = False

    def on_device(self, device_bytes: int) -> int:
        """Return the memory on a device of this size, in bytes."""
        return max(self.device_bytes, int(self.device_frac * device_bytes))


@dataclass(kw_only=True)
class DeviceUse:
    """A GPU of a node and the processes on it."""

    name: str
    num_bytes: int
    free_units: int = UNITS
    demands: list[Demand] = field(default_factory=list)

    @property
    def used_bytes(self) -> int:
        """Memory that the processes need at a time."""
        turns = [one.on_device(self.num_bytes) for one in self.demands if one.takes_turns]
        others = [one.on_device(self.num_bytes) for one in self.demands if not one.takes_turns]
        return sum(others) + max(turns, default=0)


@dataclass(kw_only=True)
class NodeUse:
    """A node and the processes on it."""

    machine: Machine
    every_node_bytes: int  # host memory besides that of the processes
    devices: list[DeviceUse]
    demands: list[Demand] = field(default_factory=list)

    @property
    def host_bytes(self) -> int:
        """Host memory that is needed on the node."""
        return self.every_node_bytes + sum(one.host_bytes for one in self.demands)

    def place(self, demand: Demand) -> bool:
        """Place the demand here if enough GPUs are free, and return whether it was placed."""
        units = round(demand.num_gpus * UNITS)
        each = [units] if units <= UNITS else [UNITS] * (units // UNITS)
        if units:
            free = [one for one in self.devices if one.free_units >= each[0]][: len(each)]
            if len(free) < len(each):
                return False
            for device in free:
                device.free_units -= each[0]
                device.demands.append(demand)
        self.demands.append(demand)
        return True


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A missing resource."""

    message: str  # what is needed, available and missing
    demand: Demand | None = None  # the process that needs the most of it
    is_of_cpus: bool = False


@dataclass(frozen=True, kw_only=True)
class ProcessLayout:
    """Placement of a run's processes, and its shortages."""

    nodes: Sequence[NodeUse]
    shortages: Sequence[Shortage]
    unplaced: Sequence[Demand] = ()  # processes for which no GPUs are free

    @property
    def fits(self) -> bool:
        """True if nothing is missing."""
        return not self.shortages

    def describe(self) -> Iterator[str]:
        """Yield a line for each node, and one for each kind of use of its devices.

        Neighbouring nodes with the same use have these lines together.
        """
        nodes = [(number, [*_node_lines(node)]) for number, node in enumerate(self.nodes)]
        for (first, *rest), group in itertools.groupby(nodes, lambda one: one[1]):
            numbers = [number for number, _ in group]
            name = f"node {numbers[0]}"
            if len(self.nodes) == 1:
                name = self.nodes[0].machine.name
            elif len(numbers) > 1:
                name = f"nodes {numbers[0]} to {numbers[-1]}, each"
            yield f"{name}: {first}"
            yield from rest


def _node_lines(node: NodeUse) -> Iterator[str]:
    """Yield the host memory that is used on a node, and a line for each kind of use of its GPUs."""
    total = node.machine.host_bytes
    of = f" of {size(total)}" if total else ""
    yield f"host memory {size(node.host_bytes)}{of}"
    if node.devices and not any(device.demands for device in node.devices):
        yield (
            f"  none of its {counted(len(node.devices), 'GPU')} is used (trainer.num_gpus and "
            "rollout.num_gpus reserve them)"
        )
        return
    uses = itertools.groupby(enumerate(node.devices), lambda one: (one[1].num_bytes, _uses(one[1])))
    for (num_bytes, used), group in uses:
        numbers = [index for index, _ in group]
        which = f"GPU {numbers[0]}"
        if len(numbers) > 1:
            which = f"GPUs {numbers[0]} to {numbers[-1]}, each"
        sum_bytes = node.devices[numbers[0]].used_bytes
        yield f"  {which}: {size(sum_bytes)} of {size(num_bytes)}  {used or 'unused'}"


def lay_out(
    demands: Sequence[Demand], machines: Sequence[Machine], *, every_node_bytes: int
) -> ProcessLayout:
    """Place all demands and return the placement with its shortages.

    Args:
        demands: Demands of all processes of the run.
        machines: The nodes.
        every_node_bytes: Host memory that each node needs besides its processes, such as the store.
    """
    nodes = [
        NodeUse(
            machine=machine,
            every_node_bytes=every_node_bytes,
            devices=[DeviceUse(name=one.name, num_bytes=one.num_bytes) for one in machine.devices],
        )
        for machine in machines
    ]
    unplaced = []
    for demand in sorted(demands, key=lambda one: -one.num_gpus):
        fewest = sorted(nodes, key=lambda node: len(node.demands)) if not demand.num_gpus else nodes
        if not any(node.place(demand) for node in fewest):
            unplaced.append(demand)
    shortages = [*_of_gpus(demands, unplaced, machines)]
    if not unplaced:
        shortages += itertools.chain(*map(_of_node, nodes))
    return ProcessLayout(nodes=nodes, shortages=shortages, unplaced=unplaced)


def _of_gpus(
    demands: Sequence[Demand], unplaced: Sequence[Demand], machines: Sequence[Machine]
) -> Iterator[Shortage]:
    if not unplaced:
        return
    needed = sum(one.num_gpus for one in demands)
    available = sum(len(machine.devices) for machine in machines)
    where, each = machines[0].name, ""
    if len(machines) > 1:
        counts = sorted({len(machine.devices) for machine in machines})
        where = f"the cluster of {len(machines)} nodes"
        each = f" ({' or '.join(map(str, counts))} on each)"
    yield Shortage(
        message=f"the run needs {needed:g} GPUs, {where} has {available}{each}; {unplaced[0].name} "
        f"cannot be placed ({unplaced[0].fix})",
        demand=unplaced[0],
    )


def _of_node(node: NodeUse) -> Iterator[Shortage]:
    seen = set()
    for number, device in enumerate(node.devices):
        missing = device.used_bytes - device.num_bytes
        used = _uses(device)
        if missing > 0 and used not in seen:
            seen.add(used)
            largest = max(device.demands, key=lambda one: one.on_device(device.num_bytes))
            yield Shortage(
                message=f"GPU {number} ({device.name}) of {node.machine.name} has "
                f"{size(device.num_bytes)}, {used} needs {size(device.used_bytes)}: "
                f"{size(missing)} are missing",
                demand=largest,
            )
    total = node.machine.host_bytes
    if total is not None and node.host_bytes > total:
        largest = max(node.demands, key=lambda one: one.host_bytes)
        yield Shortage(
            message=f"{node.machine.name} has {size(total)} of host memory, the run needs "
            f"{size(node.host_bytes)}: {size(node.host_bytes - total)} are missing "
            f"({largest.name} needs the most, {size(largest.host_bytes)})",
            demand=largest,
        )


def _uses(device: DeviceUse) -> str:
    kinds = dict.fromkeys(_kind(one.name) for one in device.demands)
    return " + ".join(kinds)


def _kind(name: str) -> str:
    """Return the name of a process without its number."""
    return name.rstrip("0123456789").removesuffix("-") or name


def size(num_bytes: int) -> str:
    """Return a number of bytes in MiB or GiB."""
    if num_bytes < GIB:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / GIB:.1f} GiB"
