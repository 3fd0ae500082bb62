"""The sections `reward` and `evaluation` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.config.checks import check_at_least, check_k, check_num_processes, check_time_limit
from rlsys.config.fields import Section, conform
from rlsys.errors import require

# Memory of Python, numpy and the stacks of a few threads.
MIN_REWARD_MEMORY_GIB = 0.5


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Section):
    """The workers that run reward functions."""

    num_workers: int = 1
    """Reward actors, each with one process that runs the functions."""
    concurrency: int = 16
    """Calls of reward functions that one worker runs at a time (in threads if not async)."""
    timeout_s: float = 30.0
    """Time limit of one reward function on one rollout, in seconds. Past it the rollout is dropped
    and counted."""
    memory_gib: float = 4.0
    """Memory of one worker's functions and their subprocesses, in GiB. Past it the largest call
    fails, or the process is ended."""

    def __post_init__(self) -> None:
        conform(self, "reward")
        check_num_processes("reward.num_workers", self.num_workers)
        check_num_processes("reward.concurrency", self.concurrency)
        check_time_limit("reward.timeout_s", self.timeout_s)
        check_at_least("reward.memory_gib", self.memory_gib, MIN_REWARD_MEMORY_GIB)


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig(Section):
    """Evaluation during training, on held-out prompts or tasks."""

    every: int = 0
    """Optimizer steps between evaluations. The initial and the final model are evaluated too. 0:
    no evaluation."""
    num_prompts: int | None = None
    """Number of held-out prompts or tasks, from the first one. Unset: all."""
    num_samples: int = 1
    """Completions, or episodes, of each prompt or task."""
    k: tuple[int, ...] = (1,)
    """Each k of pass@k, the probability that at least one of k completions is right."""
    greedy: bool = False
    """Take the most likely token instead of sampling; needs num_samples=1."""
    source: str = ""
    """Held-out dataset, in the format of data.source, with the columns and the rendering of data.
    Unset: data.source."""
    split: str = "test"
    """Split of a hub dataset or a directory. A part such as train[90%:] works for every source."""
    num_cpus: float = 0
    """CPU cores that Ray reserves for the evaluation worker. 0: none, it shares the cores."""
    num_gpus: float = 0
    """GPUs that Ray reserves for the evaluation worker; 0 evaluates on the CPU."""

    def __post_init__(self) -> None:
        conform(self, "evaluation")
        check_at_least("evaluation.every", self.every, 0, fix="Use 0 for no evaluation.")
        for name in ("num_cpus", "num_gpus"):
            check_at_least(f"evaluation.{name}", getattr(self, name), 0)
        check_samples(self.num_samples, self.k, self.greedy, self.num_prompts, "evaluation.")


def check_samples(
    num_samples: int, ks: tuple[int, ...], greedy: bool, num_prompts: int | None, prefix: str = ""
) -> None:
    """Raise an InvalidValue if pass@k or its interval cannot be estimated from the samples.

    `prefix` is put before the names of the fields.
    """
    check_at_least(f"{prefix}num_samples", num_samples, 1)
    require(
        bool(ks) and len(set(ks)) == len(ks),
        f"{prefix}k",
        ks,
        rule="must be at least one number, each given once",
        fix="Use a list such as 1,4.",
    )
    for k in ks:
        check_k(k, num_samples, prefix)
    require(
        not greedy or num_samples == 1,
        f"{prefix}num_samples",
        num_samples,
        rule="samples of greedy decoding are all the same",
        fix=f"Use 1, or turn {prefix}greedy off.",
    )
    if num_prompts is not None:
        check_at_least(
            f"{prefix}num_prompts", num_prompts, 2, fix="An interval needs 2 prompts or more."
        )
