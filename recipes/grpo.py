r"""Group relative policy optimisation (Shao et al., 2402.03300), asynchronous.

Sample a group of completions per prompt and score each of them. The advantage of a completion is
how much better it is than its group. Increase the probability of better completions, within a
clipped range:

    A_i = (r_i - mean(r)) / (std(r) + eps),      loss = -min(rho A, clip(rho, 1 - low, 1 + high) A)

rho is the ratio of the current policy to the policy that sampled the token, which corrects for
rollouts of slightly older weights. The loss is the mean over all completion tokens of a step.

On the small task of recipes/quickstart.py:

    python recipes/grpo.py --name grpo

Advantage, loss and aggregation have names (docs/algorithms.md), and others may replace them:

    python recipes/quickstart.py --loss "gmpo()" --advantage "pass_at_k_advantage(4)" \
        --aggregation sequence_mean
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlsys import Dataflow, Prompts, RewardFn
from rlsys.algorithms import clipped_surrogate, grpo_advantage, token_mean
from rlsys.algorithms.registry import Kind, parse
from rlsys.config import RunConfig
from rlsys.dataflow.graph.named_advantages import (
    ADVANTAGES,
    add_advantage,
    naming_option,
    needs_greedy,
)


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(RunConfig):
    """Settings of GRPO, each a name of docs/algorithms.md with arguments."""

    advantage: str = "grpo_advantage"
    """Advantage of a rollout, from the rewards of its group or of all groups of a step."""
    loss: str = "clipped_surrogate(0.2, 0.28)"
    """Loss of a token; by default with the ratio clipped to 0.8 to 1.28."""
    aggregation: str = "token_mean"
    """Aggregation of the losses of a step's tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        functions_of(self)


def functions_of(cfg: GRPOConfig) -> tuple[Any, Any, Any]:
    """Return advantage, loss and aggregation: GRPO's own, or those that the configuration names."""
    own = {
        "grpo_advantage": grpo_advantage,
        "clipped_surrogate(0.2, 0.28)": clipped_surrogate(0.2, 0.28),
        "token_mean": token_mean,
    }

    def named(field: str, *kinds: Kind) -> Any:
        name = getattr(cfg, field)
        with naming_option(field):
            function = parse(name, *kinds)
        return own.get(name, function)

    return (
        named("advantage", *ADVANTAGES),
        named("loss", "loss"),
        named("aggregation", "aggregation"),
    )


def grpo(
    cfg: GRPOConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """Return the graph of the algorithm. `rows` replaces the dataset of cfg.data."""
    advantage, loss, aggregation = functions_of(cfg)
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
    flow.train(policy, rollouts, advantages, loss=loss, aggregation=aggregation)
    return flow


if __name__ == "__main__":
    from recipes.quickstart import main

    main()
