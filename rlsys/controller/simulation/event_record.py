"""An observer that keeps the events of a simulated run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsys.controller.state import RunningGroup, TrainedStep
from rlsys.rewards import RewardFailure
from rlsys.types import WeightManifest


@dataclass(kw_only=True)
class Record:
    """An observer that keeps all events."""

    first_step: int = 0
    steps: list[TrainedStep] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    failures: list[RewardFailure] = field(default_factory=list)
    refused: list[Mapping[str, Sequence[float]]] = field(default_factory=list)
    missing: list[tuple[tuple[str, ...], tuple[str, ...], int]] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    unfinished: list[tuple[int, int]] = field(default_factory=list)  # continued, dropped
    joined: list[str] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)
    waited_s: defaultdict[tuple[str, str], float] = field(
        default_factory=lambda: defaultdict(float)
    )
    lent: list[tuple[float, int]] = field(default_factory=list)
    """Times for which the trainer's devices were lent, with the rollouts that finished there."""
    reasons: list[str] = field(default_factory=list)
    """Reasons of steps without lending."""

    def devices_lent(self, seconds: float, *, num_rollouts: int) -> None:
        """Keep a time of lending."""
        self.lent.append((seconds, num_rollouts))

    def not_lent(self, reason: str) -> None:
        """Keep the reason."""
        self.reasons.append(reason)

    def step_trained(self, trained: TrainedStep) -> None:
        """Keep a step and the staleness of its groups."""
        after = self.steps[-1].step if self.steps else self.first_step
        assert trained.step == after + 1, "a step is reported twice or out of order"
        self.steps.append(trained)
        for group in trained.groups:
            self.staleness.append(_staleness(trained, group))

    def rollouts_sampled(self, num_rollouts: int, *, num_tokens: int) -> None:
        """Ignore the event."""
        pass

    def weights_loaded(self, manifest: WeightManifest, **_: Any) -> None:
        """Ignore the event."""
        pass

    def reward_failed(self, failure: RewardFailure) -> None:
        """Keep a failure."""
        self.failures.append(failure)

    def parts_missing(self, parts: Sequence[str], given: Sequence[str], num_episodes: int) -> None:
        """Keep the missing parts."""
        self.missing.append((tuple(parts), tuple(given), num_episodes))

    def group_refused(self, function: str, columns: Mapping[str, Sequence[float]]) -> None:
        """Keep the columns of a refused group."""
        self.refused.append(columns)

    def waited(self, stage: str, reason: str, seconds: float) -> None:
        """Add up waiting times."""
        self.waited_s[stage, reason] += seconds

    def replica_died(self, name: str, reason: str, *, num_continued: int, num_dropped: int) -> None:
        """Keep the name of a replica, and its unfinished rollouts."""
        self.deaths.append(name)
        self.unfinished.append((num_continued, num_dropped))

    def replica_joined(self, name: str, *, version: int) -> None:
        """Keep the name of a replica."""
        self.joined.append(name)

    def trainer_restarted(self, reason: str, *, step: int, lost_steps: int, **_: Any) -> None:
        """Keep the reason and forget the lost steps."""
        self.restarts.append(reason)
        if lost_steps:
            del self.steps[step:]


def _staleness(trained: TrainedStep, group: RunningGroup) -> int:
    return trained.step - 1 - min(note.min_version for note in group.rollouts)
