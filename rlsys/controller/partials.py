"""Partial rollouts of running requests: parts in the store, in order and without gaps.

    replica ──Part──► add ──► of(request) ──► another replica that continues, or a checkpoint

A replica reports new tokens only, so each token travels once. Parts outlive the replica. If a shard
is lost, all parts of the requests that had one there are forgotten; these requests then start from
their prompts if their replica dies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from rlsys.controller.worker_protocols import StepPart
from rlsys.dataflow.store.stream_store import StreamStore


class PartialRollouts:
    """The parts of all running requests."""

    def __init__(self, store: StreamStore) -> None:
        self._store = store
        self._parts: dict[str, list[StepPart]] = {}  # by request id
        self._deferred: list[StepPart] | None = None  # to release when reading ends

    def add(self, part: StepPart) -> None:
        """Keep a part that continues the earlier ones; discard any other."""
        block, place = part.cell
        parts = self._parts.get(part.request_id, [])
        if part.start != _num_tokens(parts) or self._store.is_lost(block.shard):
            self._store.discard(block, [place])
            return
        self._store.keep(part.cell)
        self._parts.setdefault(part.request_id, parts).append(part)

    def discard(self, part: StepPart) -> None:
        """Release the bytes of a part whose request was dropped."""
        block, place = part.cell
        self._store.discard(block, [place])

    def of(self, request_id: str) -> Sequence[StepPart]:
        """Return the parts of a request."""
        return self._parts.get(request_id, ())

    def forget(self, request_id: str) -> None:
        """Release the parts of a request that has ended or was dropped."""
        parts = self._parts.pop(request_id, [])
        if self._deferred is not None:
            self._deferred += parts
        elif parts:
            self._store.release_kept([part.cell for part in parts])

    @contextlib.contextmanager
    def reading(self) -> Iterator[list[StepPart]]:
        """Yield all parts; keep their bytes until the block ends."""
        assert self._deferred is None, "the parts are being read already"
        self._deferred = []
        try:
            yield [part for parts in self._parts.values() for part in parts]
        finally:
            parts, self._deferred = self._deferred, None
            self._store.release_kept([part.cell for part in parts])

    def shard_lost(self, shard: str) -> None:
        """Forget the requests that had parts in a shard that died."""
        for request_id, parts in list(self._parts.items()):
            if any(part.cell[0].shard == shard for part in parts):
                self.forget(request_id)


def _num_tokens(parts: Sequence[StepPart]) -> int:
    return sum(part.num_tokens for part in parts)
