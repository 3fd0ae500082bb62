r"""Direct preference optimisation (Rafailov et al., 2305.18290).

One of two completions of a prompt is better: c over r. The policy itself is the reward model: its
log-probabilities, minus those of a frozen reference, which is the initial policy, tell the pair
apart by the Bradley-Terry model,

    h = (log pi(c) - log pi_ref(c)) - (log pi(r) - log pi_ref(r)),      loss = -log sigma(beta h)

Nothing is sampled: rows are pairs of a dataset, the better completion first. Here they are right
and wrong sums, as in recipes/reward_model.py, after the warm start of recipes/arithmetic.py. The
accuracy of the policy's answers is evaluated during training.

    python recipes/dpo.py --name dpo --evaluation.every 25

For any model and pairs, use rows such as {"prompt": "1+1=", "completions": ["2", "3"]}, or the
columns chosen and rejected (docs/formats.md). There is no warm start then.

    python recipes/dpo.py --model.path MODEL --data.source pairs.jsonl \
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
)
from rlsys.algorithms import preferences, sequence_mean
from rlsys.errors import require


@dataclass(frozen=True, kw_only=True)
class DPOConfig(RunConfig):
    """Settings of DPO."""

    group_size: int = 2
    """Completions of a prompt: a pair."""
    beta: float = 0.1
    """Strength of the bound to the reference; 1 / beta scales the implied reward."""
    label_smoothing: float = 0.0
    """Fraction of the preferences that is assumed to be wrong."""
    reference: RoleConfig = field(default_factory=RoleConfig)
    """The reference; by default the initial policy."""
    own_reference: bool = False
    """Use the policy without its adapters (model.lora) as reference, which needs no memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        beta, smoothing, path = self.beta, self.label_smoothing, self.reference.model.path
        require(beta > 0, "beta", beta, rule="must be positive", fix="Use about 0.1.")
        require(
            0 <= smoothing < 0.5,
            "label_smoothing",
            smoothing,
            rule="must be at least 0 and below 0.5",
            fix="Use 0 for labels without noise.",
        )
        require(
            not (self.own_reference and path),
            "reference.model.path",
            path,
            rule="would not be used with own_reference=True",
            fix="Set only one of them.",
        )


def dpo(cfg: DPOConfig, *, rows: Sequence[dict[str, Any]] | None = None) -> Dataflow:
    """Return the graph of the algorithm. `rows` replaces the dataset of cfg.data."""
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
    """Settings for the arithmetic task, with two processes on two cores."""

    name: str = "dpo"
    """Name of the run's directory below runs_dir."""
    prompts_per_step: int = 128
    """Pairs in one optimizer step."""
    trainer: TrainerConfig = field(default_factory=lambda: small_trainer(learning_rate=1e-4))
    reference: RoleConfig = field(default_factory=lambda: RoleConfig(num_cpus=0.9))


@rlsys.main
def main() -> None:
    """Run the recipe."""
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
