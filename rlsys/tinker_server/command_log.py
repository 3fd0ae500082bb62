"""Commands of one model, carried out in the order of their numbers.

    add(seq_id, digest, command) ──► [commands that are early] ──► next() ──► done()

A client numbers its commands without a gap, and sends some of them concurrently: the parts of one
batch arrive in any order. It repeats a command if the answer was lost. The log carries out each
number once, in order.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from rlsys.tinker_server.api_errors import ApiError

T = TypeVar("T")

# Commands that wait for an earlier one. A client stops sending after a few hundred.
MAX_EARLY = 4096

# Digests of the newest commands are kept, to recognize repeated ones.
NUM_REMEMBERED = 4096


class CommandLog(Generic[T]):
    """Queue of commands, without I/O and clock. `first` is the number of the first command."""

    def __init__(self, first: int = 0) -> None:
        self.next_seq = first  # of the next command
        self._first = first
        self._waiting: dict[int, T] = {}
        self._sizes: dict[int, int] = {}  # of the waiting commands
        self.waiting_size = 0  # their sum
        self._digests: dict[int, bytes] = {}
        self._is_running = False
        self._closed = ""

    def add(self, seq_id: int, digest: bytes, command: T, *, size: int = 0) -> bool:
        """Add a command and return whether it is new. A repeated one is carried out once.

        `size` counts as waiting until the command runs.

        Raises:
            ApiError: Another command has this number, it is before the first, too many commands
                wait for an earlier one, or the log is closed.
        """
        if seq_id in self._digests:
            if self._digests[seq_id] != digest:
                raise ApiError(
                    "seq_id",
                    seq_id,
                    rule="another command had this number",
                    fix="Number the commands of a model without a gap, and repeat a command "
                    "unchanged.",
                )
            return False
        if seq_id < self._first:
            raise ApiError(
                "seq_id",
                seq_id,
                rule=f"must be at least {self._first}, the number of the first command",
                fix="Number the commands of a model without a gap.",
            )
        if seq_id < self.next_seq:
            return False  # carried out long ago
        if self._closed:
            raise ApiError(
                "seq_id",
                seq_id,
                rule=self._closed.rstrip("."),
                fix="Make a training client from a checkpoint.",
                status=410,
            )
        if seq_id != self.next_seq and len(self._waiting) >= MAX_EARLY:
            raise ApiError(
                "seq_id",
                seq_id,
                rule=f"{len(self._waiting)} commands wait for seq_id={self.next_seq}, and at most "
                f"{MAX_EARLY} may",
                fix=f"Send the command with seq_id={self.next_seq}.",
                status=429,
            )
        self._digests[seq_id] = digest
        self._waiting[seq_id] = command
        self._sizes[seq_id] = size
        self.waiting_size += size
        return True

    def remove(self, seq_id: int) -> None:
        """Remove a command that was just added."""
        del self._waiting[seq_id], self._digests[seq_id]
        self.waiting_size -= self._sizes.pop(seq_id)

    def next(self) -> T | None:
        """Return the next command, which runs until `done`.

        It is None while another one runs, or if the next one has not arrived.
        """
        if self._is_running or self.next_seq not in self._waiting:
            return None
        self._is_running = True
        self.waiting_size -= self._sizes.pop(self.next_seq)
        return self._waiting.pop(self.next_seq)

    def done(self) -> None:
        """End the running command."""
        assert self._is_running, "call next first"
        self._is_running = False
        self.next_seq += 1
        self._digests.pop(self.next_seq - NUM_REMEMBERED, None)

    def is_awaited(self, seq_id: int) -> bool:
        """Return whether this command is the next, after the running one if there is one."""
        return seq_id == self.next_seq + self._is_running

    @property
    def missing_seq(self) -> int | None:
        """Number of a command that has not arrived while later ones wait for it."""
        if self._is_running or not self._waiting or self.next_seq in self._waiting:
            return None
        return self.next_seq

    def close(self, why: str) -> list[T]:
        """Refuse new commands, for this reason. Return those that have waited, in order."""
        self._closed = self._closed or why
        waiting = [self._waiting[seq_id] for seq_id in sorted(self._waiting)]
        self._waiting.clear()
        self._sizes.clear()
        self.waiting_size = 0
        return waiting
