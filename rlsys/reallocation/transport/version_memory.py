"""Shared memory that takes version after version, while readers keep those that they use.

    VersionMemory ── begin() ──► LockedMemory ── write ──► unlock() ──► readers: LOCK_SH on the file

A reader holds a shared lock on the file, which ends with the reader at the latest. The writer takes
an exclusive one. A writer that finds the newest memory locked takes other memory, and returns when
its readers have closed it. So there are at most two memories, and one if readers close in time.
"""

from __future__ import annotations

import fcntl

from rlsys.reallocation.transport.shared_memory import SharedMemory

NAME = "rlsys-weights"


class LockedMemory:
    """Shared memory of one version, locked initially."""

    def __init__(self, num_bytes: int, purpose: str) -> None:
        self.shared = SharedMemory(NAME, num_bytes, purpose=purpose)
        self.content = self.shared.map()
        self.lock()

    def lock(self) -> bool:
        """Return False if a reader uses the memory; otherwise keep readers out."""
        try:
            fcntl.flock(self.shared.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Admit readers."""
        fcntl.flock(self.shared.descriptor, fcntl.LOCK_UN)


class VersionMemory:
    """At most two memories of `num_bytes`; `purpose` is for messages about missing memory."""

    def __init__(self, num_bytes: int, purpose: str = "a version of the weights") -> None:
        self.num_bytes = num_bytes
        self._purpose = purpose
        self.kept: list[LockedMemory] = []
        """The memories, newest version first."""

    @property
    def newest(self) -> LockedMemory:
        """The memory that `begin` returned last."""
        return self.kept[0]

    def begin(self) -> LockedMemory:
        """Return locked memory for the next version.

        The version that it held is lost. If a reader uses the newest version, that one stays.
        Raises OSError if there is too little memory.
        """
        before = self.kept
        memory = next((one for one in before if one.lock()), None)
        if memory is None:
            memory = LockedMemory(self.num_bytes, self._purpose)
        # If no reader uses the newest version, one memory is enough.
        keep_newest = before and memory is not before[0]
        self.kept = [memory, *before[:1]] if keep_newest else [memory]
        for one in before:
            if one not in self.kept:
                one.shared.close()
        return memory

    def close(self) -> None:
        """Close the memory; its version can no longer be opened."""
        for one in self.kept:
            one.shared.close()
        self.kept = []
