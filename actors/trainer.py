"""One rank of the trainer as a Ray actor, and all ranks behind the controller's `Learner`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import ray

from rlsys.observe.trace import TraceBatch, Tracer
from rlsys.types import MicroBatch, StepResult, TrainRow, WeightManifest
from rlsys.workers import TrainTask

from .calls import Worker
from .store import StoreAddress, StoreClient

if TYPE_CHECKING:
    from rlsys.engines.training.protocol import TrainingEngine

TRAIN_COLUMNS = ("prompt_token_ids", "token_ids", "sampler_logprobs", "policy_versions")

# (rank, host of rank 0, port there) -> this rank's engine, built in the actor's own process.
EngineFactory = Callable[[int, str, int], "TrainingEngine"]


@ray.remote(concurrency_groups={"beside": 1})
class TrainerActor:
    """Calls run one at a time, in the order in which they were made; but what is `beside` the
    training waits for none of it."""

    def __init__(
        self, rank: int, make_engine: EngineFactory, store: StoreAddress, tracer: Tracer
    ) -> None:
        self._tracer = tracer
        self._rank = rank
        self._make_engine = make_engine
        self._store = StoreClient(store)
        self._engine: Any = None  # a TrainingEngine, from `start` on
        self._train_s = 0.0  # since the last optimizer step

    def rendezvous(self) -> tuple[str, str, int]:
        """Id and address of this rank's node, and a free port there for the others to meet at."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return ray.get_runtime_context().get_node_id(), host, probe.getsockname()[1]

    def start(self, host: str, port: int) -> None:
        self._engine = self._make_engine(self._rank, host, port)

    @ray.method(concurrency_group="beside")
    def drain_trace(self) -> TraceBatch:
        return self._tracer.drain()

    @ray.method(concurrency_group="beside")
    def read_weights(self, manifest: WeightManifest) -> npt.NDArray[np.uint8]:
        """The bytes of a published version, for replicas on other nodes."""
        return np.fromfile(manifest.path, np.uint8)

    def sft_step(
        self, token_ids: list[list[int]], prompt_lengths: list[int], learning_rate: float
    ) -> float:
        with self._tracer.working("trainer", "sft_step"):
            loss: float = self._engine.sft_step(
                token_ids, prompt_lengths, learning_rate=learning_rate
            )
            return loss

    def reset_optimizer(self) -> None:
        self._engine.reset_optimizer()

    def accumulate(self, tasks: list[TrainTask]) -> None:
        with self._working("accumulate", rows=len(tasks)):
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
        with self._working("optimizer_step"):
            result: StepResult = self._engine.optimizer_step()
        train_s, self._train_s = self._train_s, 0.0
        return replace(result, train_s=train_s)

    def publish(self) -> WeightManifest | None:
        """A manifest on rank 0."""
        with self._working("publish"):
            manifest: WeightManifest | None = self._engine.publish()
            return manifest

    @contextlib.contextmanager
    def _working(self, name: str, **args: Any) -> Iterator[None]:
        start = time.perf_counter()
        with self._tracer.working("trainer", name, **args):
            yield
        self._train_s += time.perf_counter() - start

    def save(self, directory: Path) -> None:
        self._engine.save(directory)

    def load(self, directory: Path) -> None:
        self._engine.load(directory)

    def export(self, directory: Path) -> None:
        self._engine.export(directory)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


class RayLearner:
    """All ranks; every call goes to each of them, before anything is awaited, and the answer of
    rank 0 is the answer."""

    def __init__(self, ranks: Sequence[Worker]) -> None:
        self.ranks = ranks
        self.node_id = ""  # of rank 0, from `start` on
        self._content: tuple[str, Any] = ("", None)  # path of a version, reference to its bytes

    async def start(self, timeout_s: float) -> None:
        self.node_id, host, port = await self.ranks[0].call("rendezvous", timeout_s=timeout_s)
        await self._all("start", host, port, timeout_s=timeout_s)

    def weights_content(self, manifest: WeightManifest) -> Any:
        """A reference to the bytes of a version; Ray brings them to each node once."""
        if self._content[0] != manifest.path:
            self._content = (manifest.path, self.ranks[0].handle.read_weights.remote(manifest))
        return self._content[1]

    async def sft_step(
        self, token_ids: list[list[int]], prompt_lengths: list[int], learning_rate: float
    ) -> float:
        loss: float = await self._all("sft_step", token_ids, prompt_lengths, learning_rate)
        return loss

    async def reset_optimizer(self) -> None:
        await self._all("reset_optimizer")

    async def accumulate(self, shares: Sequence[Sequence[TrainTask]]) -> None:
        calls = [
            rank.begin("accumulate", list(share))
            for rank, share in zip(self.ranks, shares, strict=True)
        ]
        await asyncio.gather(*calls)

    async def optimizer_step(self) -> StepResult:
        result: StepResult = await self._all("optimizer_step")
        return result

    async def publish(self) -> WeightManifest:
        manifest: WeightManifest = await self._all("publish")
        return manifest

    async def save(self, directory: Path) -> None:
        await self._all("save", _absolute(directory))

    async def load(self, directory: Path) -> None:
        await self._all("load", _absolute(directory))

    async def export(self, directory: Path) -> None:
        await self._all("export", _absolute(directory))

    async def _all(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        calls = [rank.begin(method, *args, timeout_s=timeout_s) for rank in self.ranks]
        return (await asyncio.gather(*calls))[0]


def _absolute(directory: Path) -> Path:
    """As it holds in the ranks, whose working directory is another."""
    return directory.absolute()
