"""Summary of a run, computed from its metrics.

Input: the lines of metrics.jsonl, those before a resume included. Output: a Summary of numbers, and
the text of the console's closing summary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlsys import metrics
from rlsys.metrics import recent_mean

# Steps that the means before and after cover. At most half of the run.
WINDOW = 10


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Means of a metric over the first and over the last `window` steps of a run."""

    before: float
    after: float
    window: int

    def __str__(self) -> str:
        steps = "step" if self.window == 1 else f"{self.window} steps"
        return (
            f"{self.before:z.3f} → {self.after:z.3f}  (mean of the first and of the last {steps})"
        )


def ends(lines: Sequence[Mapping[str, float]], name: str) -> Ends | None:
    """Return the means of a metric at both ends of a run, for the summary and for plots.

    Without a value at one of the ends, the result is None.
    """
    window = min(WINDOW, max(1, len(lines) // 2))
    before, after = recent_mean(lines[:window], name), recent_mean(lines[-window:], name)
    if before is None or after is None:
        return None
    return Ends(before=before, after=after, window=window)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Numbers of a run."""

    num_steps: int
    leading: str  # key in metrics.LEADING of the metric in `ends`
    ends: Ends | None
    total_s: float  # sum over steps
    train_s: float
    idle_s: float
    weight_sync_s: float
    pause_s: float  # of generation, not part of the four above
    staleness_mean: float | None
    staleness_max: float | None
    trained: int  # rollouts
    dropped: int
    dropped_by_reason: Mapping[str, float]
    tokens_per_s: float | None


def summarize(
    lines: Sequence[Mapping[str, float]], dropped: Mapping[str, float] | None = None
) -> Summary:
    """Return the summary of a run.

    Args:
        lines: Metrics of all steps.
        dropped: Dropped rollouts by reason. By default, those in the last line.
    """
    last = lines[-1] if lines else {}
    leading = metrics.leading(lines)
    if dropped is None:
        dropped = metrics.by_reason(last, metrics.ROLLOUTS_DROPPED)
        num_dropped = last.get(metrics.ROLLOUTS_DROPPED, 0)
    else:
        num_dropped = sum(dropped.values())
    staleness = [line[metrics.STALENESS_MAX] for line in lines if metrics.STALENESS_MAX in line]

    def total(name: str) -> float:
        return sum(line.get(name, 0.0) for line in lines)

    return Summary(
        num_steps=len(lines),
        leading=leading,
        ends=ends(lines, metrics.LEADING[leading]),
        total_s=total(metrics.TIME_STEP_S),
        train_s=total(metrics.TIME_TRAIN_S),
        idle_s=total(metrics.TIME_TRAINER_IDLE_S),
        weight_sync_s=total(metrics.TIME_WEIGHT_SYNC_S),
        pause_s=total(metrics.TIME_GENERATION_PAUSE_S),
        staleness_mean=recent_mean(lines, metrics.STALENESS_MEAN),
        staleness_max=max(staleness, default=None),
        trained=int(last.get(metrics.ROLLOUTS_TRAINED, 0)),
        dropped=int(num_dropped),
        dropped_by_reason=dropped,
        tokens_per_s=recent_mean(lines, metrics.THROUGHPUT_TRAINED_TOKENS),
    )


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return pairs of a label and a text. What was not measured is left out."""
    rows = []
    if summary.ends is not None:
        rows.append((summary.leading, str(summary.ends)))
    if summary.total_s > 0:
        rows.append(("time", _time_shares(summary)))
    if summary.staleness_mean is not None and summary.staleness_max is not None:
        rows.append(
            (
                "staleness",
                f"mean {summary.staleness_mean:.2f}, max {summary.staleness_max:.0f} "
                "weight updates",
            )
        )
    rows.append(("rollouts", _rollouts(summary)))
    return rows


def evaluation_rows(evaluations: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Return such pairs for the first, the last and the best evaluation on held-out prompts."""
    if not evaluations:
        return []
    best = [line for line in evaluations if line[metrics.EVAL_IS_BEST]]
    shown = {"first": evaluations[0], "last": evaluations[-1], "best (best/)": (best or [{}])[-1]}
    return [
        (
            "held-out" if which == "first" else "",
            f"{which}, step {line[metrics.STEP]}: {described}",
        )
        for which, line in shown.items()
        if line and (described := describe_evaluation(line))
    ]


def describe_evaluation(evaluation: Mapping[str, float]) -> str:
    """Return an evaluation's mean reward, its pass@k for the highest k, and its loss.

    The first two have their confidence intervals. evaluations.jsonl has all estimates.
    """
    means = [name for name in evaluation if metrics.is_mean_at(name)]
    passes = {k: name for name in evaluation if (k := metrics.num_passing(name))}
    most = [passes[k] for k in [max(passes, default=0)] if k > 1]
    parts = [
        f"{name.partition('/')[2]} {evaluation[name]:z.3f} ({evaluation[f'{name}/low']:z.3f} to "
        f"{evaluation[f'{name}/high']:z.3f})"
        for name in [*means, *most]
        if f"{name}/low" in evaluation
    ]
    if metrics.EVAL_LOSS in evaluation:
        parts.append(f"loss {evaluation[metrics.EVAL_LOSS]:.4f}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return a time as text: 0.42 s, 12.3 s, 3 min 12 s, 2 h 05 min."""
    if seconds < 9.995:  # rounds to less than 10.00
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def whole_percents(parts: Sequence[float]) -> list[int]:
    """Return shares of the whole in percent that add up to 100 (largest remainder method)."""
    exact = [100 * part / sum(parts) for part in parts]
    rounded = [int(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: rounded[i] - exact[i])
    for i in by_remainder[: 100 - sum(rounded)]:
        rounded[i] += 1
    return rounded


def _time_shares(summary: Summary) -> str:
    parts = {
        "training": summary.train_s,
        "waiting for rollouts": summary.idle_s,
        "weight sync": summary.weight_sync_s,
    }
    parts["other"] = max(0.0, summary.total_s - sum(parts.values()))
    percents = whole_percents(list(parts.values()))
    shares = ", ".join(f"{name} {n}%" for name, n in zip(parts, percents, strict=True))
    return (
        f"{duration(summary.total_s)}: {shares}; generation was paused "
        f"{summary.pause_s / summary.total_s:.1%}"
    )


def _rollouts(summary: Summary) -> str:
    text = f"{summary.trained:,} trained"
    if summary.tokens_per_s is not None:
        text += f", {summary.tokens_per_s:,.0f} tokens/s"
    if summary.dropped:
        reasons = ", ".join(f"{r} {count:,.0f}" for r, count in summary.dropped_by_reason.items())
        text += f"; {summary.dropped:,} dropped" + (f" ({reasons})" if reasons else "")
    return text
