"""SAPO: a swarm that shares its rollouts (Amico et al., 2509.08721).

Each node trains its own policy and writes its rollouts as text to a directory that the others can
read. A step of a node has I groups of its own and J groups of other nodes, drawn from those with
different rewards; missing ones are replaced by its own. The node tokenizes them with its own
tokenizer and scores them with its own rewards. Then GRPO follows:

    A_i = (r_i - mean(r)) / (std(r) + eps),      loss = -min(u A, clip(u, 1 - low, 1 + high) A)

For a token of another node, u is relative to the node's policy at the start of the step, because
the sampling probability is unknown. For its own tokens, u is relative to the policy that sampled,
as in GRPO.

A node is an ordinary run. Nodes may have different models and speeds, on any machines that share
runs_dir. A slow or dead node offers no new rollouts, and the others do not wait for it.

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
from rlsys import Dataflow, ObserveConfig, Prompts, RewardFn, RolloutConfig, Shared
from rlsys.algorithms import clipped_surrogate, grpo_advantage, token_mean
from rlsys.errors import require


@dataclass(frozen=True, kw_only=True)
class SwarmConfig(ClippedConfig):
    """Settings of a node, in addition to the clips."""

    peers: tuple[str, ...] = ("swarm-*",)
    """Names, or patterns of names, of runs below runs_dir whose rollouts are used."""
    external_groups: int = 16
    """Groups J per step from peers; the other I = prompts_per_step - J groups are its own."""
    observe: ObserveConfig = field(default_factory=lambda: ObserveConfig(record_groups=65_536))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shared.check(self)

    @property
    def shared(self) -> Shared:
        """Return the pool of rollouts of the peers."""
        return Shared(peers=self.peers, groups_per_step=self.external_groups)


def swarm(
    cfg: SwarmConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """Return the graph of the algorithm. `rows` replaces the dataset of cfg.data."""
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
    """Settings for the arithmetic task, with four nodes on two cores."""

    name: str = "swarm"
    """Name of the run's directory below runs_dir."""
    num_nodes: int = 1
    """Nodes to start on this machine, named NAME-0 and so on, with different seeds. They are each
    other's only peers, and their output goes to files. With 1, this process is the node."""
    num_steps: int = 60
    """Optimizer steps of the whole run."""
    prompts_per_step: int = 32
    """Groups in one optimizer step."""
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_running=256))

    def __post_init__(self) -> None:
        super().__post_init__()
        rule, fix = "must be at least 1", "Use 1 for a single node."
        require(self.num_nodes >= 1, "num_nodes", self.num_nodes, rule=rule, fix=fix)


@rlsys.main
def main() -> None:
    """Run the recipe."""
    parsed = rlsys.parse(Config)
    cfg = parsed.config
    if cfg.num_nodes > 1 and not parsed.dry_run:
        arithmetic.graph(cfg, swarm)  # finds mistakes before a node starts
        run_nodes(__file__, cfg.name, cfg.num_nodes, cfg.seed, cfg.runs_dir)
    else:
        arithmetic.run(cfg, swarm, dry_run=parsed.dry_run)


if __name__ == "__main__":
    main()
