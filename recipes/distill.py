"""On-policy distillation (Lu, Thinking Machines, 2025; Agarwal et al., 2306.13649, at lambda = 1).

The student samples, and a larger, frozen teacher computes its distribution at each token, so that
the student gets a signal for every token of its own mistakes. The loss is the reverse
Kullback-Leibler divergence at each token,

    loss_t = sum_v pi(v) (log pi(v) - log pi_teacher(v))

over the teacher's top_k likeliest tokens v, with all others counted as one. With --top-k 0 only the
sampled token is compared, which is noisier: CISPO with the advantage
A_t = log pi_teacher(y_t) - log pi(y_t). Rewards are only logged.

    python recipes/distill.py --name distill

trains a teacher first (1.5 times as deep and as wide; GRPO, in runs/distill-teacher), unless
--teacher.model.path names one with the student's tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import rlsys
from recipes import arithmetic
from recipes.arithmetic import CHARACTERS
from recipes.grpo import grpo
from recipes.quickstart import QuickstartConfig
from rlsys import Dataflow, OwnModel, Prompts, RewardFn
from rlsys import algorithms as alg
from rlsys.config import RoleConfig, RolloutConfig, RunConfig, TrainerConfig
from rlsys.errors import require

TEACHER = OwnModel(name="addition-teacher", characters=CHARACTERS, width=192, num_layers=6)


@dataclass(frozen=True, kw_only=True)
class DistillConfig(RunConfig):
    """Settings of distillation."""

    top_k: int = 16
    """Likeliest tokens of the teacher that are compared; 0 for the sampled token only."""
    teacher: RoleConfig = field(default_factory=RoleConfig)
    """The teacher: a model with the student's tokenizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.top_k >= 0, "top_k", self.top_k, rule="must not be negative", fix="Use 0.")


def distill(
    cfg: DistillConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """Return the graph of the algorithm. `rows` replaces the dataset of cfg.data."""
    flow = Dataflow()
    policy = flow.model("policy")
    teacher = flow.model("teacher", cfg.teacher)
    rollouts = flow.generate(policy, Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    reward = flow.score(rollouts, rewards)
    loss: alg.LossFn = alg.top_k_distill() if cfg.top_k else alg.distill(alg.cispo(max_ratio=5.0))
    writes = "teacher_top_k" if cfg.top_k else "teacher_logprobs"
    compared = flow.infer(teacher, rollouts, writes=writes, top_k=cfg.top_k)
    flow.train(policy, rollouts, compared, loss=loss, aggregation=alg.token_mean, watch=[reward])
    return flow


@dataclass(frozen=True, kw_only=True)
class Config(arithmetic.ArithmeticConfig, DistillConfig):
    """Settings for the arithmetic task, with three processes on two cores."""

    name: str = "distill"
    """Name of the run's directory below runs_dir."""
    top_k: int = 8
    """Likeliest tokens of the teacher that are compared, of 15 in the vocabulary."""
    group_size: int = 1
    """Rollouts per prompt. They are not compared, so more prompts are better."""
    prompts_per_step: int = 512
    """Groups in one optimizer step."""
    num_steps: int = 100
    """Optimizer steps of the whole run."""
    teacher_steps: int = 150
    """Optimizer steps of the teacher's training, if teacher.model.path is empty."""
    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(max_running=512, num_cpus=0.6)
    )
    trainer: TrainerConfig = field(
        default_factory=lambda: arithmetic.small_trainer(num_cpus=0.8, learning_rate=2e-3)
    )
    teacher: RoleConfig = field(default_factory=lambda: RoleConfig(num_cpus=0.6))


def with_teacher(cfg: Config) -> Config:
    """Return the configuration with a teacher, trained once by GRPO on the same task."""
    teaching = QuickstartConfig(
        name=f"{cfg.name}-teacher",
        runs_dir=cfg.runs_dir,
        num_steps=cfg.teacher_steps,
        resume="auto",
        warm_start_steps=cfg.warm_start_steps,
        seed=cfg.seed,
    )
    train = partial(arithmetic.run, teaching, grpo, own_model=TEACHER)
    cfg, path = arithmetic.model_of_previous_run(cfg, teaching.name, train)
    return replace(cfg, teacher=replace(cfg.teacher, model=replace(cfg.teacher.model, path=path)))


@rlsys.main
def main() -> None:
    """Run the recipe."""
    parsed = rlsys.parse(Config)
    cfg = parsed.config
    arithmetic.graph(cfg, distill)  # finds mistakes before a teacher is trained
    ready = cfg if parsed.dry_run or cfg.teacher.model.path else with_teacher(cfg)
    arithmetic.run(ready, distill, dry_run=parsed.dry_run)


if __name__ == "__main__":
    main()
