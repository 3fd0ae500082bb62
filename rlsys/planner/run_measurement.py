"""Times of a run's steps, from its metrics.

    lines of metrics.jsonl ─► step_medians ─► StepMedians (training, generation, rewards, sync)

Medians are robust against steps with an evaluation or a checkpoint. The first steps are left out:
nothing was sampled before them, and caches and compilers are cold.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Final

from rlsys import metrics
from rlsys.errors import InvalidValue

WARM_UP: Final = 2  # first steps that are left out
MIN_STEPS: Final = 5  # steps after them
MAX_TIME_S: Final = 1e12  # of any time in the metrics: time/unix_s is about 1.8e9
MAX_OVERLAP: Final = 1.5  # training beyond the step's time: publishing may reach into the next step

_ACTOR: Final = re.compile(r"time/(work|wait|cpu)_s/([a-z]+-\d+)")

Line = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StepMedians:
    """Median seconds of a run's steps.

    Attributes:
        num_steps: Steps behind the medians.
        step_s: Time of a step.
        train_s: Work of rank 0.
        generation_s: Time in which a replica has work, mean over replicas. 0 without a report.
        sync_s: Pause of a replica while it loads weights.
        reward_s: Work of all reward processes.
        controller_s: CPU time of the controller's process. 0 without a report.
        other_s: CPU time of all actors beyond their work, such as Ray's threads.
        completion_tokens: Mean length of a completion.
        spread: Standard deviation of the logarithm of `step_s` between steps.
    """

    num_steps: int
    step_s: float
    train_s: float
    generation_s: float
    sync_s: float
    reward_s: float
    controller_s: float
    other_s: float
    completion_tokens: float
    spread: float


def step_medians(
    run: str, lines: Sequence[Line], *, num_last: int = 0, period: int = 1
) -> StepMedians:
    """Return the medians of a run's steps.

    Args:
        run: Name of the run for messages.
        lines: Lines of metrics.jsonl.
        num_last: Steps at the end during which no rollouts were sampled. They do not count if
            enough others are left.
        period: Steps that generation may complete at once. The time of a step is the median of
            means over so many steps in a row, or over all if there are fewer.

    Raises:
        InvalidValue: There are too few steps, or a number is missing, negative or not finite, or
            contradicts another one.
    """
    used = lines[WARM_UP:]
    used = used[: max(MIN_STEPS, len(used) - num_last)]
    if len(used) < MIN_STEPS:
        raise InvalidValue(
            run,
            len(lines),
            rule=f"has too few steps: {MIN_STEPS} after the first {WARM_UP} are needed",
            fix=f"Train at least {WARM_UP + MIN_STEPS} steps.",
        )
    for line in used:
        _check(run, line)
    _check_overlap(run, used)
    times = [line[metrics.TIME_STEP_S] for line in used]
    period = min(period, len(times))
    step_s = median(
        fmean(times[first : first + period]) for first in range(len(times) - period + 1)
    )
    logs = [math.log(seconds) for seconds in times]
    actors = _actors(used)
    return StepMedians(
        num_steps=len(used),
        step_s=step_s,
        train_s=median(line[metrics.TIME_TRAIN_S] for line in used),
        generation_s=step_s * _busy(actors, "rollout") / max(1, _number_of(actors, "rollout")),
        sync_s=median(line.get(metrics.TIME_GENERATION_PAUSE_S, 0.0) for line in used),
        reward_s=step_s * _busy(actors, "reward"),
        controller_s=median(line.get(metrics.TIME_CONTROLLER_S, 0.0) for line in used),
        other_s=step_s * sum(one.other for one in actors.values()),
        completion_tokens=fmean(line[metrics.COMPLETION_TOKENS_MEAN] for line in used),
        spread=pstdev(logs) / math.sqrt(len(logs)),
    )


@dataclass(frozen=True)
class _Actor:
    """Shares of an actor's time.

    An actor's report covers its own interval, so work and CPU time are compared with the interval.
    """

    work: float  # in which it works
    other: float  # CPU time beyond its work


def _actors(lines: Sequence[Line]) -> Mapping[str, _Actor]:
    """Return the actors that have reported, by name."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in lines:
        for name, seconds in line.items():
            if match := _ACTOR.fullmatch(name):
                sums[match[2]][match[1]] += seconds
    found = {}
    for name, one in sums.items():
        if interval_s := one["work"] + one["wait"]:
            other_s = max(0.0, one["cpu"] - one["work"])
            found[name] = _Actor(one["work"] / interval_s, other_s / interval_s)
    return found


def _busy(actors: Mapping[str, _Actor], kind: str) -> float:
    """Return the mean number of actors of a kind that work at a time."""
    return sum(one.work for name, one in actors.items() if _kind(name) == kind)


def _number_of(actors: Mapping[str, _Actor], kind: str) -> int:
    """Return the number of actors of a kind."""
    return sum(_kind(name) == kind for name in actors)


def _kind(actor: str) -> str:
    return actor.rpartition("-")[0]


def _check(run: str, line: Line) -> None:
    """Raise an InvalidValue that names run, step and number unless a line is consistent."""
    step = f"{run}, step {line.get(metrics.STEP)}"
    for name in (metrics.TIME_STEP_S, metrics.TIME_TRAIN_S, metrics.COMPLETION_TOKENS_MEAN):
        if name not in line:
            raise InvalidValue(
                f"{step}, {name}",
                rule="is missing",
                fix="Use a run that generates rollouts and trains on them.",
            )
    for name, value in line.items():
        if name.startswith("time/") and not 0 <= value <= MAX_TIME_S:
            raise InvalidValue(
                f"{step}, {name}",
                value,
                rule=f"must be from 0 to {MAX_TIME_S:.0e}",
                fix="The file was edited or damaged. Use another run.",
            )
    step_s, train_s = line[metrics.TIME_STEP_S], line[metrics.TIME_TRAIN_S]
    tokens = line[metrics.COMPLETION_TOKENS_MEAN]
    if not (step_s > 0 and train_s > 0 and math.isfinite(tokens) and tokens > 0):
        raise InvalidValue(
            f"{step}, {metrics.TIME_STEP_S}",
            step_s,
            rule=f"needs positive times and lengths, but training took {train_s} s and completions "
            f"have {tokens} tokens",
            fix="The file was edited or damaged. Use another run.",
        )


def _check_overlap(run: str, lines: Sequence[Line]) -> None:
    """Raise an InvalidValue unless training fits into the steps.

    Single steps may overlap: the end of a step is recorded when the controller gets to know it.
    """
    step_s = sum(line[metrics.TIME_STEP_S] for line in lines)
    train_s = sum(line[metrics.TIME_TRAIN_S] for line in lines)
    if train_s > MAX_OVERLAP * step_s:
        raise InvalidValue(
            f"{run}, {metrics.TIME_TRAIN_S}",
            train_s,
            rule=f"contradicts {metrics.TIME_STEP_S}={step_s}, both in all steps: training took "
            "longer than the steps",
            fix="The file was edited, or the clock was changed. Use another run.",
        )
