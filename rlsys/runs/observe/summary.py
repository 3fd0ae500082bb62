"""What a run came to: pure functions of its metrics.

In: the lines of metrics.jsonl, a resumed run's earlier parts included. Out: a Summary of numbers,
and the text that the console closes with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlsys import metrics
from rlsys.metrics import recent_mean

WINDOW = 10
"""Steps over which the reward, or what else is told, is averaged before and after; half of the run
if that is shorter."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Means of a metric over the first and over the last `window` steps of a run."""

    before: float
    after: float
    window: int

    def __str__(self) -> str:
        steps = "step" if self.window == 1 else f"{self.window} steps"
        return f"{self.before:.3f} → {self.after:.3f}  (mean of the first and of the last {steps})"


def ends(lines: Sequence[Mapping[str, float]], name: str) -> Ends | None:
    """Return how far a metric has come: what the summary and the plot of a run both state. None
    where no line at one of the ends has it.
    """
    window = min(WINDOW, max(1, len(lines) // 2))
    before, after = recent_mean(lines[:window], name), recent_mean(lines[-window:], name)
    if before is None or after is None:
        return None
    return Ends(before=before, after=after, window=window)


@dataclass(frozen=True, kw_only=True)
class Summary:
    num_steps: int
    leading: str  # which of metrics.LEADING these are of
    ends: Ends | None
    total_s: float  # sum over steps
    train_s: float
    idle_s: float
    weight_sync_s: float
    pause_s: float  # of generation, beside the four above
    staleness_mean: float | None
    staleness_max: float | None
    trained: int  # rollouts
    dropped: int
    dropped_by_reason: Mapping[str, float]
    tokens_per_s: float | None


def summarize(
    lines: Sequence[Mapping[str, float]], dropped: Mapping[str, float] | None = None
) -> Summary:
    """`dropped`: rollouts by reason; None: what the last line says."""
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
    """Pairs of a label and a sentence; what was not measured is left out."""
    rows = []
    if summary.ends is not None:
        rows.append((summary.leading, str(summary.ends)))
    if summary.total_s > 0:
        rows.append(("time", _where_the_time_went(summary)))
    if summary.staleness_mean is not None and summary.staleness_max is not None:
        rows.append(
            (
                "staleness",
                f"mean {summary.staleness_mean:.2f}, max {summary.staleness_max:.0f} "
                "updates of the weights",
            )
        )
    rows.append(("rollouts", _rollouts(summary)))
    return rows


def evaluation_rows(evaluations: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """The same of evaluations on held-out prompts: the first one, the last and the best."""
    if not evaluations:
        return []
    best = [line for line in evaluations if line[metrics.EVAL_IS_BEST]]
    shown = {"first": evaluations[0], "last": evaluations[-1], "best (best/)": (best or [{}])[-1]}
    return [
        ("held-out" if which == "first" else "", f"{which}, step {line[metrics.STEP]}: {told}")
        for which, line in shown.items()
        if line and (told := in_words(line))
    ]


def in_words(evaluation: Mapping[str, float]) -> str:
    """Return its mean reward and its pass@k of the most samples with their intervals, and its loss.
    evaluations.jsonl has every estimate.
    """
    means = [name for name in evaluation if metrics.is_mean_at(name)]
    passes = {k: name for name in evaluation if (k := metrics.num_passing(name))}
    most = [passes[k] for k in [max(passes, default=0)] if k > 1]
    told = [
        f"{name.partition('/')[2]} {evaluation[name]:.3f} ({evaluation[f'{name}/low']:.3f} to "
        f"{evaluation[f'{name}/high']:.3f})"
        for name in [*means, *most]
        if f"{name}/low" in evaluation
    ]
    if metrics.EVAL_LOSS in evaluation:
        told.append(f"loss {evaluation[metrics.EVAL_LOSS]:.4f}")
    return ", ".join(told)


def duration(seconds: float) -> str:
    """0.42 s, 12.3 s, 3 min 12 s, 2 h 05 min."""
    if seconds < 9.995:  # what rounds to less than 10.00
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def whole_percents(parts: Sequence[float]) -> list[int]:
    """Shares of the whole in percent, rounded so that they add up to 100 (largest remainder)."""
    exact = [100 * part / sum(parts) for part in parts]
    rounded = [int(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: rounded[i] - exact[i])
    for i in by_remainder[: 100 - sum(rounded)]:
        rounded[i] += 1
    return rounded


def _where_the_time_went(summary: Summary) -> str:
    parts = {
        "training": summary.train_s,
        "waiting for rollouts": summary.idle_s,
        "weight sync": summary.weight_sync_s,
    }
    parts["other"] = max(0.0, summary.total_s - sum(parts.values()))
    percents = whole_percents(list(parts.values()))
    shares = ", ".join(f"{name} {n}%" for name, n in zip(parts, percents, strict=True))
    return (
        f"{duration(summary.total_s)}: {shares}; generation paused "
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
