"""Trainers and samplers of a server of the Tinker API, as Ray actors.

RayBackend ─► RayTrainer, one a model ─► Crew ─► PrimitiveTrainerActor, one a rank
          └─► RaySampler, for all of them ─► SamplerActor
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from rlsys.algorithms.loss_inputs import LossFn
from rlsys.config import ClusterConfig, ModelConfig, RolloutConfig, SamplingConfig, TrainerConfig
from rlsys.config.training_config import check_adapters
from rlsys.controller.worker_protocols import TrainerDied
from rlsys.reallocation.transport.shared_memory import SharedMemory
from rlsys.tinker_server.api_errors import PartDied
from rlsys.tinker_server.datum_rows import DataRows, ModelLimits
from rlsys.tinker_server.server_backend import BaseModel, PassResult, Scores, StepParams
from rlsys.tinker_server.server_checkpoints import SamplerWeights
from rlsys.types import Generation, GenerationRequest, Int32Array, TrainRow, WeightManifest

from ..cluster.calls import HEARTBEAT_GROUP, Heartbeat, Worker, WorkerError, end_all
from ..run.factories import compute_threads
from ..trainer.rank_group import RankGroup
from ..trainer.trainer_actor import free_port
from ..trainer.trainer_proxy import absolute, finish
from .sampler_actor import RaySampler, SamplerActor, SamplerFactory

if TYPE_CHECKING:
    from rlsys.engines.training.trainer_state import HeldState
    from rlsys.tinker_server.call_engine import Passed, PrimitiveEngine

# Of W + B A · alpha / rank, whatever the rank is: a learning rate then suits all ranks
# (LoRA Without Regret, Thinking Machines 2025).
ALPHA = 32


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What a server needs to know of the model that it offers, and of the machines."""

    name: str  # as clients say it
    model: ModelConfig
    trainer: TrainerConfig
    rollout: RolloutConfig
    cluster: ClusterConfig


@dataclass(frozen=True, kw_only=True)
class EngineFactory:
    served: ServedModel
    lora: str
    seed: int

    def __call__(self, rank: int, host: str, port: int) -> PrimitiveEngine:
        import torch

        from rlsys.engines.training.ranks import init_process_group
        from rlsys.tinker_server.api_losses import weighted_cross_entropy
        from rlsys.tinker_server.call_engine import PrimitiveEngine, summed

        served, trainer = self.served, self.served.trainer
        world_size = trainer.parallel.num_ranks
        device = "cuda" if trainer.num_gpus else "cpu"
        torch.set_num_threads(compute_threads(trainer.num_cpus))
        if world_size > 1:
            limit_s = served.cluster.call_timeout_s
            init_process_group(rank, world_size, host, port, device, limit_s)
        return PrimitiveEngine(
            model_path=served.model.path,
            trainer=trainer,
            model=replace(served.model, lora=self.lora),
            loss=weighted_cross_entropy(),
            aggregation=summed,
            temperature=1.0,
            num_total_steps=1,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
            device=device,
            node=ray.get_runtime_context().get_node_id(),
        )


@dataclass(frozen=True)
class Refusal:
    """A rank's own answer to a command that it did not carry out, on all ranks the same."""

    error: Exception


@ray.remote(concurrency_groups=HEARTBEAT_GROUP)
class PrimitiveTrainerActor(Heartbeat):
    """One rank of a model's trainer. Calls run one at a time, in their order."""

    def __init__(self, rank: int, make_engine: EngineFactory) -> None:
        self._rank = rank
        self._make_engine = make_engine
        self._engine: Any = None  # a PrimitiveEngine, from `start` on
        self._snapshots: Any = None  # of one state, for `save`

    def rendezvous(self) -> tuple[str, str, int]:
        """Id and address of this rank's node, and a free port there for the others to meet at."""
        host = ray.util.get_node_ip_address()
        return ray.get_runtime_context().get_node_id(), host, free_port(host)

    def start(self, host: str, port: int) -> None:
        self._engine = self._make_engine(self._rank, host, port)

    def forward_backward(
        self, rows: list[TrainRow], loss: LossFn, num_targets: int, backward: bool
    ) -> Passed:
        passed: Passed = self._engine.forward_backward(
            rows, loss, num_targets=num_targets, backward=backward
        )
        return passed

    def discard(self) -> None:
        self._engine.discard()

    def optim_step(self, params: StepParams) -> dict[str, float] | Refusal:
        from rlsys.tinker_server.call_engine import AdamStep

        try:
            metrics: dict[str, float] = self._engine.optim_step(AdamStep(**vars(params)))
        except (ValueError, FloatingPointError) as error:  # as all ranks find, which go on
            return Refusal(error)
        return metrics

    def save(self, directory: Path) -> bytes | Refusal:
        """This rank's part of the state."""
        held: HeldState = self._engine.hold(self._file())
        try:
            return held.write(directory)
        except OSError as error:
            return Refusal(error)
        finally:
            held.release()

    def _file(self) -> Any:
        if self._snapshots is None:
            num_bytes = self._engine.snapshot_bytes(1)
            name = f"rlsys-held-{uuid.uuid4().hex[:12]}"
            memory = SharedMemory(name, num_bytes, purpose="the state that is saved")
            self._snapshots = self._engine.open_snapshots(memory.path, name)
            memory.close()
        return self._snapshots

    def load(self, directory: Path, optimizer: bool) -> int:
        """Returns the number of optimizer steps behind it."""
        self._engine.load_weights(directory, optimizer=optimizer)
        version: int = self._engine.policy_version
        return version

    def save_for_sampler(
        self, directory: Path, number: int | None
    ) -> WeightManifest | Refusal | None:
        """Save weights for a sampler and publish them under `number`, if it is given."""
        try:
            self._engine.save_for_sampler(directory)
        except OSError as error:
            return Refusal(error)
        if number is None:
            return None
        manifest: WeightManifest | None = self._engine.publish_as(number, ())
        return manifest

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


