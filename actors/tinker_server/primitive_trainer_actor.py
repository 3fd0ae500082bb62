"""Rank of a trainer of the Tinker API: an actor with an engine for each model in it.

PrimitiveTrainerActor ─► PrimitiveEngine, one per model ─► FrozenWeights, one per process
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rlsys.algorithms.loss_inputs import LossFn
from rlsys.config import ClusterConfig, ModelConfig, RolloutConfig, TrainerConfig
from rlsys.reallocation.transport.shared_memory import SharedMemory
from rlsys.tinker_server.server_backend import StepParams
from rlsys.types import TrainRow, WeightManifest

from ..cluster.calls import HEARTBEAT_GROUP, Heartbeat
from ..run.factories import compute_threads
from ..trainer.trainer_actor import free_port

if TYPE_CHECKING:
    from rlsys.engines.training.trainer_state import HeldState
    from rlsys.tinker_server.call_engine import PrimitiveEngine


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model that a server offers, and the configuration of its machines."""

    name: str  # as clients name it
    model: ModelConfig
    trainer: TrainerConfig
    rollout: RolloutConfig
    cluster: ClusterConfig
    max_adapters: int  # in one batch of a sampler
    models_per_trainer: int

    @property
    def samples_adapters(self) -> bool:
        """Return whether samplers keep the base model and load adapters."""
        return self.rollout.engine == "torch"


@dataclass(frozen=True, kw_only=True)
class EngineFactory:
    """Factory of the training engines of one rank."""

    served: ServedModel
    is_shared: bool

    def __call__(self, rank: int, lora: str, seed: int, frozen: Any) -> PrimitiveEngine:
        """Return the engine of a model, after all ranks have met.

        `frozen` are the weights that engines share; None: the engine has its own.
        """
        from rlsys.tinker_server.api_losses import weighted_cross_entropy
        from rlsys.tinker_server.call_engine import PrimitiveEngine, summed

        served, trainer = self.served, self.served.trainer
        return PrimitiveEngine(
            model_path=served.model.path,
            trainer=trainer,
            model=replace(served.model, lora=lora),
            loss=weighted_cross_entropy(),
            aggregation=summed,
            temperature=1.0,
            num_total_steps=1,
            seed=seed,
            rank=rank,
            world_size=trainer.parallel.num_ranks,
            device="cuda" if trainer.num_gpus else "cpu",
            node=ray.get_runtime_context().get_node_id(),
            frozen=frozen,
        )

    def meet(self, rank: int, host: str, port: int) -> None:
        """Wait for the other ranks."""
        import torch

        from rlsys.engines.training.ranks import init_process_group

        trainer = self.served.trainer
        torch.set_num_threads(compute_threads(trainer.num_cpus))
        if trainer.parallel.num_ranks > 1:
            device = "cuda" if trainer.num_gpus else "cpu"
            limit_s = self.served.cluster.call_timeout_s
            init_process_group(rank, trainer.parallel.num_ranks, host, port, device, limit_s)


@dataclass(frozen=True)
class RefusedCommand:
    """The error of a command that all ranks have refused. The model continues."""

    error: Exception


@dataclass(frozen=True)
class LostModel:
    """Why a model of a shared host is lost. The other models continue."""

    reason: str


class HostedEngine:
    """The engine of a model in an actor, and the memory for its saved states."""

    def __init__(self, engine: PrimitiveEngine) -> None:
        self.engine = engine
        self._snapshots: Any = None  # of one state

    def hold(self) -> HeldState:
        """Return a copy of this rank's part of the state."""
        if self._snapshots is None:
            num_bytes = self.engine.snapshot_bytes(1)
            name = f"rlsys-held-{uuid.uuid4().hex[:12]}"
            memory = SharedMemory(name, num_bytes, purpose="the state that is saved")
            self._snapshots = self.engine.open_snapshots(memory.path, name)
            memory.close()
        # A client may load a state of any step, so the step does not identify the state.
        self._snapshots.clear()
        return self.engine.hold(self._snapshots)


