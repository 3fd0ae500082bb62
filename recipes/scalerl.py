"""ScaleRL (Khatri et al., 2510.13786): choices that hold up as compute grows.

    asynchronous        sampling runs up to eight steps ahead; weights are updated after every step,
                        in the middle of generation, and the KV cache is kept
    CISPO               -sg(min(rho, 5)) A log pi: no token loses its gradient
    prompt mean         each prompt has the same weight, regardless of its completions' lengths
    batch-std           A_i = (r_i - mean of its group) / std of these over the whole step
    zero variance       groups of equal rewards are excluded from that std and from the mean over
                        prompts; they are not replaced

    curriculum          a prompt that was answered nine times of ten is not issued again

    length control      thinking beyond a number of tokens is interrupted, and a short answer
                        follows; the interruption is not trained on

Logits are computed in float32 in sampler and trainer, as in the paper. Length control is for models
that think, on other tasks than this one: --sampling.interrupt-after 10240
--sampling.max-tokens 12288.

    python recipes/scalerl.py --name scalerl
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import rlsys
from recipes import arithmetic
from rlsys import AsyncConfig, DataConfig, Dataflow, Prompts, RewardFn, RunConfig
from rlsys.algorithms import cispo, prompt_mean, scale_rl_advantage
from rlsys.errors import require


@dataclass(frozen=True, kw_only=True)
class ScaleRLConfig(RunConfig):
    """Settings of ScaleRL."""

    max_ratio: float = 5.0
    """Upper bound of a token's importance weight; the paper's results hold from 4 to 8."""
    asynchrony: AsyncConfig = field(default_factory=lambda: AsyncConfig(max_staleness=8))
    data: DataConfig = field(default_factory=lambda: DataConfig(retire_at=0.9))

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max_ratio >= 1,
            "max_ratio",
            self.max_ratio,
            rule="a bound below 1 scales on-policy gradients down",
            fix="Use 4 to 8.",
        )


def scalerl(
    cfg: ScaleRLConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """Return the graph of the algorithm. `rows` replaces the dataset of cfg.data."""
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    reward = flow.score(rollouts, rewards)
    advantages = flow.per_batch(scale_rl_advantage, reward)
    flow.train(policy, rollouts, *advantages, loss=cispo(cfg.max_ratio), aggregation=prompt_mean)
    return flow


@dataclass(frozen=True, kw_only=True)
class Config(arithmetic.ArithmeticConfig, ScaleRLConfig):
    """Settings for the arithmetic task."""

    name: str = "scalerl"
    """Name of the run's directory below runs_dir."""


@rlsys.main
def main() -> None:
    """Run the recipe."""
    arithmetic.train(Config, scalerl)


if __name__ == "__main__":
    main()
