"""All ranks of a trainer as one: called together, and ended together when one of them fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rlsys.common.user_functions import FunctionFailed
from rlsys.controller.worker_protocols import RowsLost, TrainerDied

from ..cluster.calls import Worker, WorkerDied

# When a rank fails, the others have so long to say what they know; then they are ended.
EXPLAIN_S = 2.0

# What a rank says about its own work; anything else may follow from another rank's death.
OWN_ERRORS = (ValueError, FloatingPointError, FunctionFailed, OSError, RowsLost)


class RankGroup:
    """One life of all ranks, until the first of them fails. Then all are ended: those that are left
    would wait for it in a collective.
    """

    def __init__(self, ranks: Sequence[Worker]) -> None:
        self.ranks = ranks
        self.failure: Exception | None = None
        self._is_writing = False

    async def write(self, directory: Path) -> list[bytes | OSError]:
        """Each rank's part of what it holds, beside all other calls. Ranks that have failed, but
        are alive, finish it before they end.
        """
        self._is_writing = True
        try:
            return await self.all("write", directory)
        finally:
            self._is_writing = False
            if self.failure is not None:
                self.kill()

    async def watch(self) -> NoReturn:
        """Raises the first failure; waits until then."""
        if self.failure is not None:
            raise self.failure
        watching = [asyncio.ensure_future(rank.watch()) for rank in self.ranks]
        try:
            done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in watching:
                one.cancel()
        deaths = [death for one in done if isinstance(death := one.exception(), Exception)]
        raise self.end(_cause(deaths))

    async def all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Each rank's answer to the same call."""
        return await self.each(method, [args] * len(self.ranks), timeout_s=timeout_s)

    async def first(self, method: str, *args: Any) -> Any:
        """The answer of rank 0 to a call that the others have no part in."""
        return (await self._of(self.ranks[:1], method, [args]))[0]

    async def each(
        self, method: str, arguments: Sequence[Sequence[Any]], timeout_s: float | None = None
    ) -> list[Any]:
        """Each rank's answer to a call with arguments of its own. All ranks are called before
        anything is awaited. Raises LearnerDied, or what a rank says about its own work.
        """
        return await self._of(self.ranks, method, arguments, timeout_s)

    async def _of(
        self,
        ranks: Sequence[Worker],
        method: str,
        arguments: Sequence[Sequence[Any]],
        timeout_s: float | None = None,
    ) -> list[Any]:
        if self.failure is not None:
            raise self.failure
        calls = [
            asyncio.ensure_future(rank.begin(method, *args, timeout_s=timeout_s))
            for rank, args in zip(ranks, arguments, strict=True)
        ]
        try:
            done, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if any(call.exception() for call in done) and pending:
                done |= (await asyncio.wait(pending, timeout=EXPLAIN_S))[0]
        finally:
            for call in calls:
                call.cancel()
        errors = [error for call in done if isinstance(error := call.exception(), Exception)]
        if errors:
            raise self.end(_cause(errors))
        return [call.result() for call in calls]

    def end(self, failure: Exception) -> Exception:
        """End all ranks. Their calls fail for this reason, or for an earlier one: returns that."""
        if self.failure is None:
            self.failure = failure
            if not (self._is_writing and isinstance(failure, OWN_ERRORS)):
                self.kill()
        return self.failure

    def kill(self) -> None:
        for rank in self.ranks:
            rank.end(f"ended because {self.failure}")


def _cause(errors: Sequence[Exception]) -> Exception:
    """The error that the others follow from."""
    for own in errors:
        if isinstance(own, OWN_ERRORS):
            return own
    for death in errors:
        if isinstance(death, WorkerDied):
            return TrainerDied(str(death))
    # A bug in a rank, which leaves the others without contact.
    return min(errors, key=lambda error: isinstance(error, TrainerDied))
