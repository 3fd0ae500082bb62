"""Events of a run in the order of time: deaths, restarts, resumes, changes of the configuration.

Input: what the readers of this package found. Output: rows with the time, the text and the seconds
that the event cost, where these can be derived:

- a restart of the trainer: the time for which training waited for it;
- a dead replica: the time until the next replica joined;
- a resume: the time between the last step before it and the first step after it, without that step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys import metrics
from rlsys.common.number_text import counted
from rlsys.report.timeline import Mark, TraceReader

DIED, JOINED, RESTARTED = "replica died", "replica joined", "trainer restarted"


def event_rows(
    trace: TraceReader,
    lines: Sequence[Mapping[str, float]],
    *,
    resumes: Sequence[int],
    changes: Sequence[Sequence[Mapping[str, str]]],
) -> list[dict[str, Any]]:
    """Return the events.

    Args:
        trace: The trace.
        lines: Metrics of the steps.
        resumes: Steps from which training continued, as in the ledger.
        changes: Differences of the configuration at each resume.
    """
    events = [*_marks(trace), *_pauses(trace, lines, resumes, changes), *_evaluations(trace)]
    return sorted(events, key=lambda event: (event["unix_s"] is None, event["unix_s"] or 0.0))


def _marks(trace: TraceReader) -> list[dict[str, Any]]:
    restarts = trace.waits_for(metrics.RESTART)
    events = []
    joined_s: float | None = None  # time of the next replica
    for mark in reversed(trace.marks):
        cost: float | None = None
        if mark.name == JOINED:
            joined_s = mark.time_s
        elif mark.name == DIED and joined_s is not None:
            cost = joined_s - mark.time_s
        elif mark.name == RESTARTED:
            cost = _restart_s(restarts, mark.time_s)
        is_fault = mark.name in (DIED, RESTARTED)
        events.append(_event(trace, mark.time_s, mark.name, _details(mark), cost, is_fault))
    return events[::-1]


def _restart_s(restarts: Sequence[tuple[float, float]], time_s: float) -> float | None:
    """Return the duration of the restart that was under way, or had just ended, at a time."""
    number = bisect_right(restarts, time_s, key=lambda one: one[0])
    if not number:
        return None
    start, duration = restarts[number - 1]
    return duration if time_s <= start + duration + 1 else None


def _details(mark: Mark) -> str:
    return ", ".join(f"{name} {value}" for name, value in mark.details.items())


def _pauses(
    trace: TraceReader,
    lines: Sequence[Mapping[str, float]],
    resumes: Sequence[int],
    changes: Sequence[Sequence[Mapping[str, str]]],
) -> list[dict[str, Any]]:
    """Return the resumes of the run by another process.

    The ledger has their steps, and the metrics the time between steps.
    """
    at = {int(line[metrics.STEP]): line for line in lines}
    events = []
    for number, step in enumerate(_of_processes(trace, resumes)):
        before, after = at.get(step), at.get(step + 1)
        cost: float | None = None
        unix_s: float | None = None
        if after is not None and metrics.TIME_UNIX_S in after:
            unix_s = after[metrics.TIME_UNIX_S] - after.get(metrics.TIME_STEP_S, 0.0)
            if before is not None and metrics.TIME_UNIX_S in before:
                cost = max(0.0, unix_s - before[metrics.TIME_UNIX_S])
        changed = changes[number] if number < len(changes) else ()
        fields = ", ".join(f"{c['field']} {c['before']} → {c['now']}" for c in changed)
        detail = f"continued after step {step}" + (f"; {fields}" if fields else "")
        name = "layout change" if any("layout" in c["field"] for c in changed) else "resumed"
        events.append(
            {"unix_s": unix_s, "name": name, "detail": detail, "cost_s": cost, "fault": True}
        )
    return events


def _of_processes(trace: TraceReader, resumes: Sequence[int]) -> list[int]:
    """Return the resumes without those of a trainer that restarted within the process."""
    within = Counter(
        mark.details.get("step")
        for mark in trace.marks
        if mark.name == RESTARTED and mark.details.get("lost_steps")
    )
    left = []
    for step in resumes:
        if within[step] > 0:
            within[step] -= 1
        else:
            left.append(step)
    return left


def _evaluations(trace: TraceReader) -> list[dict[str, Any]]:
    """Return one row each for the checkpoints and evaluations that training waited for."""
    events = []
    for reason in (metrics.CHECKPOINT, metrics.EVALUATION):
        waits = trace.waits_for(reason)
        if waits:
            total = sum(length for _, length in waits)
            text = f"training waited {counted(len(waits), 'time')}"
            if len(waits) > 1:
                text += "; the last one is listed"
            events.append(_event(trace, waits[-1][0], f"{reason}s", text, total, False))
    return events


def _event(
    trace: TraceReader, time_s: float, name: str, detail: str, cost: float | None, fault: bool
) -> dict[str, Any]:
    unix_s = None if trace.origin_s is None else trace.origin_s + time_s
    return {"unix_s": unix_s, "name": name, "detail": detail, "cost_s": cost, "fault": fault}
