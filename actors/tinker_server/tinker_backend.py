"""Trainers and samplers of a server of the Tinker API, as Ray actors.

RayBackend ─► RayTrainer, one per model ─► RankGroup ─► PrimitiveTrainerActor, one per rank
          └─► RaySampler, for all models ─► SamplerActor
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
from rlsys.errors import InvalidValue
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
    from rlsys.tinker_server.call_engine import PassOutput, PrimitiveEngine

# Of W + B A · alpha / rank, for every rank: then one learning rate suits all ranks (LoRA Without
# Regret, Thinking Machines 2025).
ALPHA = 32


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model that a server offers, and the configuration of its machines."""

    name: str  # as clients name it
    model: ModelConfig
    trainer: TrainerConfig
    rollout: RolloutConfig
    cluster: ClusterConfig


@dataclass(frozen=True, kw_only=True)
class EngineFactory:
    """Factory of the training engine of one rank."""

    served: ServedModel
    lora: str
    seed: int

    def __call__(self, rank: int, host: str, port: int) -> PrimitiveEngine:
        """Return the engine of a rank, after all ranks have met."""
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
class RefusedCommand:
    """The error of a command that all ranks have refused. The model continues."""

    error: Exception


@ray.remote(concurrency_groups=HEARTBEAT_GROUP)
class PrimitiveTrainerActor(Heartbeat):
    """A rank of a model's trainer. Calls run one at a time, in order."""

    def __init__(self, rank: int, make_engine: EngineFactory) -> None:
        self._rank = rank
        self._make_engine = make_engine
        self._engine: Any = None  # a PrimitiveEngine, from `start` on
        self._snapshots: Any = None  # of one state, for `save`

    def rendezvous(self) -> tuple[str, str, int]:
        """Return the id and address of this rank's node, and a free port for the rendezvous."""
        host = ray.util.get_node_ip_address()
        return ray.get_runtime_context().get_node_id(), host, free_port(host)

    def start(self, host: str, port: int) -> None:
        """Create the engine."""
        self._engine = self._make_engine(self._rank, host, port)

    def forward_backward(
        self, rows: list[TrainRow], loss: LossFn, num_targets: int, backward: bool
    ) -> PassOutput | RefusedCommand:
        """Run a pass on this rank's rows."""
        try:
            output: PassOutput = self._engine.forward_backward(
                rows, loss, num_targets=num_targets, backward=backward
            )
        except FloatingPointError as error:  # on all ranks
            return RefusedCommand(error)
        return output

    def discard(self) -> None:
        """Discard the accumulated gradients."""
        self._engine.discard()

    def optim_step(self, params: StepParams) -> dict[str, float] | RefusedCommand:
        """Take an optimizer step."""
        from rlsys.tinker_server.call_engine import AdamStep

        try:
            metrics: dict[str, float] = self._engine.optim_step(AdamStep(**vars(params)))
        except (ValueError, FloatingPointError) as error:  # on all ranks
            return RefusedCommand(error)
        return metrics

    def save(self, directory: Path) -> bytes | RefusedCommand:
        """Save this rank's part of the state."""
        held: HeldState = self._engine.hold(self._snapshot_file())
        try:
            return held.write(directory)
        except OSError as error:
            return RefusedCommand(error)
        finally:
            held.release()

    def _snapshot_file(self) -> Any:
        if self._snapshots is None:
            num_bytes = self._engine.snapshot_bytes(1)
            name = f"rlsys-held-{uuid.uuid4().hex[:12]}"
            memory = SharedMemory(name, num_bytes, purpose="the state that is saved")
            self._snapshots = self._engine.open_snapshots(memory.path, name)
            memory.close()
        # A client may load a state of any step, so the step does not identify the state.
        self._snapshots.clear()
        return self._snapshots

    def load(self, directory: Path, optimizer: bool) -> int:
        """Load a state, and return its number of optimizer steps."""
        self._engine.load_weights(directory, optimizer=optimizer)
        version: int = self._engine.policy_version
        return version

    def save_for_sampler(
        self, directory: Path, number: int | None
    ) -> WeightManifest | RefusedCommand | None:
        """Save weights for a sampler and publish them under `number`, if it is given."""
        try:
            self._engine.save_for_sampler(directory)
        except OSError as error:
            return RefusedCommand(error)
        if number is None:
            return None
        manifest: WeightManifest | None = self._engine.publish_as(number, ())
        return manifest

    def close(self) -> None:
        """Close the engine."""
        if self._engine is not None:
            self._engine.close()