@ray.remote(concurrency_groups=HEARTBEAT_GROUP)
class PrimitiveTrainerActor(Heartbeat):
    """A rank of a host. Calls run one at a time, in order."""

    def __init__(self, rank: int, factory: EngineFactory) -> None:
        self._rank = rank
        self._factory = factory
        self._engines: dict[str, HostedEngine] = {}  # by model
        self._frozen: Any = None  # FrozenWeights

    def rendezvous(self) -> tuple[str, str, int]:
        """Return the id and address of this rank's node, and a free port for the rendezvous."""
        host = ray.util.get_node_ip_address()
        return ray.get_runtime_context().get_node_id(), host, free_port(host)

    def start(self, host: str, port: int) -> None:
        """Wait for the other ranks."""
        from rlsys.engines.training.adapters import FrozenWeights

        self._factory.meet(self._rank, host, port)
        self._frozen = FrozenWeights() if self._factory.is_shared else None

    def open(self, model: str, lora: str, seed: int) -> Any:
        """Create the engine of a model."""

        def create() -> None:
            self._engines[model] = HostedEngine(self._factory(self._rank, lora, seed, self._frozen))

        return self._run(model, create, ValueError, OSError)  # the adapters, or memory

    def drop(self, model: str) -> None:
        """Close the engine of a model."""
        if (one := self._engines.pop(model, None)) is not None:
            one.engine.close()

    def forward_backward(
        self, model: str, rows: list[TrainRow], loss: LossFn, num_targets: int, backward: bool
    ) -> Any:
        """Run a pass on this rank's rows and return its PassOutput."""
        return self._run(
            model,
            lambda: self._engine(model).forward_backward(
                rows, loss, num_targets=num_targets, backward=backward
            ),
            FloatingPointError,
        )

    def discard(self, model: str) -> Any:
        """Discard the accumulated gradients."""
        return self._run(model, lambda: self._engine(model).discard())

    def optim_step(self, model: str, params: StepParams) -> Any:
        """Take an optimizer step and return its metrics."""
        from rlsys.tinker_server.call_engine import AdamStep

        step = AdamStep(**vars(params))
        return self._run(
            model, lambda: self._engine(model).optim_step(step), ValueError, FloatingPointError
        )

    def save(self, model: str, directory: Path) -> Any:
        """Save this rank's part of the state and return its description."""

        def save() -> bytes:
            held = self._engines[model].hold()
            try:
                return held.write(directory)
            finally:
                held.release()

        return self._run(model, save, OSError)

    def load(self, model: str, directory: Path, optimizer: bool) -> Any:
        """Load a state, and return its number of optimizer steps."""

        def load() -> int:
            self._engine(model).load_weights(directory, optimizer=optimizer)
            return self._engine(model).policy_version

        return self._run(model, load)

    def save_for_sampler(self, model: str, directory: Path, number: int | None) -> Any:
        """Save weights for a sampler.

        With `number`, publish them under it and return the manifest.
        """

        def save() -> WeightManifest | None:
            self._engine(model).save_for_sampler(directory)
            return None if number is None else self._engine(model).publish_as(number, ())

        return self._run(model, save, OSError)

    def close(self) -> None:
        """Close all engines."""
        for model in list(self._engines):
            self.drop(model)

    def _engine(self, model: str) -> PrimitiveEngine:
        return self._engines[model].engine

    def _run(
        self, model: str, work: Callable[[], Any], *refused: type[Exception]
    ) -> Any | RefusedCommand | LostModel:
        """Return the result of a command, or its error if it is `refused`.

        Any other error ends the process, because ranks may wait for each other in a collective. In
        a shared host, which has one rank, it ends the model alone.
        """
        try:
            return work()
        except refused as error:
            return RefusedCommand(error)
        except Exception as error:  # the other models are intact
            if self._frozen is None:
                raise
            self.drop(model)
            return LostModel(f"{type(error).__name__}: {error}")
