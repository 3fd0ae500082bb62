"""Evaluation of a trial: the files of its run, and what it left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsys.metrics import (
    ROLLOUTS_ISSUED,
    STEP,
    TIME_UNIX_S,
    WEIGHTS_BYTES,
    without_times,
)
from rlsys.runs.audit import audit
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.observe.step_log import read_lines
from rlsys.runs.run_files import RunFiles
from rlsys.runs.run_history import read_evidence

# A step that was nearly done when its rank was killed may still be reported.
REPORT_DELAY_S = 1.0


# Metrics of the process, not of the run: rollouts issued before it was killed, and weights sent in
# the step, which a resumed run sends before its first step.
PROCESS_METRICS = {ROLLOUTS_ISSUED, WEIGHTS_BYTES}


BACK = ("replica", "rank", "node")


@dataclass(kw_only=True)
class Outcome:
    """Result of one trial."""

    number: int
    title: str  # the faults
    ended_well: bool = False
    audit_errors: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    back_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds until a killed part (BACK) was replaced and its successor worked."""
    resampled: int = 0
    resampled_older: int = 0
    notes: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Return whether the run ended well and left nothing behind."""
        return self.ended_well and not self.audit_errors and not self.leftovers

    def lines(self) -> Iterator[str]:
        """Yield one line about the trial and one more for each fault."""
        verdict = "well" if self.is_good else "BADLY"
        back = [f"{what} back in {s:.1f} s" for what in BACK for s in self.back_s.get(what, ())]
        if self.resampled:
            back.append(
                f"{self.resampled} groups sampled again, {self.resampled_older} of them needlessly"
            )
        parts = [self.title, f"ended {verdict} in {self.took_s:.0f} s", *back, *self.notes]
        yield f"run {self.number}: " + "; ".join(parts)
        if not self.ended_well:
            yield "    it did not end by itself with every step trained"
        yield from (f"    audit: {error}" for error in self.audit_errors)
        yield from (f"    left: {leftover}" for leftover in self.leftovers)


def audited(path: Path) -> tuple[bool, list[str]]:
    """Return whether the run is finished, and the audit's faults."""
    try:
        evidence, unreadable = read_evidence(path)
    except ValueError as error:
        return False, [str(error)]
    verdict = audit(evidence)
    return verdict.finished, [*unreadable, *verdict.faults]


def step_after(files: RunFiles, moment: float, until: float) -> float | None:
    """Return the seconds from `moment` (Unix) to the end of the next optimizer step.

    None if no step ended before `until`.
    """
    for line in read_metrics(files.metrics):
        if moment + REPORT_DELAY_S < line[TIME_UNIX_S] < until:
            return line[TIME_UNIX_S] - moment
    return None


def tokens_after(files: RunFiles, moment: float, until: float) -> float | None:
    """Return the seconds from `moment` (Unix) to the first report of a new replica's tokens.

    It is an upper bound for the time to the first token. None if there is no report before `until`.
    """
    events = _trace(files.trace)
    origin = next((e["args"]["unix_ns"] / 1e9 for e in events if e["name"] == "origin"), None)
    if origin is None:
        return None
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    first: dict[int, float] = {}  # time of each replica's first event
    asked: set[int] = set()  # replicas that got rollouts
    sampled: dict[int, float] = {}  # time of their first report afterwards
    for event in events:
        if event["ph"] == "M" or not names.get(event["pid"], "").startswith("rollout"):
            continue
        at = origin + event["ts"] / 1e6
        first[event["pid"]] = min(at, first.get(event["pid"], at))
        if event["name"] == "submit" and event["args"]["rollouts"] > 0:
            asked.add(event["pid"])
        if event["name"] == "running" and event["pid"] in asked:
            sampled.setdefault(event["pid"], at)
    backs = [at - moment for pid, at in sampled.items() if moment < first[pid] and at < until]
    return min(backs, default=None)


def _trace(path: Path) -> list[dict[str, Any]]:
    try:
        events = json.loads(path.read_bytes())
    except (OSError, ValueError):  # a killed run may leave a partial file
        return []
    return list(events)


def differences(files: RunFiles, reference: RunFiles) -> list[str]:
    """Return the differences between a run and an undisturbed one, without times."""
    found = []
    pairs = zip(read_metrics(files.metrics), read_metrics(reference.metrics), strict=False)
    for one, other in pairs:
        here, there = without_times(one), without_times(other)
        both = sorted((here.keys() | there.keys()) - PROCESS_METRICS)
        names = [name for name in both if here.get(name) != there.get(name)]
        if names:
            shown = ", ".join(f"{n} {here.get(n)} instead of {there.get(n)}" for n in names[:4])
            found.append(f"step {one[STEP]} differs from the undisturbed run: {shown}")
            break  # later steps differ as a consequence
    sampled, wanted = _sampled(files.rollouts), _sampled(reference.rollouts)
    if sampled != wanted:
        keys = sorted(k for k in sampled.keys() | wanted.keys() if sampled.get(k) != wanted.get(k))
        found.append(f"rollouts differ from the undisturbed run, first in step {keys[0][0]}")
    for weights in sorted(reference.hf.glob("*.safetensors")):
        if (files.hf / weights.name).read_bytes() != weights.read_bytes():
            found.append(f"hf/{weights.name} differs from the undisturbed run's")
    return found


def _sampled(path: Path) -> Mapping[tuple[int, int, int], Sequence[Any]]:
    """Return tokens, versions, reward and advantage of each rollout by step, group and index."""
    return {
        (line["step"], line["group_id"], line["index"]): (
            line["token_ids"],
            line["policy_versions"],
            line["reward"],
            line["advantage"],
        )
        for line in read_lines(path)
    }


def sampled_twice(files: RunFiles) -> tuple[int, int]:
    """Return the number of groups sampled again after a resume, and of the needless ones.

    Needless are groups issued before the resumed checkpoint, which should have kept their rollouts.
    """
    issued_after: dict[int, int] = {}  # trained steps when the group was (re)issued
    step = resumed = again = older = 0
    for event in read_lines_of(files.ledger):
        match event["event"]:
            case "trained":
                step = event["step"]
            case "resumed":
                step = resumed = event["step"]
            case "issued":
                issued_after[event["group"]] = step
            case "reissued":
                again += 1
                older += issued_after[event["group"]] < resumed
                issued_after[event["group"]] = step
    return again, older


def read_lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
