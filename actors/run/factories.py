"""Factories that travel to actors and build engines and reward runners there.

In: the configuration and the graph. Out: one small picklable factory per kind of actor, and what
each actor reserves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import cloudpickle

from rlsys.config import (
    MIN_CPUS,
    JudgeConfig,
    ModelConfig,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainedRoleConfig,
    TrainerConfig,
)
from rlsys.config.lora import Lora
from rlsys.config.speculation import untrained
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import (
    GenerateStage,
    InferStage,
    JudgeStage,
    Model,
    TrainStage,
)
from rlsys.engines.generation.dataset_engine import DatasetEngine
from rlsys.engines.generation.engine_choice import build_engine, build_policy_engines
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.engines.generation.mixed_engine import MixedEngine
from rlsys.engines.generation.shared_engine import PolicyEngines
from rlsys.environments.environment import Environment
from rlsys.environments.episode import Partner, Sampler
from rlsys.environments.episode_host import EpisodeHost, codec_of, make_host
from rlsys.environments.token_budget import EpisodeLimits
from rlsys.environments.tokens.codec import Codec
from rlsys.rewards import PackedRewards, RewardRunner

from ..cluster.placement import Need
from ..workers.inference_actor import Numbers, Verdicts

if TYPE_CHECKING:  # importing torch takes seconds, and reward workers do not need it
    from rlsys.engines.training.training_protocol import TrainingEngine


# Key among model names; no model name has parentheses.
EVALUATION = "(evaluation)"


def needs(config: RunConfig, flow: StageGraph) -> tuple[list[Need], list[Need]]:
    """Return the reservations of the trainer's ranks and of the replicas.

    A colocated or borrowed replica shares the places of as many ranks as it has devices: the first
    one those of the first ranks, and so on. Each such place is as large as the larger of the two.
    Numbers of borrowed replicas follow those of the others. The store's shards and the reward
    workers reserve nothing because they wait most of the time. Replicas that read a dataset or use
    a server of rollout.urls reserve almost nothing.
    """
    samples, rollout = bool(flow.all(GenerateStage)), config.rollout
    ranks = _ranks("trainer", config.trainer)
    is_colocated = config.placement == "colocated"
    size = rollout.num_devices
    num_hosts = size * (rollout.num_replicas if is_colocated else rollout.borrow)
    fix = "trainer.layout, trainer.num_cpus, rollout.num_cpus or trainer.num_gpus"
    num_cpus = max(config.trainer.num_cpus, rollout.num_cpus / size)
    hosts = [
        replace(rank, num_cpus=num_cpus, fix=fix, is_shared=True) for rank in ranks[:num_hosts]
    ]
    alone: list[tuple[Need, ...]] = [()] * (0 if is_colocated else rollout.num_replicas)
    shared = [tuple(hosts[first : first + size]) for first in range(0, num_hosts, size)]
    replicas = [
        Need(
            name=replica_name(config, replica),
            num_cpus=rollout.num_cpus if samples and not rollout.urls else MIN_CPUS,
            num_gpus=rollout.num_gpus if samples else 0,
            fix="rollout.num_replicas, rollout.num_cpus or rollout.num_gpus",
            colocated_with=of_replica,
            partners=tuple(
                _partner(config, model, replica) for model in flow.partners_with_engines
            ),
        )
        for replica, of_replica in enumerate([*alone, *shared])
    ]
    return [*hosts, *ranks[num_hosts:]], replicas


def replica_name(config: RunConfig, number: int) -> str:
    """Return the name of a replica in messages and traces; its successors add a number."""
    num_own = config.rollout.num_replicas
    return f"rollout-{number}" if number < num_own else f"borrowed-{number - num_own}"


def _partner(config: RunConfig, model: Model, replica: int) -> Need:
    """Return the reservation of a partner's engine on a replica's node."""
    role = model.config
    own = role if isinstance(role, RoleConfig) else config.rollout
    section = model.name if isinstance(role, RoleConfig) else "rollout"
    return Need(
        name=f"{model.name}-rollout-{replica}",
        num_cpus=own.num_cpus,
        num_gpus=own.num_gpus,
        fix=f"rollout.num_replicas, or num_cpus or num_gpus of {section}",
    )


def role_needs(config: RunConfig, flow: StageGraph) -> dict[str, list[Need]]:
    """Return the reservations of models besides the main one, by name, and of evaluation.

    Partners that are not trained are missing: they are placed with the replicas.
    """
    partners = [model for model in flow.partners if not model.may_train]
    roles = {
        model.name: _role(model)
        for model in flow.models.values()
        if model.config is not None and model not in partners
    }
    own = config.evaluation
    if own.every and (own.num_cpus or own.num_gpus):
        fix = "evaluation.num_cpus or evaluation.num_gpus"
        need = Need(name="evaluation", num_cpus=own.num_cpus, num_gpus=own.num_gpus, fix=fix)
        roles[EVALUATION] = [need]
    return roles


def _role(model: Model) -> list[Need]:
    config = model.config
    if isinstance(config, TrainedRoleConfig):
        return _ranks(model.name, config.trainer)
    assert config is not None
    return [
        Need(
            name=f"{model.name}-{worker}",
            num_cpus=config.num_cpus,
            num_gpus=config.num_gpus,
            fix=f"num_workers, num_cpus or num_gpus of {model.name}",
        )
        for worker in range(config.num_workers)
    ]


def _ranks(name: str, trainer: TrainerConfig) -> list[Need]:
    return [
        Need(
            name=f"{name}-{rank}",
            num_cpus=trainer.num_cpus,
            num_gpus=trainer.num_gpus,
            fix=f"{name}.layout, {name}.num_cpus or {name}.num_gpus",
        )
        for rank in range(trainer.parallel.num_ranks)
    ]


NO_SAMPLERS: Mapping[str, Sampler] = MappingProxyType({})


def rank_name(model: Model, rank: int) -> str:
    """Return the name of a trainer rank in messages and traces."""
    return f"trainer-{rank}" if model.is_main else f"{model.name}-{rank}"


def compute_threads(num_cpus: float) -> int:
    """Return the number of compute threads of a process that reserves these CPUs."""
    return max(1, int(num_cpus))


@dataclass(frozen=True, kw_only=True)
class TrainerFactory:
    """Factory of the engine of one rank of a trained model.

    Attributes:
        trainer: Settings with exactly one layout.
        model: The model's settings, with the path of its first weights.
        temperature: Temperature of the log-probabilities.
        profile_dir: Where the traces of profile_steps are written.
    """

    config: RunConfig
    stage: TrainStage
    trainer: TrainerConfig
    model: ModelConfig
    temperature: float
    profile_dir: Path

    def __call__(self, rank: int, host: str, port: int) -> TrainingEngine:
        """Build the engine of a rank that meets the others at `host` and `port`."""
        import ray
        import torch

        from rlsys.engines.training.fsdp_engine import FSDPEngine
        from rlsys.engines.training.ranks import init_process_group

        config, model, trainer = self.config, self.model, self.trainer
        world_size = trainer.parallel.num_ranks
        device = "cuda" if trainer.num_gpus else "cpu"
        torch.set_num_threads(compute_threads(trainer.num_cpus))
        if world_size > 1:
            init_process_group(rank, world_size, host, port, device, config.cluster.call_timeout_s)
        engine: TrainingEngine = FSDPEngine(
            model_path=model.path,
            trainer=trainer,
            model=model,
            loss=self.stage.loss,
            aggregation=self.stage.aggregation,
            temperature=self.temperature,
            num_total_steps=config.num_steps,
            seed=config.seed,
            head=self.stage.model.head,
            rank=rank,
            world_size=world_size,
            device=device,
            node=ray.get_runtime_context().get_node_id(),
            speculation=config.rollout.draft if self.stage.model.is_main else None,
            sends_adapters=bool(model.lora) and config.rollout.sends_adapters,
            shares_device=self.stage.model.is_main
            and config.rollout.weight_transport == "cuda_ipc",
        )
        if not config.profiled_steps:
            return engine
        from rlsys.engines.training.step_profiler import ProfiledEngine

        name = rank_name(self.stage.model, rank)
        steps, directory = config.profiled_steps, self.profile_dir
        profiled: Any = ProfiledEngine(engine, steps=steps, directory=directory, name=name)
        return profiled  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class InferenceFactory:
    """Factory of a frozen model's worker."""

    config: RunConfig
    stage: InferStage
    path: str
    temperature: float

    def __call__(self) -> Numbers:
        """Build the engine of a frozen model."""
        from rlsys.engines.inference.frozen_model import InferenceEngine

        role = self.stage.model.config
        assert isinstance(role, RoleConfig)
        (column,) = self.stage.writes
        engine = InferenceEngine(
            self.path,
            head=self.stage.model.head,
            dtype=role.model.dtype,
            device="cuda" if role.num_gpus else "cpu",
            num_threads=compute_threads(role.num_cpus),
            max_tokens=role.pass_tokens,
            temperature=self.temperature,
            top_k=self.stage.top_k,
            shares_device=0 < role.num_gpus < 1,
        )
        return Numbers(engine=engine, writes=column.name, per_token=column.per == "token")


