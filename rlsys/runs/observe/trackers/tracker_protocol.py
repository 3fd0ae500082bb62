"""The interface of a tracker: a service or a file that shows the metrics of runs.

    RunFollower ── StepMetrics, Evaluation, Samples ──► Tracker.log ──► W&B, TensorBoard, ...

Only the process of the tracker (tracker_child.py) calls it, so a tracker may block, raise or end
its process. Names of metrics are those of rlsys/metrics.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

PROJECT = "rlsys"  # default name of the project or experiment
SAMPLES = "samples"  # name of the table


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run that a tracker shows."""

    name: str
    files: Path
    """Directory for the tracker's own files."""
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """A line of metrics.jsonl."""

    kind = "metrics"
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A line of evaluations.jsonl, without its step.

    It may arrive some steps after the step whose model was evaluated.
    """

    kind = "evaluation"
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Recorded rollouts of a step. The keys of each row are COLUMNS."""

    kind = "samples"
    step: int
    rows: tuple[Mapping[str, Any], ...]


Event = StepMetrics | Evaluation | Samples

TEXT_COLUMNS = ("prompt", "completion")
COLUMNS = (
    *("group_id", "index", *TEXT_COLUMNS),
    *("reward", "advantage", "staleness", "finish_reason"),
)


@dataclass(frozen=True, kw_only=True)
class Position:
    """Last step of each kind of event that a tracker has."""

    metrics: int = 0
    evaluation: int = -1  # step 0 may be evaluated
    samples: int = 0

    def has(self, event: Event) -> bool:
        """Return whether the tracker has the event."""
        return event.step <= int(getattr(self, event.kind))

    def after(self, event: Event) -> Self:
        """Return the position after the event was logged."""
        return replace(self, **{event.kind: event.step})

    def cut(self, step: int) -> Self:
        """Return the position after the removal of all events of steps after `step`."""
        return replace(
            self,
            metrics=min(self.metrics, step),
            evaluation=min(self.evaluation, step),
            samples=min(self.samples, step),
        )


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Answer of a tracker that has opened its run."""

    run_id: str
    """Identifier with which a resumed run continues this run of the tracker."""
    address: str
    """URL, directory or command with which the user finds the run."""
    position: Position
    """The recorded position, corrected where the tracker knows better."""


class Tracker(Protocol):
    """A tracker. It is created without arguments and may import its library only in `open`."""

    def open(self, run: TrackedRun, run_id: str | None, recorded: Position) -> Opened:
        """Create a run of the tracker, or continue the one with the identifier `run_id`.

        `recorded` is what the run had at the last record of it. A process that was killed may have
        logged one event more.
        """

    def rewind(self, step: int) -> bool:
        """Remove everything of steps after `step`, which are trained again.

        Returns False if the tracker cannot remove anything. It then keeps the first values of
        these steps, and does not get them again.
        """

    def log(self, event: Event) -> None:
        """Log an event. Steps of one kind rise, except after `rewind`."""

    def finish(self, *, failed: bool) -> None:
        """Write or upload what is left, and end the run of the tracker."""


def table(samples: Samples) -> list[list[Any]]:
    """Return the rows of a table, with the cells in the order of COLUMNS."""
    return [[row[name] for name in COLUMNS] for row in samples.rows]


def flat_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration as {dotted name: value}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flat_config(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
