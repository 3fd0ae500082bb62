"""Memory that processes can still allocate on this machine or in its container.

If a process allocates more than there is, the kernel kills it minutes later without a message.
Large allocations are therefore checked first.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

# Reserve for other processes: Ray, interpreters, the kernel.
MARGIN_BYTES = 256 * 2**20


def require_memory(num_bytes: int, *, purpose: str, root: Path = Path("/")) -> None:
    """Raise OSError unless `num_bytes` can be allocated.

    `purpose` names the allocation in the message, which also has the missing amount.
    """
    missing = num_bytes + MARGIN_BYTES - available_bytes(root)
    if missing > 0:
        raise OSError(
            errno.ENOMEM,
            f"{purpose} needs {num_bytes / 2**30:.2f} GiB of memory, of which "
            f"{missing / 2**30:.2f} GiB are missing ({MARGIN_BYTES / 2**30:g} GiB are kept for "
            "other processes). End other programs, or use a larger machine or container.",
        )


def available_bytes(root: Path = Path("/")) -> int:
    """Return the available memory without swap, within the limits of the control groups."""
    return min([_of_machine(root), *_of_control_groups(root)])


def total_bytes(root: Path = Path("/")) -> int:
    """Return the memory of the machine, or the limit of a control group if that is less."""
    return min([_of_machine(root, "MemTotal"), *_of_control_groups(root, _limit_of)])


def _of_machine(root: Path, field: str = "MemAvailable") -> int:
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def _of_control_groups(
    root: Path, read: Callable[..., Iterator[int]] | None = None
) -> Iterator[int]:
    """Yield the memory that each control group still allows; file caches count as free."""
    read = read or _left_in
    # Lines such as "4:memory:/some/group" (version 1) and "0::/some/group" (version 2). In a
    # container the path may be that of the host. Then only the root of the mount exists.
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            mount, names = root / "sys/fs/cgroup/memory", _VERSION_1
        elif not controllers:
            mount, names = root / "sys/fs/cgroup", _VERSION_2
        else:
            continue
        for group in (mount / path.strip("/"), *(mount / path.strip("/")).parents):
            if group.is_relative_to(mount):
                yield from read(group, *names)


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def _left_in(group: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    try:
        allowed = (group / limit).read_text().strip()
        if allowed == "max":
            return
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        yield int(allowed) - int((group / usage).read_text()) + int(statistics.get(cache, 0))
    except FileNotFoundError:  # a group of the host, or the root, without a limit
        return


def _limit_of(group: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    try:
        allowed = (group / limit).read_text().strip()
    except FileNotFoundError:  # see _left_in
        return
    if allowed != "max":
        yield int(allowed)
