"""Parts of a version on their way to another node: whole, or as what has changed since the last.

Outbox, of the rank that sends ── Parcel ──► Inbox, of the process that receives
keeps what it sent last                      keeps what it got last
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from rlsys.reallocation.transport.changed_bytes import Changes, apply, changes
from rlsys.reallocation.transport.shared_memory import Bytes, SharedMemory
from rlsys.reallocation.transport.staging import NAME, DamagedWeightsError
from rlsys.types import WeightShare

# After so many parcels of changes a whole one goes, and where changes are no less, so many whole
# ones go before changes are looked for again.
WHOLE_EVERY = 16


@dataclass(frozen=True, kw_only=True)
class WeightDelta:
    share: WeightShare
    content: Bytes | Changes
    base: int | None = None
    """The version that the changes are to."""

    @property
    def num_bytes(self) -> int:
        content = self.content
        return content.num_bytes if isinstance(content, Changes) else content.nbytes


@dataclass(frozen=True, kw_only=True)
class _Sent:
    version: int
    number: int  # of the parcel, from 0
    look_at: int  # changes are looked for from this number on
    content: Bytes | None


class Outbox:
    """Any thread may send."""

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}
        self._lock = threading.Lock()

    def weight_delta(
        self, place: str, base: int | None, pack: Callable[[], tuple[WeightShare, Bytes]]
    ) -> WeightDelta:
        """What `pack` gives, for a place that still has what it got of version `base`; None: it may
        have nothing.
        """
        with self._lock:
            share, content = pack()
            before = self._sent.get(place)
            number = 0 if before is None else before.number + 1
            look_at = 0 if before is None else before.look_at
            told = None
            old = None if before is None or before.version != base else before.content
            if old is not None and number % WHOLE_EVERY:
                told = _changes(old, content)
                if told is None:
                    look_at = number + WHOLE_EVERY
            is_base = look_at <= number + 1
            self._sent[place] = _Sent(
                version=share.version,
                number=number,
                look_at=look_at,
                content=content if is_base else None,
            )
        if told is None:
            return WeightDelta(share=share, content=content)
        return WeightDelta(share=share, content=told, base=base)


def _changes(old: Bytes, new: Bytes) -> Changes | None:
    """None where they are not worth it."""
    if len(old) != len(new):
        return None
    told = changes(old, new)
    return told if 2 * told.num_bytes <= len(new) else None


class Inbox:
    """Of one reader, which lets go of a version before it takes the next."""

    def __init__(self) -> None:
        self._got: dict[int, tuple[WeightShare, SharedMemory, Bytes]] = {}

    def keep(self, ranks: Collection[int]) -> None:
        """There are no others any more: let go of what came from them."""
        for rank in self._got.keys() - set(ranks):
            _, memory, _ = self._got.pop(rank)
            memory.close()

    def take(self, weight_delta: WeightDelta) -> WeightShare:
        """As a share of this node. Raises DamagedWeightsError for changes to what is not here;
        OSError where memory is short.
        """
        share, content = weight_delta.share, weight_delta.content
        got = self._got.pop(share.rank, None)
        if isinstance(content, Changes):
            if got is None or got[0].version != weight_delta.base:
                raise DamagedWeightsError(
                    f"changes of version {share.version} of the weights are to version "
                    f"{weight_delta.base}, which is not here; send it whole."
                )
            _, memory, room = got
            if len(room) != share.num_bytes:  # of a trainer that was laid out otherwise
                raise DamagedWeightsError(
                    f"changes of version {share.version} of the weights are to {share.num_bytes} "
                    f"bytes, here are {len(room)}; send it whole."
                )
            apply(content, room)
        else:
            memory, room = self._room(got, len(content))
            room[:] = content
        self._got[share.rank] = share, memory, room
        return replace(share, path=memory.path)

    def _room(
        self, got: tuple[WeightShare, SharedMemory, Bytes] | None, num_bytes: int
    ) -> tuple[SharedMemory, Bytes]:
        if got is not None:
            _, memory, room = got
            if len(room) == num_bytes:
                return memory, room
            memory.close()
        memory = SharedMemory(NAME, num_bytes, purpose="a version of the weights of another node")
        return memory, memory.map()
