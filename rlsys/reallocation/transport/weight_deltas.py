"""Weights sent to another node: whole, or as changes to the last version.

Outbox, of the rank that sends ── WeightDelta ──► Inbox, of the node's importer ──► its readers
keeps what it sent last                           keeps what it received last

A WeightDelta has its bytes and travels as a Ray object. A WeightOffer describes one whose bytes
travel over links (group_transport.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlsys.reallocation.transport.changed_bytes import Changes, apply, changes
from rlsys.reallocation.transport.share_layout import WORD, WRITING
from rlsys.reallocation.transport.shared_memory import Bytes
from rlsys.reallocation.transport.staging import DamagedWeightsError
from rlsys.reallocation.transport.version_memory import VersionMemory
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
class WeightOffer:
    """A WeightDelta without its bytes."""

    share: WeightShare
    base: int | None
    sizes: tuple[int, ...]
    """Bytes of each part: one of a whole version, three of changes."""
    number: int  # among the sender's offers
    meeting: tuple[str, int]  # address and port at which the sender meets importers

    @property
    def num_bytes(self) -> int:
        """Bytes to send."""
        return sum(self.sizes)


# Fills consecutive memories with the bytes of an offer.
Fetch = Callable[[Sequence[Bytes]], None]


def parts_of(content: Bytes | Changes) -> tuple[Bytes, ...]:
    """Return the bytes of a delta's content, without a copy."""
    if isinstance(content, Changes):
        return content.groups, content.marks, content.values.view(np.uint8)
    return (content,)


def _fetched_changes(offer: WeightOffer, fetch: Fetch) -> Changes:
    groups, marks, values = parts = [np.empty(size, np.uint8) for size in offer.sizes]
    fetch(parts)
    return Changes(groups=groups, marks=marks, values=values.view(np.uint16))


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
    """Versions of other nodes' ranks, in memory that all readers of this node map.

    A reader may use a version while the next one arrives; see VersionMemory.
    """

    def __init__(self) -> None:
        self._received: dict[int, _Received] = {}  # by rank

    def keep(self, ranks: Collection[int]) -> None:
        """Release the versions of all other ranks."""
        for rank in self._received.keys() - set(ranks):
            self._received.pop(rank).memory.close()

    def take(self, weight_delta: WeightDelta) -> WeightShare:
        """Return the delta as a share of this node.

        Raises DamagedWeightsError for changes to a version that this process does not have, and
        OSError if there is too little memory.
        """
        share, content = weight_delta.share, weight_delta.content
        if isinstance(content, Changes):
            return self._update(share, weight_delta.base, lambda: content)
        return self._replace(share, lambda body: np.copyto(body, content))

    def receive(self, offer: WeightOffer, fetch: Fetch) -> WeightShare:
        """Return an offered version as a share of this node.

        A whole version arrives in the memory that the readers map. Raises as `take` and `fetch` do.
        """
        if offer.base is None:
            return self._replace(offer.share, lambda body: fetch([body]))
        return self._update(offer.share, offer.base, lambda: _fetched_changes(offer, fetch))

    def _replace(self, share: WeightShare, fill: Callable[[Bytes], None]) -> WeightShare:
        last = self._received.get(share.rank)
        if last is None or last.memory.num_bytes != share.num_bytes:
            if last is not None:
                last.memory.close()
            last = self._received[share.rank] = _Received(share.num_bytes)
        return last.write(share, fill)

    def _update(
        self, share: WeightShare, base: int | None, changes: Callable[[], Changes]
    ) -> WeightShare:
        last = self._received.get(share.rank)
        if last is None or last.version != base:
            raise DamagedWeightsError(
                f"changes of version {share.version} of the weights are based on version {base}, "
                "which this process does not have. Send it whole."
            )
        if last.memory.num_bytes != share.num_bytes:  # the trainer has changed its layout
            raise DamagedWeightsError(
                f"changes of version {share.version} of the weights are based on "
                f"{share.num_bytes} bytes, but this process has {last.memory.num_bytes}. Send it "
                "whole."
            )
        difference = changes()
        return last.write(share, lambda body: apply(difference, body), is_update=True)


class _Received:
    """The newest version of a rank's share."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = VersionMemory(num_bytes, "a version of the weights of another node")
        self.version: int | None = None  # None while incomplete

    def write(
        self, share: WeightShare, fill: Callable[[Bytes], None], *, is_update: bool = False
    ) -> WeightShare:
        """Write a version and return its share; `is_update` begins with the bytes of the last."""
        before = self.memory.newest if is_update else None
        memory = self.memory.begin()
        self.version = None
        try:
            if before is not None and memory is not before:
                np.copyto(memory.content, before.content)
            fill(memory.content)
            self.version = share.version
        finally:
            if self.version is None:
                memory.content[:WORD].view(np.int64)[0] = WRITING
            memory.unlock()
        return replace(share, path=memory.shared.path)
