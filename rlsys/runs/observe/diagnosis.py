"""Problems of a run, found in its metrics and evaluations.

Each rule is one function. The console shows its findings while a run trains, and the report page
(rlsys.report) as advisories. docs/report.md describes each kind.

Input: the metrics of a run's steps. Output: findings, each with the number, the cause and the fix.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlsys import metrics
from rlsys.common.number_text import counted, verb
from rlsys.metrics import recent_mean
from rlsys.runs.observe.advised_settings import AdvisedSettings, sentence
from rlsys.runs.observe.finding import Finding, Line, Lines
from rlsys.runs.observe.speed_findings import speed_findings

WINDOW = 5  # steps to average over: one step of 32 groups is too noisy
HISTORY = 50  # steps that the rules need at most, besides the first WINDOW ones

ZERO_ADVANTAGE_FRAC = 0.8  # four of five groups are generated for nothing
TRUNCATED_FRAC = 0.3  # a truncated answer is scored as if it were complete
KL_SAMPLER_TRAINER = 0.05  # nats per token; bfloat16 kernels alone differ by about 0.001
COLLAPSED_FRAC = 0.1  # of the entropy of the first steps
AGREEING_FRAC = 0.5  # share of groups without a signal from which on a low entropy is a collapse
UNSOLVED_STD = 0.1  # of the rewards over prompts; a solved task has less
REACHED = 0.25  # gap between the best and the mean reward, in standard deviations at the start
GROWN_NORM = 10.0  # times the median of earlier steps
MIN_EARLIER = 10  # steps for that median
STALL_FACTOR = 10.0  # times the median step
MIN_STALL_S = 60.0


@dataclass(frozen=True, kw_only=True)
class EvaluationPoint:
    """An evaluation, and the mean training reward of the WINDOW steps before it."""

    line: Line
    reward: float | None


def diagnose(
    lines: Lines,
    *,
    settings: AdvisedSettings,
    samples: bool = True,
    first: Lines = (),
    evaluations: Sequence[EvaluationPoint] = (),
) -> list[Finding]:
    """Return the problems in the last WINDOW steps of `lines`.

    Failed rewards are reported at once, everything else after WINDOW steps. The timings of a run's
    first step are ignored, because the pipeline is still empty then.

    Args:
        lines: Metrics of the last steps. Rules that compare with earlier steps read up to HISTORY.
        settings: Settings of the run. A fix only names those that can be changed in its way.
        samples: Whether rows are sampled, not read from a dataset.
        first: Metrics of the first steps of the run, if `lines` does not begin with them.
        evaluations: Evaluations on held-out prompts so far.
    """
    first = first or lines[:WINDOW]
    earlier, recent = lines[-HISTORY:-WINDOW], lines[-WINDOW:]
    findings = list(_failed_rewards(recent))
    if len(recent) < WINDOW:
        return findings
    findings += _learning_signal(recent, settings)
    if not _improves(evaluations):
        findings += _entropy_collapse(first, lines[-HISTORY:])
    findings += _diverging(earlier, recent, settings)
    if settings.shares_devices:
        return findings
    kinds = frozenset(finding.kind for finding in findings)
    return findings + speed_findings(
        recent, settings=replace(settings, found=kinds), samples=samples
    )


def stalled(lines: Lines, *, started_s: float, now_s: float) -> list[Finding]:
    """Return whether a running run has made no step for far longer than its steps take.

    Args:
        lines: Metrics of the steps.
        started_s: Unix time at which the process of the run started.
        now_s: Unix time.
    """
    last_s = lines[-1].get(metrics.TIME_UNIX_S, started_s) if lines else started_s
    times = [line[metrics.TIME_STEP_S] for line in lines[-HISTORY:] if metrics.TIME_STEP_S in line]
    if len(times) < WINDOW:
        return []  # the first steps contain starts and compilations
    usual_s = statistics.median(times)
    waited_s = now_s - max(last_s, started_s)
    if waited_s < max(MIN_STALL_S, STALL_FACTOR * usual_s):
        return []
    return [
        Finding(
            "stall",
            f"no optimizer step for {waited_s:,.0f} s, and a step takes {usual_s:.3g} s",
            "Look at the last spans of the timeline for the actor that does not answer, and at the "
            "events for a restart. A hanging reward ends after reward.timeout_s, a hanging call "
            "after cluster.call_timeout_s.",
        )
    ]


def overfits(points: Sequence[EvaluationPoint]) -> list[Finding]:
    """Return whether the held-out score has fallen while the training reward rose.

    The last evaluation is compared with the best one. Their 95 % intervals must not overlap.
    """
    scored = [(score, point) for point in points if (score := _score(point.line)) is not None]
    if len(scored) < 2:
        return []
    (name, value, _, high), last = scored[-1]
    (_, best_value, best_low, _), best = max(scored, key=lambda one: one[0][1])
    if high >= best_low or last.reward is None or best.reward is None:
        return []
    if last.reward <= best.reward:
        return []
    return [
        Finding(
            "overfitting",
            f"the held-out score {name} fell from {best_value:.3g} (step "
            f"{best.line[metrics.STEP]:.0f}) to {value:.3g}, while the training reward rose from "
            f"{best.reward:.3g} to {last.reward:.3g}",
            "The policy exploits the reward or memorizes the prompts. Read completions of both "
            "steps, use the model in best/, add prompts, or make the reward stricter.",
        )
    ]


def _improves(points: Sequence[EvaluationPoint]) -> bool:
    """Return whether the held-out score has risen, beyond both 95 % intervals, to its best."""
    scores = [score for point in points if (score := _score(point.line)) is not None]
    if len(scores) < 2:
        return False
    (_, _, _, first_high), (_, last, last_low, _) = scores[0], scores[-1]
    return last_low > first_high and last >= max(value for _, value, _, _ in scores)


def _score(line: Line) -> tuple[str, float, float, float] | None:
    """Return the name, the mean reward of an evaluation, and the ends of its interval."""
    for name, value in line.items():
        if metrics.is_mean_at(name):
            return name, value, line.get(f"{name}/low", value), line.get(f"{name}/high", value)
    return None


def _failed_rewards(lines: Lines) -> Iterator[Finding]:
    failed = sum(line.get(metrics.REWARDS_FAILED, 0) for line in lines)
    if failed == 0:
        return
    reasons: Counter[str] = Counter()
    for line in lines:
        reasons.update(metrics.by_reason(line, metrics.REWARDS_FAILED))
    causes = ", ".join(f"{reason} {count:.0f}" for reason, count in reasons.most_common())
    yield Finding(
        "failed_rewards",
        f"{counted(round(failed), 'rollout')} got no reward{f' ({causes})' if causes else ''} and "
        f"{verb(round(failed), 'was', 'were')} dropped, with the whole group, over the last "
        f"{_steps(lines)}",
        "Check the reward function (its limit is reward.timeout_s), the environment (which has its "
        "own limit) or the judge's prompt.",
    )


def _learning_signal(lines: Lines, settings: AdvisedSettings) -> Iterator[Finding]:
    equal = recent_mean(lines, metrics.ZERO_ADVANTAGE_FRAC)
    if equal is not None and equal >= ZERO_ADVANTAGE_FRAC:
        reward = recent_mean(lines, metrics.REWARD_MEAN)
        yield Finding(
            "equal_rewards",
            f"{equal:.0%} of groups have equal rewards, so the task is too easy or too hard"
            + (f" (reward/mean is {reward:.3g})" if reward is not None else ""),
            "Choose other prompts, raise group_size or sampling.temperature.",
        )
    truncated = recent_mean(lines, metrics.COMPLETION_TRUNCATED_FRAC)
    if truncated is not None and truncated >= TRUNCATED_FRAC:
        yield Finding(
            "truncated",
            f"{truncated:.0%} of completions are cut off at the limit",
            "Raise sampling.max_tokens, or check in rollouts.jsonl why answers do not end.",
        )
    kl = recent_mean(lines, metrics.KL_SAMPLER_TRAINER)
    if kl is not None and abs(kl) >= KL_SAMPLER_TRAINER:
        yield Finding(
            "kl_sampler_trainer",
            f"sampler and trainer differ by {abs(kl):.2g} nats a token, because "
            f"{_kl_reasons(settings)}",
            sentence(
                [
                    settings.precision_fix,
                    settings.staleness_fix,
                    "lower trainer.learning_rate",
                    "add a correction such as tis",
                ]
            ),
        )


def _kl_reasons(settings: AdvisedSettings) -> str:
    """Return why the log-probabilities of both sides may differ so much."""
    reasons = []
    if settings.quantization:
        reasons.append(f"the sampler is quantized ({settings.quantization})")
    elif settings.precision_fix:
        reasons.append(f"they round differently in {settings.dtype}")
    if settings.staleness_fix:
        reasons.append("the data is too stale for this learning rate")
    else:
        reasons.append("the updates within a step are too large for its data")
    return " or ".join(reasons)


def _entropy_collapse(first: Lines, lines: Lines) -> Iterator[Finding]:
    """Yield a finding if completions of a prompt have become equal before the task is solved.

    A policy that solves its task has a low entropy too.
    """
    recent = lines[-WINDOW:]
    before = recent_mean(first, metrics.ENTROPY)
    now = recent_mean(recent, metrics.ENTROPY)
    equal = recent_mean(recent, metrics.ZERO_ADVANTAGE_FRAC)
    if before is None or now is None or equal is None:
        return
    if now > COLLAPSED_FRAC * before or equal < AGREEING_FRAC:
        return
    if not (unsolved := _unsolved(first, lines)):
        return
    fell = _reward_falls(first, recent)
    changes = "entropy_bonus or clip_cov, a wider upper clip, or a lower trainer.learning_rate."
    yield Finding(
        "entropy_collapse",
        f"the entropy fell from {before:.3g} to {now:.3g} nats a token, and {equal:.0%} of groups "
        f"have equal rewards, although {unsolved}: the policy no longer explores",
        f"{'Go back to an earlier checkpoint, and use' if fell else 'Use'} {changes}",
    )


def _unsolved(first: Lines, lines: Lines) -> str:
    """Return why the task is not solved in the last steps, or "".

    The rollouts of early steps differ, so that the best of each group show which reward can be
    reached. Without these numbers, rewards that differ over prompts count as unsolved.
    """
    recent = lines[-WINDOW:]
    reward = recent_mean(recent, metrics.REWARD_MEAN)
    start_std = recent_mean(first, metrics.REWARD_STD)
    best = _highest_mean([*first, *lines], metrics.REWARD_BEST_OF_GROUP)
    if best is not None and reward is not None and start_std is not None:
        if best - reward <= REACHED * start_std:
            return ""
        return f"the mean reward is {reward:.3g}, and the best rollouts of groups had {best:.3g}"
    if _reward_falls(first, recent):
        return f"the reward fell to {reward:.3g}"
    spread = recent_mean(recent, metrics.REWARD_STD)
    if spread is None or spread < UNSOLVED_STD:
        return ""
    return f"prompts still differ (reward/std is {spread:.2g})"


def _highest_mean(lines: Lines, name: str) -> float | None:
    """Return the highest mean of a metric over WINDOW steps."""
    windows = (lines[at : at + WINDOW] for at in range(max(1, len(lines) - WINDOW + 1)))
    means = (recent_mean(window, name) for window in windows)
    return max((mean for mean in means if mean is not None), default=None)


def _reward_falls(first: Lines, lines: Lines) -> bool:
    before, now = (recent_mean(of, metrics.REWARD_MEAN) for of in (first, lines))
    return before is not None and now is not None and now < before


def _diverging(earlier: Lines, lines: Lines, settings: AdvisedSettings) -> Iterator[Finding]:
    """Yield a finding if the gradient norm has grown. One spike among the steps does not count."""
    past = [line[metrics.GRAD_NORM] for line in earlier if metrics.GRAD_NORM in line]
    recent = [line[metrics.GRAD_NORM] for line in lines if metrics.GRAD_NORM in line]
    if len(past) < MIN_EARLIER or not recent:
        return
    before, now = statistics.median(past), statistics.median(recent)
    if before <= 0 or now < GROWN_NORM * before:
        return
    yield Finding(
        "diverging",
        f"the gradient norm is {now:.3g}, and was {before:.3g} over the {len(past)} steps before",
        sentence(
            [
                "lower trainer.learning_rate",
                "clip with trainer.max_grad_norm",
                settings.staleness_fix,
            ]
        )
        + " Continue from a checkpoint before the growth.",
    )


def _steps(lines: Lines) -> str:
    return "step" if len(lines) == 1 else f"{len(lines)} steps"
