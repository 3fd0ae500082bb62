"""An engine that does not sample: the completion of each request is in the dataset.

It implements GenerationEngine without a model, so that training on a dataset uses the same
replicas, gate and store as training on sampled completions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from rlsys.common.async_condition import AsyncCondition
from rlsys.engines.generation.generation_protocol import EngineStats
from rlsys.engines.models.attention_context import UNBOUNDED
from rlsys.errors import InvalidValue
from rlsys.types import INJECTED, Generation, GenerationRequest, WeightManifest


class DatasetEngine:
    """A GenerationEngine for completions of a dataset.

    Tokens carry the version at the time of the request, and NaN as sampler log-probability, which
    is unknown.
    """

    def __init__(self) -> None:
        self._version = self._next_version = 0
        self._num_tokens = 0
        self._ended: list[Generation] = []
        self._has_ended = AsyncCondition()

    @property
    def context(self) -> int:
        """See `GenerationEngine.context`."""
        return UNBOUNDED

    async def start(self) -> None:
        """See `GenerationEngine.start`."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `GenerationEngine.submit`."""
        self._ended += [self._answer(request) for request in requests]
        self._has_ended.notify()

    async def collect(self) -> list[Generation]:
        """See `GenerationEngine.collect`."""
        await self._has_ended.until(lambda: bool(self._ended))
        ended, self._ended = self._ended, []
        return ended

    async def progress(self) -> list[Generation]:
        """See `GenerationEngine.progress`."""
        return []

    async def abort(self, request_ids: Collection[str]) -> None:
        """Do nothing: every request has ended at once."""

    async def pause(self) -> None:
        """See `GenerationEngine.pause`."""

    async def prepare(self, manifest: WeightManifest) -> None:
        """See `GenerationEngine.prepare`."""
        self._next_version = manifest.version

    async def load(self) -> None:
        """See `GenerationEngine.load`."""
        self._version = self._next_version

    async def resume(self) -> None:
        """See `GenerationEngine.resume`."""

    async def release(self) -> None:
        """Do nothing: the engine holds no memory."""

    def stats(self) -> EngineStats:
        """See `GenerationEngine.stats`."""
        return EngineStats(
            num_waiting=0,
            num_running=0,
            num_generated_tokens=self._num_tokens,
            policy_version=self._version,
        )

    async def close(self) -> None:
        """See `GenerationEngine.close`."""

    def _answer(self, request: GenerationRequest) -> Generation:
        if request.completion is None:
            raise InvalidValue(
                f"request {request.request_id!r}: completion",
                rule="this engine needs one from a dataset",
                fix="Let the graph begin with flow.dataset.",
            )
        token_ids = np.array(request.completion.token_ids, np.int32)
        versions = np.full(len(token_ids), self._version, np.int32)
        if request.completion.loss_mask is not None:
            versions[~np.array(request.completion.loss_mask)] = INJECTED
        self._num_tokens += len(token_ids)
        return Generation(
            request_id=request.request_id,
            token_ids=token_ids,
            sampler_logprobs=np.full(len(token_ids), np.nan, np.float32),
            policy_versions=versions,
            finish_reason=request.completion.finish_reason,
        )
