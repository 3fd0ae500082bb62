"""One rank of the trainer as a Ray actor, and all ranks behind the controller's `Learner`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors.calls import Worker
from actors.store import StoreAddress, StoreClient
from rlsys.engines.training.protocol import StepResult, TrainingEngine
from rlsys.types import MicroBatch, TrainRow, WeightManifest
from rlsys.workers import TrainTask

TRAIN_COLUMNS = ("prompt_token_ids", "token_ids", "sampler_logprobs", "policy_versions")

# (rank, host of rank 0, port there) -> this rank's engine, built in the actor's own process.
EngineFactory = Callable[[int, str, int], TrainingEngine]


@ray.remote
class TrainerActor:
    """Calls run one at a time, in the order in which they were made."""

    def __init__(self, rank: int, make_engine: EngineFactory, store: StoreAddress) -> None:
        self._rank = rank
        self._make_engine = make_engine
        self._store = StoreClient(store)

    def rendezvous(self) -> tuple[str, int]:
        """Host and a free port of this rank, for the others to meet it at."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def start(self, host: str, port: int) -> None:
        self._engine = self._make_engine(self._rank, host, port)

    def sft_step(self, token_ids: list[list[int]], prompt_lengths: list[int]) -> float:
        return self._engine.sft_step(token_ids, prompt_lengths)

    def end_warm_start(self) -> None:
        self._engine.reset_optimizer()

    def accumulate(self, tasks: list[TrainTask]) -> None:
        columns = self._store.get([task.cell for task in tasks], TRAIN_COLUMNS) if tasks else {}
        rows = [
            TrainRow(
                **{name: columns[name][i] for name in TRAIN_COLUMNS},
                advantages=np.full(len(columns["token_ids"][i]), task.advantage, np.float32),
                loss_mask=np.ones(len(columns["token_ids"][i]), np.bool_),
                group_id=task.group_id,
                group_size=task.group_size,
                group_num_tokens=task.group_num_tokens,
            )
            for i, task in enumerate(tasks)
        ]
        self._engine.accumulate(MicroBatch(rows=rows))

    def optimizer_step(self) -> StepResult:
        return self._engine.optimizer_step()

    def publish(self) -> WeightManifest | None:
        return self._engine.publish()

    def save(self, directory: Path) -> None:
        self._engine.save(directory)

    def load(self, directory: Path) -> None:
        self._engine.load(directory)

    def export(self, directory: Path) -> None:
        self._engine.export(directory)

    def close(self) -> None:
        self._engine.close()


class RayLearner:
    """All ranks; every call goes to each of them, and the answer of rank 0 is the answer."""

    def __init__(self, ranks: Sequence[Worker]) -> None:
        self._ranks = ranks

    async def start(self) -> None:
        host, port = await self._ranks[0].call("rendezvous")
        await self._all("start", host, port)

    async def sft_step(self, token_ids: list[list[int]], prompt_lengths: list[int]) -> float:
        loss: float = await self._all("sft_step", token_ids, prompt_lengths)
        return loss

    async def end_warm_start(self) -> None:
        await self._all("end_warm_start")

    async def accumulate(self, shares: Sequence[Sequence[TrainTask]]) -> None:
        await asyncio.gather(
            *(
                rank.call("accumulate", list(share))
                for rank, share in zip(self._ranks, shares, strict=True)
            )
        )

    async def optimizer_step(self) -> StepResult:
        result: StepResult = await self._all("optimizer_step")
        return result

    async def publish(self) -> WeightManifest:
        manifest: WeightManifest = await self._all("publish")
        return manifest

    async def save(self, directory: Path) -> None:
        await self._all("save", directory)

    async def load(self, directory: Path) -> None:
        await self._all("load", directory)

    async def export(self, directory: Path) -> None:
        await self._all("export", directory)

    async def close(self) -> None:
        await self._all("close")

    async def _all(self, method: str, *args: Any) -> Any:
        answers = await asyncio.gather(*(rank.call(method, *args) for rank in self._ranks))
        return answers[0]
