"""Weights sent to another node: whole, or as changes to the last version.

Outbox, of the rank that sends ── WeightDelta ──► Inbox, of the process that receives
keeps what it sent last                           keeps what it received last
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from rlsys.reallocation.transport.changed_bytes import Changes, apply, changes
from rlsys.reallocation.transport.shared_memory import Bytes, SharedMemory
from rlsys.reallocation.transport.staging import NAME, DamagedWeightsError
from rlsys.types import WeightShare

# Every WHOLE_EVERY-th delta is a whole version. If changes are no smaller than the whole, so many
# whole versions are sent before versions are compared again.
WHOLE_EVERY = 16


@dataclass(frozen=True, kw_only=True)
class WeightDelta:
    """A share of a version, whole or as changes."""

    share: WeightShare
    content: Bytes | Changes
    base: int | None = None
    """Version that the changes are based on."""

    @property
    def num_bytes(self) -> int:
        """Bytes to send."""
        content = self.content
        return content.num_bytes if isinstance(content, Changes) else content.nbytes


@dataclass(frozen=True, kw_only=True)
class _Sent:
    version: int
    number: int  # index of the delta, from 0
    compare_from: int  # index of the first delta that is compared again
    content: Bytes | None


class Outbox:
    """Sender of weight deltas; thread-safe."""

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}
        self._lock = threading.Lock()

    def weight_delta(
        self, place: str, base: int | None, pack: Callable[[], tuple[WeightShare, Bytes]]
    ) -> WeightDelta:
        """Return the share that `pack` makes, as changes if `place` still has version `base`.

        None as `base` means that the place may have nothing.
        """
        with self._lock:
            share, content = pack()
            before = self._sent.get(place)
            number = 0 if before is None else before.number + 1
            compare_from = 0 if before is None else before.compare_from
            difference = None
            old = None if before is None or before.version != base else before.content
            if old is not None and number % WHOLE_EVERY:
                difference = _changes(old, content)
                if difference is None:
                    compare_from = number + WHOLE_EVERY
            is_base = compare_from <= number + 1
            self._sent[place] = _Sent(
                version=share.version,
                number=number,
                compare_from=compare_from,
                content=content if is_base else None,
            )
        if difference is None:
            return WeightDelta(share=share, content=content)
        return WeightDelta(share=share, content=difference, base=base)


def _changes(old: Bytes, new: Bytes) -> Changes | None:
    """Return the changes, or None if they save less than half of the bytes."""
    if len(old) != len(new):
        return None
    difference = changes(old, new)
    return difference if 2 * difference.num_bytes <= len(new) else None


class Inbox:
    """Receiver of one reader, which closes a version before it takes the next."""

    def __init__(self) -> None:
        self._received: dict[int, tuple[WeightShare, SharedMemory, Bytes]] = {}

    def keep(self, ranks: Collection[int]) -> None:
        """Release the versions of all other ranks."""
        for rank in self._received.keys() - set(ranks):
            _, memory, _ = self._received.pop(rank)
            memory.close()

    def take(self, weight_delta: WeightDelta) -> WeightShare:
        """Return the delta as a share of this node.

        Raises DamagedWeightsError for changes to a version that this process does not have, and
        OSError if there is too little memory.
        """
        share, content = weight_delta.share, weight_delta.content
        last = self._received.pop(share.rank, None)
        if isinstance(content, Changes):
            if last is None or last[0].version != weight_delta.base:
                raise DamagedWeightsError(
                    f"changes of version {share.version} of the weights are based on version "
                    f"{weight_delta.base}, which this process does not have. Send it whole."
                )
            _, memory, body = last
            if len(body) != share.num_bytes:  # the trainer has changed its layout
                raise DamagedWeightsError(
                    f"changes of version {share.version} of the weights are based on "
                    f"{share.num_bytes} bytes, but this process has {len(body)}. Send it whole."
                )
            apply(content, body)
        else:
            memory, body = self._memory(last, len(content))
            body[:] = content
        self._received[share.rank] = share, memory, body
        return replace(share, path=memory.path)

    def _memory(
        self, last: tuple[WeightShare, SharedMemory, Bytes] | None, num_bytes: int
    ) -> tuple[SharedMemory, Bytes]:
        if last is not None:
            _, memory, body = last
            if len(body) == num_bytes:
                return memory, body
            memory.close()
        memory = SharedMemory(NAME, num_bytes, purpose="a version of the weights of another node")
        return memory, memory.map()
