"""All ranks of a trainer as one: called together, and ended together when one of them fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rlsys.common.user_functions import FunctionFailed
from rlsys.controller.worker_protocols import RowsLost, TrainerDied

from ..cluster.calls import Worker, WorkerDied

# When a rank fails, the others have this long to raise their own errors before they are ended.
EXPLAIN_S = 2.0

# Errors of a rank's own work; any other error may be a consequence of another rank's death.
OWN_ERRORS = (ValueError, FloatingPointError, FunctionFailed, OSError, RowsLost)


class RankGroup:
    """The processes of all ranks, until the first of them fails.

    Then all ranks are ended, because the others would wait for the failed one in a collective.
    """

    def __init__(self, ranks: Sequence[Worker]) -> None:
        self.ranks = ranks
        self.failure: Exception | None = None
        self._is_writing = False

    async def write(self, directory: Path) -> list[bytes | OSError]:
        """Return each rank's part of the held state, written concurrently with other calls.

        Ranks that have failed but are alive finish writing before they end.
        """
        self._is_writing = True
        try:
            return await self.all("write", directory)
        finally:
            self._is_writing = False
            if self.failure is not None:
                self.kill()

    async def watch(self) -> NoReturn:
        """Wait until a rank fails, then raise the first failure."""
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
        """Return each rank's answer to the same call."""
        return await self.each(method, [args] * len(self.ranks), timeout_s=timeout_s)

    async def first(self, method: str, *args: Any) -> Any:
        """Return the answer of rank 0 to a call that involves no other rank."""
        return (await self._call(self.ranks[:1], method, [args]))[0]

    async def each(
        self, method: str, arguments: Sequence[Sequence[Any]], timeout_s: float | None = None
    ) -> list[Any]:
        """Return each rank's answer to a call with its own arguments.

        All ranks are called before any answer is awaited.

        Raises:
            TrainerDied: A rank has died. Errors of a rank's own work are raised unchanged.
        """
        return await self._call(self.ranks, method, arguments, timeout_s)

    async def _call(
        self,
        ranks: Sequence[Worker],
        method: str,
        arguments: Sequence[Sequence[Any]],
        timeout_s: float | None = None,
    ) -> list[Any]:
        if self.failure is not None:
            raise self.failure
        calls = [
            asyncio.ensure_future(rank.start_call(method, *args, timeout_s=timeout_s))
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
        """End all ranks; return the failure that their calls raise, which may be an earlier one."""
        if self.failure is None:
            self.failure = failure
            if not (self._is_writing and isinstance(failure, OWN_ERRORS)):
                self.kill()
        return self.failure

    def kill(self) -> None:
        """Kill all ranks."""
        for rank in self.ranks:
            rank.end(f"ended because {self.failure}")


def _cause(errors: Sequence[Exception]) -> Exception:
    """Return the error that caused the others."""
    for own in errors:
        if isinstance(own, OWN_ERRORS):
            return own
    for death in errors:
        if isinstance(death, WorkerDied):
            return TrainerDied(str(death))
    # A bug in a rank, after which the others have lost contact.
    return min(errors, key=lambda error: isinstance(error, TrainerDied))
