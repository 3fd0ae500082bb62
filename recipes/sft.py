r"""Supervised fine-tuning (SFT) on the completions of a dataset.

The loss increases the likelihood of the completion's tokens; the prompt's tokens are only context:

    loss = mean over all completion tokens of -log pi(token | prompt, tokens before it)

Nothing is sampled for training. The same loss on held-out rows shows whether the model generalizes.
Here rows are sums of two numbers, a quarter of which is held out and also sampled for evaluation.

    python recipes/sft.py

For any data and model, use rows of a prompt and a completion, or chats, whose replies are trained
on. --data.skip-long-prompts true leaves out rows that are longer than --sampling.max-tokens.

    python recipes/sft.py --model.path MODEL --data.chat-template true \
        --data.source recipes/data/gsm8k/train.jsonl --data.prompt-column question \
        --completion-column answer --evaluation.source recipes/data/gsm8k/test.jsonl \
        --sampling.max-tokens 1280 --trainer.learning-rate 1e-5
    python recipes/sft.py --model.path MODEL --data.chat-template true --data.source chats.jsonl \
        --data.prompt-column messages --completion-column messages --evaluation.every 0 \
        --sampling.max-tokens 2048 --trainer.learning-rate 1e-5
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import rlsys
from recipes.arithmetic import MODEL, correct, small_trainer
from rlsys import (
    Dataflow,
    HeldOut,
    HeldOutConfig,
    Prompts,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
)
from rlsys.algorithms import cross_entropy, token_mean

HELD_OUT_FRAC = 0.25


@dataclass(frozen=True, kw_only=True)
class SFTConfig(RunConfig):
    """Settings of SFT."""

    group_size: int = 1
    """Completions per prompt."""
    completion_column: str = "completion"
    """Column with the completion, a text or messages; or data.prompt_column itself, for chats."""


def sft(cfg: SFTConfig, *, rows: Sequence[dict[str, Any]] | None = None) -> Dataflow:
    """Return the graph of the algorithm. `rows` replaces the dataset of cfg.data."""
    flow = Dataflow()
    policy = flow.model("policy")
    demonstrations = flow.dataset(
        Prompts(config=cfg.data, rows=rows),
        group_size=cfg.group_size,
        completions=cfg.completion_column,
    )
    flow.train(policy, demonstrations, loss=cross_entropy(), aggregation=token_mean)
    return flow


def sums(*, held_out: bool) -> list[dict[str, Any]]:
    """Return the held-out sums of two numbers below 50, or all others."""
    rows = [
        {"prompt": f"{a}+{b}=", "completion": str(a + b), "answer": str(a + b)}
        for a in range(50)
        for b in range(50)
    ]
    random.Random(0).shuffle(rows)
    num = round(HELD_OUT_FRAC * len(rows))
    return rows[:num] if held_out else rows[num:]


@dataclass(frozen=True, kw_only=True)
class Config(SFTConfig):
    """Settings for the sums on two CPU cores."""

    name: str = "sft"
    """Name of the run's directory below runs_dir."""
    num_steps: int = 300
    """Optimizer steps of the whole run."""
    prompts_per_step: int = 128
    """Rows in one optimizer step."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=6))
    trainer: TrainerConfig = field(
        default_factory=lambda: small_trainer(learning_rate=1e-3, warmup_steps=20)
    )
    evaluation: HeldOutConfig = field(default_factory=lambda: HeldOutConfig(every=50, greedy=True))


@rlsys.main
def main() -> None:
    """Run the recipe."""
    parsed = rlsys.parse(Config)
    cfg = parsed.config
    if cfg.data.source:
        rlsys.launch(cfg, sft(cfg), own_model=MODEL, dry_run=parsed.dry_run)
        return
    rlsys.launch(
        cfg,
        sft(cfg, rows=sums(held_out=False)),
        own_model=MODEL,
        held_out=HeldOut(rows=sums(held_out=True), rewards=[correct]),
        dry_run=parsed.dry_run,
    )


if __name__ == "__main__":
    main()