class RayTrainer:
    """A rlsys.tinker_server.server_backend.Trainer. Where a rank fails, all are ended, and so is
    the model: whoever goes on starts another from what was saved.
    """

    def __init__(self, name: str, served: ServedModel, lora: str, seed: int) -> None:
        self.name = name
        self.version = 0
        self.is_closed = False
        self.published: WeightManifest | None = None  # that still lies in the ranks' memory
        self.node_ids: list[str] = []
        self._served = served
        self._layout = served.trainer.parallel
        factory = EngineFactory(served=served, lora=lora, seed=seed)
        self._crew = RankGroup(
            [self._rank(rank, factory) for rank in range(self._layout.num_ranks)]
        )

    def _rank(self, rank: int, factory: EngineFactory) -> Worker:
        cluster = self._served.cluster
        options = {"num_cpus": 0, "num_gpus": self._served.trainer.num_gpus}
        handle = PrimitiveTrainerActor.options(**options).remote(rank, factory)  # type: ignore[attr-defined]
        return Worker(
            f"trainer-{rank} of {self.name}",
            handle,
            timeout_s=cluster.call_timeout_s,
            heartbeat_timeout_s=cluster.heartbeat_timeout_s,
            ordered=True,
        )

    async def start(self) -> None:
        limit_s = self._served.cluster.start_timeout_s
        places = await self._all("rendezvous", timeout_s=limit_s)
        self.node_ids = [node_id for node_id, _, _ in places]
        _, host, port = places[0]
        await self._all("start", host, port, timeout_s=limit_s)

    async def forward_backward(self, data: DataRows, loss: LossFn, *, backward: bool) -> PassResult:
        num_data = self._layout.num_data
        shares = [list(data.rows[share::num_data]) for share in range(num_data)]
        arguments = [
            [shares[self._layout.data_index(rank)], loss, data.num_targets, backward]
            for rank in range(self._layout.num_ranks)
        ]
        passed = await self._told(self._crew.each("forward_backward", arguments))
        speak = [rank for rank in range(self._layout.num_ranks) if self._layout.counts(rank)]
        found = {
            number: logprobs for rank in speak for number, logprobs in passed[rank].logprobs.items()
        }
        logprobs = []
        for number, shape in enumerate(data.shapes):
            wide = found[number].reshape(shape[0], -1)
            logprobs.append(np.ascontiguousarray(wide[:, : int(np.prod(shape[1:]))]).reshape(shape))
        return PassResult(logprobs=logprobs, loss=sum(passed[rank].loss for rank in speak))

    async def discard(self) -> None:
        await self._all("discard")

    async def optim_step(self, params: StepParams) -> dict[str, float]:
        metrics: dict[str, float] = _carried_out(await self._all("optim_step", params))[0]
        self.version = round(metrics["policy_version"])
        return metrics

    async def save(self, directory: Path) -> None:
        parts = _carried_out(await self._all("save", absolute(directory)))
        await asyncio.to_thread(finish, directory, parts)

    async def load(self, directory: Path, *, optimizer: bool) -> None:
        self.version = (await self._all("load", absolute(directory), optimizer))[0]

    async def save_for_sampler(self, directory: Path, number: int | None) -> None:
        if number is not None:
            self.published = None  # its memory is used again
        found = _carried_out(await self._all("save_for_sampler", absolute(directory), number))
        if number is not None:
            self.published = found[0]

    async def close(self) -> None:
        self.is_closed, self.published = True, None
        await end_all(self._crew.ranks)

    async def _all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        return await self._told(self._crew.all(method, *args, timeout_s=timeout_s))

    async def _told(self, call: Any) -> list[Any]:
        """Whatever a rank fails of has ended them all."""
        try:
            found: list[Any] = await call
        except (TrainerDied, WorkerError, ValueError, FloatingPointError, OSError) as error:
            told = str(error)
            if self.name not in told:
                told = f"the trainer of {self.name} failed: {told}"
            raise PartDied(told) from error
        return found


