"""What an actor builds in its own process, as small objects that travel there.

In: the configuration. Out: factories for engines and reward runners, and what each actor reserves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlsys.config import RunConfig
from rlsys.engines.generation.choice import build_engine
from rlsys.engines.generation.protocol import GenerationEngine
from rlsys.rewards import PackedRewards, RewardRunner

from .placement import Need

if TYPE_CHECKING:  # reward workers do without torch, whose import takes seconds
    from rlsys.algorithms.aggregation import Aggregation
    from rlsys.algorithms.inputs import LossFn
    from rlsys.engines.training.protocol import TrainingEngine


def needs(config: RunConfig) -> tuple[list[Need], list[Need]]:
    """Of the trainer's ranks and of the replicas. The store's shards and the reward workers reserve
    nothing: they wait most of the time."""
    ranks = [
        Need(
            name=f"trainer-{rank}",
            num_cpus=config.trainer.num_cpus,
            num_gpus=config.trainer.num_gpus,
            fix="trainer.num_ranks, trainer.num_cpus or trainer.num_gpus",
        )
        for rank in range(config.trainer.num_ranks)
    ]
    replicas = [
        Need(
            name=f"rollout-{replica}",
            num_cpus=config.rollout.num_cpus,
            num_gpus=config.rollout.num_gpus,
            fix="rollout.num_replicas, rollout.num_cpus or rollout.num_gpus",
        )
        for replica in range(config.rollout.num_replicas)
    ]
    return ranks, replicas


def compute_threads(num_cpus: float) -> int:
    return max(1, int(num_cpus))


@dataclass(frozen=True, kw_only=True)
class TrainerFactory:
    config: RunConfig
    loss: LossFn
    aggregation: Aggregation

    def __call__(self, rank: int, host: str, port: int) -> TrainingEngine:
        import torch

        from rlsys.engines.training.fsdp_engine import FSDPEngine
        from rlsys.engines.training.ranks import init_process_group

        config = self.config
        world_size = config.trainer.num_ranks
        device = "cuda" if config.trainer.num_gpus else "cpu"
        torch.set_num_threads(compute_threads(config.trainer.num_cpus))
        if world_size > 1:
            init_process_group(rank, world_size, host, port, device, config.cluster.call_timeout_s)
        return FSDPEngine(
            model_path=config.model.path,
            trainer=config.trainer,
            model=config.model,
            loss=self.loss,
            aggregation=self.aggregation,
            temperature=config.sampling.temperature,
            num_total_steps=config.num_steps,
            seed=config.seed,
            rank=rank,
            world_size=world_size,
            device=device,
        )


@dataclass(frozen=True, kw_only=True)
class RolloutFactory:
    config: RunConfig
    replica: int

    def __call__(self) -> GenerationEngine:
        config = self.config
        max_context = config.data.max_prompt_tokens + config.sampling.max_tokens
        return build_engine(config.model, config.rollout, max_context=max_context)


@dataclass(frozen=True, kw_only=True)
class RewardFactory:
    config: RunConfig
    rewards: PackedRewards

    def __call__(self) -> RewardRunner:
        return RewardRunner(
            self.rewards,
            concurrency=self.config.reward.concurrency,
            timeout_s=self.config.reward.timeout_s,
            memory_gib=self.config.reward.memory_gib,
            start_timeout_s=self.config.cluster.start_timeout_s,
        )
