"""Direct preference optimisation (Rafailov et al., 2305.18290).

Of two completions of a prompt one is better: c over r. The policy itself is the reward model: its
log-probabilities, less those of the frozen reference that it began as, are to tell the pair apart
by Bradley and Terry's rule,

    h = (log pi(c) - log pi_ref(c)) - (log pi(r) - log pi_ref(r)),      loss = -log sigma(beta h)

Nothing is sampled: rows are pairs that the dataset holds, the better one first. Here they are right
and wrong sums, as of recipes/reward_model.py, and the sloppy teacher of recipes/arithmetic.py warms
the policy up. How often it is right is in no metric of a step: it is evaluated beside training.

    python recipes/dpo.py --name dpo --evaluation.every 25

Any model and pairs: rows such as {"prompt": "1+1=", "completions": ["2", "3"]}, or with the columns
chosen and rejected (docs/formats.md). No teacher then.

    python recipes/dpo.py --model.path MODEL --data.source pairs.jsonl \\
        --sampling.max-tokens 512 --trainer.learning-rate 1e-6
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import rlsys
from recipes.arithmetic import MODEL, ArithmeticConfig, held_out, small_trainer, warm_start
from recipes.reward_model import pairs
from rlsys import (
    PREFERENCE,
    Dataflow,
    Prompts,
    RoleConfig,
    RunConfig,
    TrainerConfig,
    require,
)
from rlsys.algorithms import preferences, sequence_mean


@dataclass(frozen=True, kw_only=True)
class DPOConfig(RunConfig):
    """DPO's own settings."""

    group_size: int = 2
    """Completions of a prompt: a pair."""
    beta: float = 0.1
    """How dear it is to leave the reference: the inverse of the scale of the implied reward."""
    label_smoothing: float = 0.0
    """Part of the preferences that is wrong."""
    reference: RoleConfig = field(default_factory=RoleConfig)
    """The reference: by default the policy as it was at the beginning."""
    own_reference: bool = False
    """The reference is the policy without its adapters (model.lora), which takes no memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.beta > 0, f"beta={self.beta} teaches no preference; use more than 0.")
        require(
            0 <= self.label_smoothing < 0.5,
            f"label_smoothing={self.label_smoothing} takes labels for noise; use 0 to 0.5.",
        )
        path = self.reference.model.path
        require(
            not (self.own_reference and path),
            f"reference.model.path={path!r} would not be read: own_reference=True; use one.",
        )


def dpo(cfg: DPOConfig, *, rows: Sequence[dict[str, Any]] | None = None) -> Dataflow:
    """The algorithm. `rows` replaces the dataset of cfg.data where a recipe makes its own."""
    flow = Dataflow()
    policy = flow.model("policy")
    pairs = flow.dataset(Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    reference = policy if cfg.own_reference else flow.model("reference", cfg.reference)
    reference_logprobs = flow.infer(
        reference, pairs, writes="reference_logprobs", adapters=not cfg.own_reference
    )
    flow.train(
        policy,
        pairs,
        PREFERENCE,
        reference_logprobs,
        loss=preferences.dpo(cfg.beta, cfg.label_smoothing),
        aggregation=sequence_mean,
    )
    return flow


@dataclass(frozen=True, kw_only=True)
class Config(ArithmeticConfig, DPOConfig):
    """Of the arithmetic task. Two processes share two cores."""

    name: str = "dpo"
    """Name of the run's directory below runs_dir; two runs never share one."""
    prompts_per_step: int = 128
    """Pairs in one optimizer step."""
    trainer: TrainerConfig = field(default_factory=lambda: small_trainer(learning_rate=1e-4))
    reference: RoleConfig = field(default_factory=lambda: RoleConfig(num_cpus=0.9))


@rlsys.main
def main() -> None:
    parsed = rlsys.parse(Config)
    cfg = parsed.config
    if cfg.data.source:
        rlsys.launch(cfg, dpo(cfg), own_model=MODEL, dry_run=parsed.dry_run)
        return
    rlsys.launch(
        cfg,
        dpo(cfg, rows=pairs(cfg)),
        own_model=MODEL,
        warm_start=warm_start(cfg),
        held_out=held_out(),
        dry_run=parsed.dry_run,
    )


if __name__ == "__main__":
    main()