def _carried_out(answers: list[Any]) -> list[Any]:
    for answer in answers:
        if isinstance(answer, Refusal):
            raise answer.error
    return answers


class RayBackend:
    """A rlsys.tinker_server.server_backend.Backend, on the Ray cluster that this process has
    joined.
    """

    def __init__(
        self, served: ServedModel, limits: ModelLimits, linear_layers: Sequence[str]
    ) -> None:
        self._served = served
        self._linear_layers = linear_layers
        self._base = BaseModel(name=served.name, path=served.model.path, limits=limits)
        self._trainers: list[RayTrainer] = []
        num_replicas = served.rollout.num_replicas
        self._samplers = [
            RaySampler(
                self._start_sampler,
                f"sampler-{number}",
                base_key=served.name,
                max_running=2 * served.rollout.max_running,
                start_timeout_s=served.cluster.start_timeout_s,
                published=self._published,
            )
            for number in range(num_replicas)
        ]

    @property
    def base_models(self) -> Sequence[BaseModel]:
        return [self._base]

    async def start(self) -> None:
        """The replicas; trainers come with their models. Raises PartDied or ValueError."""
        for sampler in self._samplers:
            await sampler.start()

    def adapters(self, base_model: str, *, rank: int, attention: bool, mlp: bool) -> str:
        return adapters(self._linear_layers, rank=rank, attention=attention, mlp=mlp)

    async def start_trainer(self, name: str, base_model: str, lora: str, seed: int) -> RayTrainer:
        served = self._served
        check_adapters(replace(served.model, lora=lora), served.trainer)
        trainer = RayTrainer(name, served, lora, seed)
        self._trainers = [one for one in self._trainers if not one.is_closed]
        self._trainers.append(trainer)
        await trainer.start()
        return trainer

    async def sample(
        self, weights: SamplerWeights, requests: Sequence[GenerationRequest]
    ) -> Sequence[Generation]:
        sampler = min(self._samplers, key=lambda one: one.load_of(weights.key))
        return await sampler.sample(weights, requests)

    async def score(
        self, weights: SamplerWeights, rows: Sequence[Int32Array], top_k: int
    ) -> Sequence[Scores]:
        return await self._samplers[0].score(weights, rows, top_k)

    async def close(self) -> None:
        for sampler in self._samplers:
            await sampler.close()
        for trainer in self._trainers:
            with contextlib.suppress(PartDied):
                await trainer.close()

    def _published(self, number: int, node_id: str) -> WeightManifest | None:
        """Where all of it lies on that node."""
        for trainer in self._trainers:
            manifest = trainer.published
            if manifest is not None and manifest.version == number:
                is_here = all(share.node == node_id for share in manifest.shares)
                return manifest if is_here else None
        return None

    def _start_sampler(self, name: str) -> Worker:
        served = self._served
        rollout = served.rollout
        factory = SamplerFactory(
            make_engine=_SamplerEngine(served=served, max_context=self._base.limits.max_context),
            base_path=served.model.path,
            dtype=served.model.dtype,
            device="cuda" if rollout.num_gpus else "cpu",
            pass_tokens=served.trainer.micro_batch_tokens,
        )
        options = {"num_cpus": 0, "num_gpus": rollout.num_gpus}
        return Worker(
            name,
            SamplerActor.options(**options).remote(factory),  # type: ignore[attr-defined]
            timeout_s=served.cluster.call_timeout_s,
            heartbeat_timeout_s=served.cluster.heartbeat_timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class _SamplerEngine:
    served: ServedModel
    max_context: int

    def __call__(self) -> Any:
        from rlsys.engines.generation.engine_choice import build_engine

        served = self.served
        return build_engine(
            served.model, served.rollout, SamplingConfig(), max_context=self.max_context
        )


def adapters(linear_layers: Sequence[str], *, rank: int, attention: bool, mlp: bool) -> str:
    """As model.lora names them: beside all linear layers but the head, or those of attention, or
    all others. Raises ValueError where there are none.
    """
    if attention and mlp:
        return f"r{rank}a{ALPHA}"
    of_attention = [name for name in linear_layers if "attn" in name or "attention" in name]
    chosen = of_attention if attention else sorted(set(linear_layers) - set(of_attention))
    ends = sorted({name.rpartition(".")[2] for name in chosen})
    others = {name.rpartition(".")[2] for name in set(linear_layers) - set(chosen)}
    if not ends or others & set(ends):
        what = "attention" if attention else "MLP"
        raise ValueError(
            f"the model's layers of {what} cannot be told by their names; train both, with "
            "train_attn=True and train_mlp=True."
        )
    return f"r{rank}a{ALPHA}:{','.join(ends)}"
