"""The experts of an engine's tokens, from the process that runs vLLM's front end.

    CPU  hooks in the worker (vllm_router_hooks) ─► rlsys_experts ─► WorkerExperts ─┐
    GPU  vLLM's own enable_return_routed_experts ─► its outputs ───► OutputExperts ─┴─► generations

Shape legend: R rows, one for each token but the last, L layers with experts, K experts of a token.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlsys.engines.models.expert_layout import REPLAY, Routing
from rlsys.errors import InvalidValue
from rlsys.types import ExpertArray

Rpc = Callable[..., Awaitable[list[Any]]]
"""Calls a method of each worker and returns their results."""

ReadRows = Callable[[Mapping[str, int], Sequence[str]], Awaitable[Mapping[str, ExpertArray]]]
"""Returns the rows that a worker has recorded of requests from a position on, given the positions
by request and the requests that have ended, which the worker then forgets."""


class ExpertSource(Protocol):
    """The source of the experts of an engine's requests."""

    async def of_ended(self, request_id: str, num_rows: int, completion: Any) -> ExpertArray | None:
        """Return the rows [R, L·K] of an ended request, once; None if nothing was sampled."""

    async def of_running(
        self, num_rows: Mapping[str, int], states: Mapping[str, Any]
    ) -> dict[str, ExpertArray]:
        """Return the rows of running requests, without those that have ended meanwhile."""


async def expert_source(rpc: Rpc, routing: Routing, *, by_hooks: bool) -> ExpertSource:
    """Let the workers record experts and return their source.

    Raises InvalidValue if vLLM's model does not route as the Hugging Face model does.
    """
    answers = await rpc("rlsys_record_experts", pickle.dumps(routing))
    check_recorded(answers)
    if not by_hooks:
        return OutputExperts(routing, answers[0]["layers"])

    async def read(starts: Mapping[str, int], ended: Sequence[str]) -> Mapping[str, ExpertArray]:
        first, *_ = await rpc("rlsys_experts", dict(starts), list(ended))
        rows: dict[str, ExpertArray] = pickle.loads(first)
        return rows

    return WorkerExperts(read)


def check_recorded(answers: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidValue if a worker has refused to record experts."""
    for answer in answers:
        if refusal := answer.get("refusal"):
            rule, fix = refusal
            raise InvalidValue(REPLAY, True, rule=rule, fix=fix)


class WorkerExperts:
    """Experts that the hooks of the first worker have recorded."""

    def __init__(self, read: ReadRows) -> None:
        self._read_rows = read
        self._known: dict[str, ExpertArray] = {}  # rows that have been read, by unended request
        self._ended: set[str] = set()  # requests that wait for their rows
        self._lock = asyncio.Lock()

    async def of_ended(self, request_id: str, num_rows: int, completion: Any) -> ExpertArray | None:
        """See `ExpertSource.of_ended`. Requests that end together share a call."""
        self._ended.add(request_id)
        async with self._lock:
            if request_id in self._ended:  # else the call of another request has read them
                ended = sorted(self._ended)
                self._known |= await self._read(ended, ended)
                self._ended.difference_update(ended)
        rows = self._known.pop(request_id)[:num_rows]
        return rows if num_rows > 0 else None

    async def of_running(
        self, num_rows: Mapping[str, int], states: Mapping[str, Any]
    ) -> dict[str, ExpertArray]:
        """See `ExpertSource.of_running`."""
        async with self._lock:
            read = await self._read(list(num_rows), ())
            found = {
                name: rows[: num_rows[name]]
                for name, rows in read.items()
                if len(rows) >= num_rows[name]
            }
            self._known |= found
        return found

    async def _read(self, names: Sequence[str], ended: Sequence[str]) -> dict[str, ExpertArray]:
        """Return all rows of requests; the worker forgets those that have ended."""
        known = {name: self._known[name] for name in names if name in self._known}
        starts = {name: len(known.get(name, ())) for name in names}
        new = await self._read_rows(starts, ended)
        return {
            name: np.concatenate([known[name], rows]) if name in known else rows
            for name, rows in new.items()
        }


class OutputExperts:
    """Experts that vLLM returns with its outputs, for all layers; `layers` are those of experts."""

    def __init__(self, routing: Routing, layers: Sequence[int]) -> None:
        self._dtype = routing.dtype
        self._layers = list(layers)

    async def of_ended(self, request_id: str, num_rows: int, completion: Any) -> ExpertArray | None:
        """See `ExpertSource.of_ended`."""
        if completion is None or num_rows <= 0:
            return None
        return self._rows(completion.routed_experts, num_rows)

    async def of_running(
        self, num_rows: Mapping[str, int], states: Mapping[str, Any]
    ) -> dict[str, ExpertArray]:
        """See `ExpertSource.of_running`."""
        chunks = {name: states[name].routed_experts_chunks for name in num_rows if name in states}
        return {
            name: self._rows(np.concatenate(of_request), num_rows[name])
            for name, of_request in chunks.items()
            if sum(map(len, of_request)) >= num_rows[name]
        }

    def _rows(self, of_all_layers: Any, num_rows: int) -> ExpertArray:
        chosen = of_all_layers[:num_rows, self._layers]  # [R, L, K]
        rows: ExpertArray = chosen.reshape(num_rows, -1).astype(self._dtype)
        return rows
