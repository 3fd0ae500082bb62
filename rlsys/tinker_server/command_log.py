"""The commands of one model, carried out in the order that its client gave them.

add(seq_id, digest, command) ──► [those that came too early] ──► next() ──► done()

A client numbers its commands without a gap, and sends some of them side by side: the parts of one
batch arrive in any order. It sends a command again whenever the answer was lost. So each number is
carried out once, in the order of numbers, whatever arrives when.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from rlsys.tinker_server.api_errors import ApiError

T = TypeVar("T")

# Commands that wait for an earlier one that has not come. A client holds back after a few hundred.
MAX_EARLY = 4096

# Of the newest commands it is known what they were.
NUM_REMEMBERED = 4096


class CommandLog(Generic[T]):
    """No I/O, no clock. `first`: the number of the first command."""

    def __init__(self, first: int = 0) -> None:
        self.next_seq = first  # of the command whose turn it is
        self._first = first
        self._waiting: dict[int, T] = {}
        self._digests: dict[int, bytes] = {}
        self._is_running = False
        self._closed = ""

    def add(self, seq_id: int, digest: bytes, command: T) -> bool:
        """Whether it is new: False for one that was sent again, which is carried out once.
        `digest`: of what the client sent.

        Raises Refused for a number that another command has, for one before the first, for too many
        that wait for an earlier one, and once the log is closed.
        """
        if seq_id in self._digests:
            if self._digests[seq_id] != digest:
                raise ApiError(
                    f"seq_id={seq_id} was another command before; number the commands of a model "
                    "without a gap, and send a command again as it was."
                )
            return False
        if seq_id < self._first:
            raise ApiError(f"seq_id={seq_id} comes before the first command, {self._first}.")
        if seq_id < self.next_seq:
            return False  # long carried out
        if self._closed:
            raise ApiError(self._closed, 410)
        if seq_id != self.next_seq and len(self._waiting) >= MAX_EARLY:
            raise ApiError(
                f"{len(self._waiting)} commands wait for seq_id={self.next_seq}, which has not "
                f"come; at most {MAX_EARLY} may: send that one.",
                429,
            )
        self._digests[seq_id] = digest
        self._waiting[seq_id] = command
        return True

    def remove(self, seq_id: int) -> None:
        """One that was just added, and does not count."""
        del self._waiting[seq_id], self._digests[seq_id]

    def next(self) -> T | None:
        """The command whose turn it is, which runs from now on until `done`; None while another
        runs, or as long as it has not come.
        """
        if self._is_running or self.next_seq not in self._waiting:
            return None
        self._is_running = True
        return self._waiting.pop(self.next_seq)

    def done(self) -> None:
        """The running command has ended, well or not."""
        assert self._is_running, "next comes first"
        self._is_running = False
        self.next_seq += 1
        self._digests.pop(self.next_seq - NUM_REMEMBERED, None)

    @property
    def lacks(self) -> int | None:
        """The number of a command that has not come while later ones wait for it."""
        if self._is_running or not self._waiting or self.next_seq in self._waiting:
            return None
        return self.next_seq

    def close(self, why: str) -> list[T]:
        """Take no new commands from now on, for this reason; returns those that have waited."""
        self._closed = self._closed or why
        waiting = [self._waiting[seq_id] for seq_id in sorted(self._waiting)]
        self._waiting.clear()
        return waiting
