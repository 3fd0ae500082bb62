"""SAPO: a swarm that shares its rollouts (Amico et al., 2509.08721).

Each node trains a policy of its own and writes what that samples, as text, where the others can
read it. A step of a node consists of I groups that it samples and J that others did, drawn from
those whose rewards differ; as long as they offer too few, it samples in their stead. It reads them
with its own tokenizer and scores them with its own rewards. Then GRPO:

    A_i = (r_i - mean(r)) / (std(r) + eps),      loss = -min(u A, clip(u, 1 - low, 1 + high) A)

For a token of another node, u compares the policy with itself at the beginning of the step: who
sampled it is not known. For one of its own the denominator is the policy that sampled, as in GRPO.

A node is an ordinary run. Nodes may have different models and speeds, on any machines that share
runs_dir; one that is slow or gone offers nothing new, and nobody waits for it.

    python recipes/swarm.py --num-nodes 4                  # on this machine: swarm-0 to swarm-3
    python recipes/swarm.py --name swarm-7 --seed 7        # one more, here or elsewhere
    python recipes/swarm.py --name alone --num-nodes 4 --external-groups 0     # nothing is shared
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import rlsys
from recipes import arithmetic
from recipes.clips import ClippedConfig
from recipes.swarm_nodes import run_nodes
from rlsys import Dataflow, ObserveConfig, Prompts, RewardFn, RolloutConfig, Shared, require
from rlsys.algorithms import clipped_surrogate, grpo_advantage, token_mean


@dataclass(frozen=True, kw_only=True)
class SwarmConfig(ClippedConfig):
    """A node's own settings, beside the clips."""

    peers: tuple[str, ...] = ("swarm-*",)
    """Runs below runs_dir whose rollouts it takes: names, or patterns of names."""
    external_groups: int = 16
    """Groups J of a step that come from peers; prompts_per_step less these, I, are its own."""
    observe: ObserveConfig = field(default_factory=lambda: ObserveConfig(record_groups=65_536))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shared.check(self)

    @property
    def shared(self) -> Shared:
        return Shared(peers=self.peers, groups_per_step=self.external_groups)


def swarm(
    cfg: SwarmConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """The algorithm. `rows` replaces the dataset of cfg.data where a recipe makes its own."""
    flow = Dataflow()
    policy = flow.model("policy")
    prompts = Prompts(config=cfg.data, rows=rows, shared=cfg.shared)
    rollouts = flow.generate(policy, prompts, group_size=cfg.group_size)
    reward = flow.score(rollouts, rewards)
    advantages = flow.per_group(grpo_advantage, reward)
    flow.train(
        policy,
        rollouts,
        advantages,
        loss=clipped_surrogate(cfg.clip_low, cfg.clip_high),
        aggregation=token_mean,
    )
    return flow


@dataclass(frozen=True, kw_only=True)
class Config(arithmetic.ArithmeticConfig, SwarmConfig):
    """Of the arithmetic task, for four nodes on two cores."""

    name: str = "swarm"
    """Name of the run's directory below runs_dir; two runs never share one."""
    num_nodes: int = 1
    """Nodes to start on this machine, called NAME-0 and so on, each with a seed of its own; they
    are each other's only peers, and their output goes to files. 1: this process is the node."""
    num_steps: int = 60
    """Optimizer steps of the whole run, resumed parts included."""
    prompts_per_step: int = 32
    """Groups in one optimizer step."""
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_running=256))

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_nodes >= 1, f"num_nodes={self.num_nodes} starts nothing; use at least 1.")


@rlsys.main
def main() -> None:
    parsed = rlsys.parse(Config)
    cfg = parsed.config
    if cfg.num_nodes > 1 and not parsed.dry_run:
        arithmetic.graph(cfg, swarm)  # its mistakes are told before a node starts
        run_nodes(__file__, cfg.name, cfg.num_nodes, cfg.seed, cfg.runs_dir)
    else:
        arithmetic.run(cfg, swarm, dry_run=parsed.dry_run)


if __name__ == "__main__":
    main()
