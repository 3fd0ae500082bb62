"""Metric names, and metrics.jsonl: one line of them per optimizer step.

In: a mapping from names to numbers, after each step. Out: a file in which every step stands once,
over crashes and resumes too, and whose numbers are exact.

Every name is defined here and nowhere else. The part before the slash is its family. Unless said
otherwise, a metric describes the rollouts and the work of its own step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from rlsys.observe.step_log import StepLog, read_lines

STEP = "step"  # 1 for the first optimizer step
POLICY_VERSION = "policy_version"  # after the step
LEARNING_RATE = "learning_rate"

REWARD_MEAN = "reward/mean"
REWARD_STD = "reward/std"
REWARDS_FAILED = "rewards/failed"  # rollouts whose reward function raised, hung or gave no number

ZERO_ADVANTAGE_FRAC = "groups/zero_advantage_frac"  # groups whose rewards are all equal
COMPLETION_TOKENS_MEAN = "completion/tokens_mean"
COMPLETION_TRUNCATED_FRAC = "completion/truncated_frac"  # ended by the limit on tokens

STALENESS_MEAN = "staleness/mean"  # optimizer steps, over rollouts
STALENESS_MAX = "staleness/max"

LOSS = "loss"
GRAD_NORM = "grad_norm"  # before clipping
ENTROPY = "entropy"  # nats per token
KL_SAMPLER_TRAINER = "kl/sampler_trainer"  # mean(log μ − log π_prox), nats per token
KL_SAMPLER_TRAINER_K3 = "kl/sampler_trainer_k3"  # mean(exp(x) − 1 − x), x = log π_prox − log μ

ROLLOUTS_ISSUED = "rollouts/issued"  # these three count since the run began
ROLLOUTS_TRAINED = "rollouts/trained"
ROLLOUTS_DROPPED = "rollouts/dropped"

WEIGHTS_BYTES = "weights/bytes"  # published for the generation engines

TIME_STEP_S = "time/step_s"  # between the ends of two optimizer steps
TIME_TRAIN_S = "time/train_s"  # rank 0 at work, publishing the weights included
TIME_TRAINER_IDLE_S = "time/trainer_idle_s"  # the trainer waits for rollouts
TIME_WEIGHT_SYNC_S = "time/weight_sync_s"  # from publishing to the last replica's resume
TIME_GENERATION_PAUSE_S = "time/generation_pause_s"  # a replica stands still, mean over replicas
TIME_UNIX_S = "time/unix_s"  # when the line was written

THROUGHPUT_TRAINED_TOKENS = "throughput/trained_tokens_per_s"  # completion tokens
THROUGHPUT_GENERATED_TOKENS = "throughput/generated_tokens_per_s"
THROUGHPUT_TRAINED_ROLLOUTS = "throughput/trained_rollouts_per_s"

# What the clock decides: two runs that agree in everything else may differ here. How many rollouts
# wait before a stage at the end of a step is such an accident too.
TIMING_FAMILIES = ("time/", "throughput/", "queue/")


def reward_component(name: str) -> str:
    """Mean of one of several rewards, before its weight."""
    return f"reward/component/{name}"


def rewards_failed(reason: str) -> str:
    return f"{REWARDS_FAILED}/{reason}"


def rollouts_dropped(reason: str) -> str:
    """Counts since the run began, as rollouts/dropped does."""
    return f"{ROLLOUTS_DROPPED}/{reason}"


def queue_depth(stage: str) -> str:
    """Rollouts that wait before a stage at the end of the step."""
    return f"queue/{stage}"


def waited_s(stage: str, reason: str) -> str:
    """Time in which a loop of the controller had nothing to do, and why."""
    return f"time/wait_s/{stage}/{reason}"


def actor_work_s(actor: str) -> str:
    """Time in which an actor had something to do, up to its last report: that of the step before.
    What it did not work, it waited: `actor_wait_s`."""
    return f"time/work_s/{actor}"


def actor_wait_s(actor: str) -> str:
    return f"time/wait_s/{actor}"


def by_reason(line: Mapping[str, float], total: str) -> dict[str, float]:
    """The positive counts below `total` ("rollouts/dropped"), by reason, largest first."""
    prefix = total + "/"
    counts = {k.removeprefix(prefix): v for k, v in line.items() if k.startswith(prefix) and v > 0}
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def without_times(line: Mapping[str, float]) -> dict[str, float]:
    """The metrics that two runs share when they do the same, whatever the machine's speed."""
    return {name: value for name, value in line.items() if not name.startswith(TIMING_FAMILIES)}


def recent_mean(lines: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Mean over the lines that have the metric; None where none has."""
    values = [line[name] for line in lines if name in line]
    return sum(values) / len(values) if values else None


class MetricsWriter:
    """Writes metrics.jsonl. A resumed run passes its checkpoint's step as `after_step`: the lines
    that the crashed run wrote beyond it are removed, as those steps are trained again."""

    def __init__(self, path: Path, *, after_step: int = 0) -> None:
        self._log = StepLog(path, after_step=after_step)
        self._last_step = after_step

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one step's metrics; on disk, as far as a crash of this process goes, on return.

        Values are numbers of any kind (numpy scalars and tensors of one element too). Raises
        ValueError, and writes nothing, for a number that is not finite or a step out of order.
        """
        numbers = {name: _number(name, value, line) for name, value in line.items()}
        step = line.get(STEP)
        if not isinstance(step, Integral) or int(step) <= self._last_step:
            raise ValueError(
                f"step={step} after step={self._last_step}: every optimizer step stands once in "
                "metrics.jsonl, in order; give each line the number of its step."
            )
        self._log.append(numbers)
        self._last_step = int(step)

    def go_back(self, step: int) -> None:
        """Training went back to `step`: lines of later steps are removed, and written again."""
        self._log.go_back(step)
        self._last_step = min(self._last_step, step)

    def close(self) -> None:
        self._log.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, a step each. Raises ValueError for one that is damaged."""
    return list(read_lines(path))


def _number(name: str, value: Any, line: Mapping[str, Any]) -> float:
    number = int(value) if isinstance(value, Integral) else float(value)
    if not math.isfinite(number):
        raise ValueError(
            f"metric {name}={number} of step {line.get(STEP)} is not finite; leave a metric out "
            "where there is nothing to average, and look at the loss and the rewards otherwise."
        )
    return number