@dataclass(frozen=True, kw_only=True)
class JudgeFactory:
    """Factory of a judge's worker. `tokenizer` is the policy's."""

    config: RunConfig
    stage: JudgeStage
    path: str
    tokenizer: Any

    def __call__(self) -> Verdicts:
        """Build the engine of a judge."""
        from rlsys.data.prompts import load_tokenizer
        from rlsys.engines.inference.judge import JudgeEngine
        from rlsys.engines.models.model_shape import model_shape
        from rlsys.text.tokenizer_boundary import TokenizerBoundary

        role = self.stage.model.config
        assert isinstance(role, RoleConfig)
        path = self.path
        context = min(model_shape(path).max_context, role.pass_tokens)
        engine = JudgeEngine(
            self.stage,
            writing_engine(role, path, max_context=context),
            load_tokenizer(path),
            context=context,
            seed=self.config.seed,
        )
        (column,) = self.stage.writes
        return Verdicts(
            engine=engine,
            writes=column.name,
            boundary=TokenizerBoundary(self.tokenizer),
            stop=self.config.sampling.stop,
        )


def writing_engine(role: RoleConfig, path: str, *, max_context: int) -> GenerationEngine:
    """Return the engine of a frozen model that generates text, not started yet."""
    from rlsys.engines.models.model_shape import model_shape
    from rlsys.launcher.memory_estimate import kv_cache_bytes

    num_bytes = kv_cache_bytes(role, model_shape(path))
    rollout = RolloutConfig(
        engine=role.engine if isinstance(role, JudgeConfig) else "torch",
        num_cpus=role.num_cpus,
        num_gpus=role.num_gpus,
        kv_cache_gib=num_bytes / 2**30,
    )
    model = replace(role.model, path=path)
    return build_engine(model, rollout, SamplingConfig(), max_context=max_context)


