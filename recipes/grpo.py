"""Group relative policy optimisation (Shao et al., 2402.03300), asynchronous.

Sample a group of completions per prompt, score each, take as advantage how much better a completion
is than its group, and raise the probability of what was better, within a clipped range:

    A_i = (r_i - mean(r)) / (std(r) + eps),      loss = -min(rho A, clip(rho, 1 - low, 1 + high) A)

rho compares the policy being trained with the one that sampled the token, so that rollouts of
slightly older weights are weighted by how likely they still are. The mean runs over all completion
tokens of a step.

On the small task of recipes/quickstart.py:

    python recipes/grpo.py --name grpo

Each of the three has a name (docs/algorithms.md), and another may stand in its place:

    python recipes/quickstart.py --loss "gmpo()" --advantage "pass_at_k_advantage(4)" \\
        --aggregation sequence_mean
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlsys import Dataflow, Prompts, RewardFn
from rlsys.algorithms import check_group_size
from rlsys.algorithms.registry import parse
from rlsys.config import RunConfig
from rlsys.dataflow.graph.named_advantages import (
    ADVANTAGES,
    add_advantage,
    naming_option,
    needs_greedy,
)


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(RunConfig):
    """GRPO's own settings, each a name of docs/algorithms.md, with arguments."""

    advantage: str = "grpo_advantage"
    """Of a rollout, from the rewards of its group, or of all groups of a step."""
    loss: str = "clipped_surrogate(0.2, 0.28)"
    """Of a token: here clipped around the policy that sampled it, to ratios of 0.8 to 1.28."""
    aggregation: str = "token_mean"
    """How the losses of a step's tokens become one number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        with naming_option("advantage"):
            check_group_size(parse(self.advantage, *ADVANTAGES), self.group_size)
        with naming_option("loss"):
            parse(self.loss, "loss")
        with naming_option("aggregation"):
            parse(self.aggregation, "aggregation")


def grpo(
    cfg: GRPOConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """The algorithm. `rows` replaces the dataset of cfg.data where a recipe makes its own."""
    advantage = parse(cfg.advantage, *ADVANTAGES)
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(
        policy,
        Prompts(config=cfg.data, rows=rows),
        group_size=cfg.group_size,
        greedy_baseline=needs_greedy(advantage),
    )
    reward = flow.score(rollouts, rewards)
    advantages = add_advantage(flow, advantage, reward)
    flow.train(
        policy,
        rollouts,
        advantages,
        loss=parse(cfg.loss, "loss"),
        aggregation=parse(cfg.aggregation, "aggregation"),
    )
    return flow


if __name__ == "__main__":
    from recipes.quickstart import main

    main()