class RayTrainer:
    """Implementation of rlsys.tinker_server.server_backend.Trainer.

    If a rank fails, all ranks are ended, and the model with them. Clients continue with another
    model from a checkpoint.
    """

    def __init__(self, name: str, served: ServedModel, lora: str, seed: int) -> None:
        self.name = name
        self.version = 0
        self.is_closed = False
        self.published: WeightManifest | None = None  # still in the ranks' memory
        self.node_ids: list[str] = []
        self._served = served
        self._layout = served.trainer.parallel
        factory = EngineFactory(served=served, lora=lora, seed=seed)
        self._ranks = RankGroup(
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
        """Start all ranks."""
        limit_s = self._served.cluster.start_timeout_s
        places = await self._all("rendezvous", timeout_s=limit_s)
        self.node_ids = [node_id for node_id, _, _ in places]
        _, host, port = places[0]
        await self._all("start", host, port, timeout_s=limit_s)

    async def forward_backward(self, data: DataRows, loss: LossFn, *, backward: bool) -> PassResult:
        """Run a pass, with the rows spread over the data-parallel ranks."""
        num_data = self._layout.num_data
        shares = [list(data.rows[share::num_data]) for share in range(num_data)]
        arguments = [
            [shares[self._layout.data_index(rank)], loss, data.num_targets, backward]
            for rank in range(self._layout.num_ranks)
        ]
        outputs = _results(await self._ended(self._ranks.each("forward_backward", arguments)))
        counted = [rank for rank in range(self._layout.num_ranks) if self._layout.counts(rank)]
        found = {
            number: logprobs
            for rank in counted
            for number, logprobs in outputs[rank].logprobs.items()
        }
        logprobs = []
        for number, shape in enumerate(data.shapes):
            wide = found[number].reshape(shape[0], -1)
            logprobs.append(np.ascontiguousarray(wide[:, : int(np.prod(shape[1:]))]).reshape(shape))
        return PassResult(logprobs=logprobs, loss=sum(outputs[rank].loss for rank in counted))

    async def discard(self) -> None:
        """Discard the accumulated gradients."""
        await self._all("discard")

    async def optim_step(self, params: StepParams) -> dict[str, float]:
        """Take an optimizer step and return its metrics."""
        metrics: dict[str, float] = _results(await self._all("optim_step", params))[0]
        self.version = round(metrics["policy_version"])
        return metrics

    async def save(self, directory: Path) -> None:
        """Save parameters and moments into an empty directory."""
        parts = _results(await self._all("save", absolute(directory)))
        await asyncio.to_thread(finish, directory, parts)

    async def load(self, directory: Path, *, optimizer: bool) -> None:
        """Load parameters, and with `optimizer` the moments."""
        self.version = (await self._all("load", absolute(directory), optimizer))[0]

    async def save_for_sampler(self, directory: Path, number: int | None) -> None:
        """Save weights for a sampler, and publish them under `number`, if it is given."""
        if number is not None:
            self.published = None  # its memory is reused
        found = _results(await self._all("save_for_sampler", absolute(directory), number))
        if number is not None:
            self.published = found[0]

    async def close(self) -> None:
        """End all ranks."""
        self.is_closed, self.published = True, None
        await end_all(self._ranks.ranks)

    async def _all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        return await self._ended(self._ranks.all(method, *args, timeout_s=timeout_s))

    async def _ended(self, call: Any) -> list[Any]:
        """Return the answers of all ranks. A failure of one of them has ended all."""
        try:
            found: list[Any] = await call
        except (TrainerDied, WorkerError, ValueError, FloatingPointError, OSError) as error:
            reason = str(error)
            if self.name not in reason:
                reason = f"the trainer of {self.name} failed: {reason}"
            raise PartDied(reason) from error
        return found


def _results(answers: list[Any]) -> list[Any]:
    """Return the answers of all ranks, or raise the error of a refused command."""
    for answer in answers:
        if isinstance(answer, RefusedCommand):
            raise answer.error
    return answers


class RayBackend:
    """Implementation of rlsys.tinker_server.server_backend.Backend on the connected Ray cluster."""

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
        """The one model that is served."""
        return [self._base]

    async def start(self) -> None:
        """Start the samplers. Trainers start with their models.

        Raises:
            PartDied: A sampler died.
            ValueError: The engine cannot run the model.
        """
        for sampler in self._samplers:
            await sampler.start()

    def adapters(self, base_model: str, *, rank: int, attention: bool, mlp: bool) -> str:
        """Return adapters as in model.lora."""
        return adapters(self._linear_layers, rank=rank, attention=attention, mlp=mlp)

    async def start_trainer(self, name: str, base_model: str, lora: str, seed: int) -> RayTrainer:
        """Start the trainer of a model."""
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
        """Return completions from the sampler that can start them first."""
        sampler = min(self._samplers, key=lambda one: one.load_of(weights.key))
        return await sampler.sample(weights, requests)

    async def score(
        self, weights: SamplerWeights, rows: Sequence[Int32Array], top_k: int
    ) -> Sequence[Scores]:
        """Return the log-probabilities of rows of tokens."""
        return await self._samplers[0].score(weights, rows, top_k)

    async def close(self) -> None:
        """End all samplers and trainers."""
        for sampler in self._samplers:
            await sampler.close()
        for trainer in self._trainers:
            with contextlib.suppress(PartDied):
                await trainer.close()

    def _published(self, number: int, node_id: str) -> WeightManifest | None:
        """Return the manifest of published weights if all shares are on that node."""
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
    """Return adapters as in model.lora, for all linear layers but the head or a part of them.

    Raises:
        InvalidValue: The names of the layers do not show which are of attention or MLP.
    """
    if attention and mlp:
        return f"r{rank}a{ALPHA}"
    attention_layers = [name for name in linear_layers if "attn" in name or "attention" in name]
    chosen = attention_layers if attention else sorted(set(linear_layers) - set(attention_layers))
    suffixes = sorted({name.rpartition(".")[2] for name in chosen})
    other_suffixes = {name.rpartition(".")[2] for name in set(linear_layers) - set(chosen)}
    if not suffixes or other_suffixes & set(suffixes):
        what = "attention" if attention else "MLP"
        raise InvalidValue(
            "lora_config",
            rule=f"the names of the model's layers do not show which are {what}",
            fix="Train both, with train_attn=True and train_mlp=True.",
        )
    return f"r{rank}a{ALPHA}:{','.join(suffixes)}"
