"""What running requests have sampled so far: parts in the store, in order and without a gap.

    replica ──Part──► add ──► of(request) ──► the replica that goes on with it, or a checkpoint

A replica tells of new tokens only, so that each travels once. Parts outlive the replica; those on a
shard that is lost are forgotten with all parts of the same request, which then has nothing to go on
with until it ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from rlsys.controller.worker_protocols import StepPart
from rlsys.dataflow.store.stream_store import StreamStore


class PartialRollouts:
    def __init__(self, store: StreamStore) -> None:
        self._store = store
        self._parts: dict[str, list[StepPart]] = {}  # by request id
        self._deferred: list[StepPart] | None = None  # while somebody reads the parts

    def add(self, part: StepPart) -> None:
        """Keep a part that follows on what is there; one that does not is handed back."""
        block, place = part.cell
        parts = self._parts.get(part.request_id, [])
        if part.start != _num_tokens(parts) or self._store.is_lost(block.shard):
            self._store.discard(block, [place])
            return
        self._store.keep(part.cell)
        self._parts.setdefault(part.request_id, parts).append(part)

    def refuse(self, part: StepPart) -> None:
        """Hand a part back whose request is not wanted any more."""
        block, place = part.cell
        self._store.discard(block, [place])

    def of(self, request_id: str) -> Sequence[StepPart]:
        return self._parts.get(request_id, ())

    def forget(self, request_id: str) -> None:
        """The request has ended, or is not wanted."""
        parts = self._parts.pop(request_id, [])
        if self._deferred is not None:
            self._deferred += parts
        elif parts:
            self._store.release_kept([part.cell for part in parts])

    @contextlib.contextmanager
    def reading(self) -> Iterator[list[StepPart]]:
        """All parts that there are; their bytes stay until the block ends."""
        assert self._deferred is None, "the parts are being read already"
        self._deferred = []
        try:
            yield [part for parts in self._parts.values() for part in parts]
        finally:
            parts, self._deferred = self._deferred, None
            self._store.release_kept([part.cell for part in parts])

    def shard_lost(self, shard: str) -> None:
        for request_id, parts in list(self._parts.items()):
            if any(part.cell[0].shard == shard for part in parts):
                self.forget(request_id)


def _num_tokens(parts: Sequence[StepPart]) -> int:
    return sum(part.num_tokens for part in parts)
