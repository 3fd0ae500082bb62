r"""A reward model learned from preferences (Ouyang et al., 2203.02155, equation 1).

One of two completions of a prompt is better: c over r. A model with a head of one output computes
scores s. By the Bradley-Terry model, c is preferred with probability sigma(s(c) - s(r)):

    loss = -log sigma(s(c) - s(r)) + centre (s(c) + s(r))^2

Nothing is sampled: rows are pairs of a dataset, the better completion first. Here they are right
and wrong answers to the sums of recipes/arithmetic.py. recipes/ppo.py uses the exported model.

    python recipes/reward_model.py --name judge
    python recipes/ppo.py --reward-model.model.path runs/judge/hf

For any model and pairs, use rows such as {"prompt": "1+1=", "completions": ["2", "3"]}, or the
columns chosen and rejected (docs/formats.md).

    python recipes/reward_model.py --model.path MODEL --data.source pairs.jsonl \
        --sampling.max-tokens 512 --trainer.learning-rate 1e-5
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import rlsys
from recipes.arithmetic import CHARACTERS, MODEL, C, model_of_previous_run, problem, small_trainer
from rlsys import PREFERENCE, Dataflow, Prompts, RunConfig, SamplingConfig, TrainerConfig
from rlsys.algorithms import bradley_terry, sequence_mean

NUM_PAIRS = 65536


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(RunConfig):
    """Settings of the reward model."""

    group_size: int = 2
    """Completions of a prompt: a pair."""
    centre: float = 0.01
    """Coefficient that keeps the scores around 0; preferences only determine differences."""


def reward_model(
    cfg: RewardModelConfig, *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """Return the graph of the algorithm. `rows` replaces the dataset of cfg.data."""
    flow = Dataflow()
    judge = flow.model("reward_model", head="score")
    pairs = flow.dataset(Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    flow.train(judge, pairs, PREFERENCE, loss=bradley_terry(cfg.centre), aggregation=sequence_mean)
    return flow


def pair(rng: random.Random) -> dict[str, Any]:
    """Return a sum with its right answer and a wrong one, which is often close."""
    row = problem(rng)
    right = wrong = row["answer"]
    while wrong == right:
        wrong = rng.choice(
            (
                str(abs(int(right) + rng.choice((-10, -1, 1, 10)))),
                str(abs(int(right) + rng.randint(-12, 12))),
                right[:-1] + rng.choice(CHARACTERS),
                rng.choice((right[:-1], right + rng.choice(CHARACTERS), str(rng.randint(0, 99)))),
            )
        )
    return {"prompt": row["prompt"], "completions": [right, wrong]}


def pairs(cfg: RunConfig) -> list[dict[str, Any]]:
    """Return the rows of the training set."""
    rng = random.Random(cfg.seed + 2)
    return [pair(rng) for _ in range(NUM_PAIRS)]


@dataclass(frozen=True, kw_only=True)
class Config(RewardModelConfig):
    """Settings for the arithmetic task on two CPU cores."""

    name: str = "reward_model"
    """Name of the run's directory below runs_dir."""
    num_steps: int = 300
    """Optimizer steps of the whole run."""
    prompts_per_step: int = 256
    """Pairs in one optimizer step."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=6))
    trainer: TrainerConfig = field(
        default_factory=lambda: small_trainer(learning_rate=1e-3, warmup_steps=20)
    )


def train(cfg: Config, *, dry_run: bool | str | None = None) -> rlsys.RunResult:
    """Train a reward model on this task, or on the configured dataset."""
    flow = reward_model(cfg, rows=None if cfg.data.source else pairs(cfg))
    return rlsys.launch(cfg, flow, own_model=MODEL, dry_run=dry_run)


def reward_model_for_run(cfg: C, path: str) -> tuple[C, str]:
    """Return the reward model of another recipe's run: its path, or a model that is trained first.

    arithmetic.model_of_previous_run explains the returned configuration.
    """
    if path:
        return cfg, path
    name, where = f"{cfg.name}-reward_model", cfg.runs_dir
    own = Config(name=name, runs_dir=where, seed=cfg.seed, resume="auto")
    return model_of_previous_run(cfg, name, lambda: train(own))


@rlsys.main
def main() -> None:
    """Run the recipe."""
    parsed = rlsys.parse(Config)
    train(parsed.config, dry_run=parsed.dry_run)


if __name__ == "__main__":
    main()
