"""An engine that samples nothing: the completion of each request is in the dataset.

A rlsys.engines.generation.generation_protocol.GenerationEngine without a model, so that training on
what a dataset holds runs through the same replicas, gate and store as training on what a policy
samples.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from rlsys.common.async_condition import AsyncCondition
from rlsys.engines.generation.generation_protocol import EngineStats
from rlsys.types import INJECTED, Generation, GenerationRequest, WeightManifest


class DatasetEngine:
    """Tokens carry the version that was current when they were asked for, and NaN for the
    log-probability that their sampler gave them, which nobody here knows.
    """

    def __init__(self) -> None:
        self._version = self._next_version = 0
        self._num_tokens = 0
        self._ended: list[Generation] = []
        self._has_ended = AsyncCondition()

    async def start(self) -> None: ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._ended += [self._answer(request) for request in requests]
        self._has_ended.notify()

    async def collect(self) -> list[Generation]:
        await self._has_ended.until(lambda: bool(self._ended))
        ended, self._ended = self._ended, []
        return ended

    async def progress(self) -> list[Generation]:
        return []

    async def abort(self, request_ids: Collection[str]) -> None:
        """Every request has ended as soon as it came."""

    async def pause(self) -> None: ...

    async def prepare(self, manifest: WeightManifest) -> None:
        self._next_version = manifest.version

    async def load(self) -> None:
        self._version = self._next_version

    async def resume(self) -> None: ...

    async def release(self) -> None:
        """There is nothing."""

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=0,
            num_running=0,
            num_generated_tokens=self._num_tokens,
            policy_version=self._version,
        )

    async def close(self) -> None: ...

    def _answer(self, request: GenerationRequest) -> Generation:
        if request.completion is None:
            raise ValueError(
                f"request {request.request_id} has no completion: this engine answers with those "
                "of a dataset; let the graph begin with flow.dataset."
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
