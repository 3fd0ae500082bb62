"""Processors and memory of this machine, or of machines that the user names.

"2x8xH100", "4x24GiB" ─► parse_machines ─┐
this machine          ─► this_machine   ─┴► Machine ─► rlsys.launcher.machine_fit
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rlsys.common.available_memory import total_bytes
from rlsys.errors import require

GIB = 2**30

# Memory in GiB that the driver reports for a card, by Ray's name of the card.
CARDS = {
    "T4": 15.0,
    "V100": 15.8,
    "L4": 22.5,
    "A10G": 22.5,
    "RTX4090": 24.0,
    "A100-40G": 39.6,
    "L40S": 45.0,
    "A100": 79.3,
    "H100": 79.6,
    "GH200": 95.6,
    "H200": 140.4,
    "B200": 179.1,
}

# Importing torch on a cold disk is slow.
PROBE_TIMEOUT_S = 120.0
PROBE = """
import torch
for number in range(torch.cuda.device_count()):
    found = torch.cuda.get_device_properties(number)
    print(found.total_memory, found.name)
"""

# GPUs of a usual node with one of these cards, as in rlsys.planner.hardware.
PER_NODE = 8
MAX_DEVICES = 4096

_MACHINES = re.compile(
    r"(?:(\d{1,5})x)?(?:(\d{1,5})x)?(?:(\d+(?:\.\d+)?)GiB|([A-Za-z][\w-]*))",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU."""

    name: str
    num_bytes: int

    @property
    def option(self) -> str:
        """The device as --dry-run names it, or "" for one that it cannot name."""
        memory = f"{self.num_bytes / GIB:g} GiB"
        if self.name == f"GPU of {memory}":
            return memory.replace(" ", "")
        return self.name if self.name in CARDS else ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A node. None is an unknown number."""

    name: str
    devices: tuple[Device, ...]
    num_cpus: int | None = None
    host_bytes: int | None = None


def parse_machines(text: str) -> tuple[Machine, ...]:
    """Return the nodes that `text` names, such as 2x8xH100, 16xH100, L40S or 4x24GiB.

    Two numbers are nodes and GPUs per node. One number of a known card fills nodes of 8 GPUs; one
    number of a memory size is one node. Cores and host memory of the nodes are unknown.

    Raises:
        InvalidValue: The text does not name machines.
    """
    match = _MACHINES.fullmatch(text)
    first, second, memory, card = match.groups() if match else (None, None, None, None)
    names = {name.lower(): name for name in CARDS}
    name = names.get(card.lower()) if card else None
    gib = float(memory) if memory else CARDS.get(name or "", 0.0)
    counts = _per_node(int(first or 1), int(second) if second else None, is_card=name is not None)
    require(
        match is not None and gib > 0 and all(counts) and 1 <= sum(counts) <= MAX_DEVICES,
        "machine",
        text,
        rule="must be a number of GPUs, or nodes x GPUs, with a card or its memory",
        fix=f"Write such as 8xH100, 2x8xH100 or 4x24GiB. Known cards are {', '.join(CARDS)}.",
    )
    device = Device(name=name or f"GPU of {gib:g} GiB", num_bytes=int(gib * GIB))
    alone = f"a machine with {text}"
    return tuple(
        Machine(
            name=alone if len(counts) == 1 else f"node {number} of {text}",
            devices=(device,) * count,
        )
        for number, count in enumerate(counts)
    )


def _per_node(first: int, second: int | None, *, is_card: bool) -> tuple[int, ...]:
    """Return the number of GPUs of each node."""
    if second is not None:
        return (second,) * min(first, MAX_DEVICES + 1)
    if not is_card or first <= PER_NODE:
        return (first,)
    whole, rest = divmod(first, PER_NODE)
    return (PER_NODE,) * whole + ((rest,) if rest else ())


def is_machine(text: str) -> bool:
    """Return whether the text names machines."""
    try:
        parse_machines(text)
    except ValueError:
        return False
    return True


def this_machine(*, with_devices: bool) -> Machine:
    """Return the resources of this machine, or of the container of this process.

    Args:
        with_devices: Also look for GPUs. This takes seconds, in a separate process, so that this
            process does not create a CUDA context.
    """
    return Machine(
        name="this machine",
        devices=_devices_here() if with_devices else (),
        num_cpus=os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count(),
        host_bytes=total_bytes(),
    )


def _devices_here() -> tuple[Device, ...]:
    drivers = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
    if not any(path.exists() for path in drivers) and shutil.which("nvidia-smi") is None:
        return ()
    found = subprocess.run(
        [sys.executable, "-c", PROBE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PROBE_TIMEOUT_S,
    )
    lines = [line.split(" ", 1) for line in found.stdout.splitlines()]
    return tuple(Device(name=line[1], num_bytes=int(line[0])) for line in lines if len(line) == 2)
