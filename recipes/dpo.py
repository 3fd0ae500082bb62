"""Direct preference optimisation (Rafailov et al., 2305.18290).

Of two completions of a prompt one is better: c over r. The policy itself is the reward model: its
log-probabilities, less those of the frozen reference that it began as, are to tell the pair apart
by Bradley and Terry's rule,

    h = (log π(c) − log π_ref(c)) − (log π(r) − log π_ref(r)),      loss = −log σ(βh)

Nothing is sampled: rows are pairs that the dataset holds, the better one first. Here they are right
and wrong sums, and the policy is warmed up by the sloppy teacher of recipes/quickstart.py.

    python recipes/dpo.py --name preferences
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import rlsys
from recipes.quickstart import CHARACTERS, QuickstartConfig, lessons
from recipes.reward_model import PairsConfig, pairs
from rlsys import OwnModel, TrainerConfig, WarmStart
from rlsys.config import RoleConfig
from rlsys.dataflow.graph import PREFERENCE, Dataflow, Prompts


@dataclass(frozen=True, kw_only=True)
class DPOConfig(PairsConfig):
    """DPO's own settings."""

    beta: float = 0.1
    """How dear it is to leave the reference: the inverse of the scale of the implied reward."""
    label_smoothing: float = 0.0
    """Part of the preferences that is wrong."""
    name: str = "dpo"
    """Name of the run's directory below runs_dir; two runs never share one."""
    warm_start_steps: int = 200
    """Supervised steps before DPO starts."""
    reference: RoleConfig = field(default_factory=lambda: RoleConfig(num_cpus=0.5))
    """The reference: by default the policy as it was at the beginning."""
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            learning_rate=3e-4, warmup_steps=10, schedule="linear", micro_batch_tokens=4096
        )
    )


def dpo(cfg: DPOConfig, *, rows: Sequence[dict[str, Any]] | None = None) -> Dataflow:
    """The algorithm. `rows` replaces the dataset of cfg.data where a recipe makes its own."""
    from rlsys.algorithms import preferences, sequence_mean

    flow = Dataflow()
    policy = flow.model("policy")
    reference = flow.model("reference", cfg.reference)
    pairs = flow.dataset(Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    reference_logprobs = flow.infer(reference, pairs, writes="reference_logprobs")
    flow.train(
        policy,
        pairs,
        PREFERENCE,
        reference_logprobs,
        loss=preferences.dpo(cfg.beta, cfg.label_smoothing),
        aggregation=sequence_mean,
    )
    return flow


@rlsys.main
def main() -> None:
    parsed = rlsys.parse(DPOConfig)
    cfg = parsed.config
    rlsys.launch(
        cfg,
        dpo(cfg, rows=pairs(cfg.seed + 2)),
        own_model=OwnModel(name="addition", characters=CHARACTERS),
        warm_start=WarmStart(
            num_steps=cfg.warm_start_steps,
            batches=lessons(QuickstartConfig(seed=cfg.seed)),
            learning_rate=1e-3,
        ),
        dry_run=parsed.dry_run,
    )


if __name__ == "__main__":
    main()