@dataclass(frozen=True, kw_only=True)
class PartnerFactory:
    """Factory of the engine of another model that plays a seat.

    A frozen model has the engine of its role's configuration, a trained one that of the policy.
    `path` holds the initial weights.
    """

    config: RunConfig
    role: RoleConfig | TrainedRoleConfig
    path: str

    def __call__(self) -> GenerationEngine:
        """Build the engine of a partner."""
        config, role = self.config, self.role
        max_context = config.data.max_prompt_tokens + config.sampling.max_tokens
        if isinstance(role, RoleConfig):
            return writing_engine(role, self.path, max_context=max_context)
        model = replace(role.model, path=self.path)
        rollout = replace(config.rollout, speculation=untrained(config.rollout.speculation))
        return build_engine(model, rollout, config.sampling, max_context=max_context)


@dataclass(frozen=True, kw_only=True)
class RolloutFactory:
    """Factory of a replica's engine, which samples with the main model or reads a dataset.

    `sharers` are other policies that the engine serves too, by name, with their adapters. With
    `shares`, the engine also passes on rollouts that other runs sampled. With `shares_device`,
    it will release its memory for the trainer. `devices` are its GPUs, if Ray does not name them.
    With a `url`, the server there samples.
    """

    config: RunConfig
    samples: bool = True
    shares: bool = False
    shares_device: bool = False
    devices: tuple[str, ...] = ()
    url: str = ""
    sharers: Mapping[str, Lora] = field(default_factory=dict)

    def __call__(self) -> GenerationEngine | PolicyEngines:
        """Build the engine of a replica."""
        config = self.config
        if not self.samples:
            return DatasetEngine()
        if self.devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        max_context = config.data.max_prompt_tokens + config.sampling.max_tokens
        if self.sharers:
            return build_policy_engines(
                config.model,
                self.sharers,
                config.rollout,
                config.sampling,
                max_context=max_context,
            )
        engine = build_engine(
            config.model,
            config.rollout,
            config.sampling,
            max_context=max_context,
            shares_device=self.shares_device,
            url=self.url,
        )
        return MixedEngine(engine) if self.shares else engine


