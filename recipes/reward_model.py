"""A reward model learned from preferences (Ouyang et al., 2203.02155, equation 1).

Of two completions of a prompt one is better: c over r. Scores s, of a model with a head of one
output, are to say so by Bradley and Terry's rule, that c is preferred with probability
σ(s(c) − s(r)):

    loss = −log σ(s(c) − s(r)) + centre · (s(c) + s(r))²

Nothing is sampled: rows are pairs that the dataset holds, the better one first. Here they are right
and wrong sums, as recipes/quickstart.py asks for. recipes/ppo.py takes the model from runs/NAME/hf.

    python recipes/reward_model.py --name judge
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import rlsys
from recipes.quickstart import CHARACTERS, problem
from rlsys import OwnModel, RunConfig, SamplingConfig, TrainerConfig
from rlsys.dataflow.graph import PREFERENCE, Dataflow, Prompts

NUM_PAIRS = 65536


@dataclass(frozen=True, kw_only=True)
class PairsConfig(RunConfig):
    """What training on pairs of sums shares; sizes fit two CPU cores."""

    group_size: int = 2
    """Completions of a prompt: a pair."""
    num_steps: int = 400
    """Optimizer steps of the whole run, resumed parts included."""
    prompts_per_step: int = 128
    """Pairs in one optimizer step."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=6))


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(PairsConfig):
    """The reward model's own settings."""

    centre: float = 0.01
    """Keeps the scores around 0; the preferences know their differences alone."""
    name: str = "reward-model"
    """Name of the run's directory below runs_dir; two runs never share one."""
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            learning_rate=1e-3, warmup_steps=20, schedule="linear", micro_batch_tokens=4096
        )
    )


def reward_model(
    cfg: RewardModelConfig, *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """The algorithm. `rows` replaces the dataset of cfg.data where a recipe makes its own."""
    from rlsys.algorithms import bradley_terry, sequence_mean

    flow = Dataflow()
    judge = flow.model("reward_model", head="score")
    pairs = flow.dataset(Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    flow.train(judge, pairs, PREFERENCE, loss=bradley_terry(cfg.centre), aggregation=sequence_mean)
    return flow


def pair(rng: random.Random) -> dict[str, Any]:
    """A sum, its right answer, and a wrong one such as a model may give."""
    row = problem(rng)
    right = row["answer"]
    wrong = right
    while wrong == right:
        wrong = rng.choice(
            (
                str(abs(int(right) + rng.choice((-10, -1, 1, 10)))),
                str(rng.randint(0, 99)),
                right[:-1] + rng.choice("0123456789"),
                right + rng.choice(CHARACTERS),
                right[:-1],
            )
        )
    return {"prompt": row["prompt"], "completions": [right, wrong]}


def pairs(seed: int, count: int = NUM_PAIRS) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [pair(rng) for _ in range(count)]


@rlsys.main
def main() -> None:
    parsed = rlsys.parse(RewardModelConfig)
    cfg = parsed.config
    rlsys.launch(
        cfg,
        reward_model(cfg, rows=pairs(cfg.seed + 2)),
        own_model=OwnModel(name="addition", characters=CHARACTERS),
        dry_run=parsed.dry_run,
    )


if __name__ == "__main__":
    main()