@dataclass(frozen=True, kw_only=True)
class EnvironmentFactory:
    """Factory of an environment worker.

    It is called with the sampler of the policy and with those of partners by model name.
    """

    config: RunConfig
    environment: bytes  # pickled, so that only the worker imports its modules
    tokenizer: Any
    max_context: int
    seats: tuple[PartnerSeat, ...] = ()

    def __call__(
        self, sampler: Sampler, partners: Mapping[str, Sampler] = NO_SAMPLERS
    ) -> EpisodeHost:
        """Build the host of a worker's episodes."""
        config = self.config
        environment: Environment = cloudpickle.loads(self.environment)
        return make_host(
            environment,
            self.tokenizer,
            sampler,
            partners=self._partners(environment, partners),
            limits=EpisodeLimits(
                max_prompt_tokens=config.data.max_prompt_tokens,
                max_tokens=config.sampling.max_tokens,
                max_context=self.max_context,
            ),
            memory_gib=config.reward.memory_gib,
            start_timeout_s=config.cluster.start_timeout_s,
        )

    def _partners(
        self, environment: Environment, samplers: Mapping[str, Sampler]
    ) -> Mapping[int, Partner]:
        """Return the partners by seat number."""
        from rlsys.data.prompts import load_tokenizer

        codecs: dict[str, Codec | None] = {}
        for seat in self.seats:
            if not seat.tokenizer:
                codecs[seat.model] = None
            elif seat.model not in codecs:
                codecs[seat.model] = codec_of(environment, load_tokenizer(seat.tokenizer))
        return {
            environment.seats.index(seat.name): Partner(
                codec=codecs[seat.model], sampler=samplers[seat.model]
            )
            for seat in self.seats
        }


@dataclass(frozen=True, kw_only=True)
class PartnerSeat:
    """Seat of an environment that another model plays.

    `tokenizer` is the path of a frozen model's own tokenizer, or "" for a trained model, which uses
    the policy's.
    """

    name: str
    model: str
    tokenizer: str


@dataclass(frozen=True, kw_only=True)
class RewardFactory:
    """Factory of the reward runner of a reward worker."""

    config: RunConfig
    rewards: PackedRewards

    def __call__(self) -> RewardRunner:
        """Build the runner of a worker's rewards."""
        return RewardRunner(
            self.rewards,
            concurrency=self.config.reward.concurrency,
            timeout_s=self.config.reward.timeout_s,
            memory_gib=self.config.reward.memory_gib,
            start_timeout_s=self.config.cluster.start_timeout_s,
        )
