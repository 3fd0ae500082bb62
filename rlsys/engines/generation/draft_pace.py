"""Decisions between passes with and without drafts, by the tokens per second of both.

    Pace.drafts ──► a pass with or without drafts ──► Pace.observe(tokens, seconds)

A pass with drafts computes more rows than a plain one, which pays if enough of them are accepted.
`Pace` compares the tokens per second of both kinds for each number of running requests, and uses
the faster kind. It tries the other one now and then: less often each time that it was slower. So
speculation costs a few percent at most. What is sampled does not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

# Passes of each kind before the first comparison.
NUM_TRIALS = 4
# Passes between two tries of the slower kind, at first and at most.
FIRST_INTERVAL, LAST_INTERVAL = 32, 1024
# Weight of earlier passes at each new one.
MEMORY = 0.9
# A pass counts as at most this many mean ones: another process may have had the processor.
OUTLIER = 2.0
# Drafts must be faster by this factor, since measurements have noise.
MARGIN = 1.02


class Pacing(Protocol):
    """A decision between passes with and without drafts."""

    def drafts(self, num_running: int) -> bool:
        """Return whether the next pass of this many requests should have drafts."""

    def observe(self, num_running: int, *, drafted: bool, num_tokens: int, seconds: float) -> None:
        """Take the result of a pass into account."""

    @property
    def speedup(self) -> float | None:
        """Tokens/s with drafts over those without, at the newest number of requests, if known."""


@dataclass
class _Rate:
    """Tokens per request and second, with a fading memory."""

    num_passes: int = 0
    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        if self.num_passes >= NUM_TRIALS:
            seconds = min(seconds, OUTLIER * self.seconds / self.weight)
        self.num_passes += 1
        self.weight = MEMORY * self.weight + 1
        self.tokens = MEMORY * self.tokens + tokens
        self.seconds = MEMORY * self.seconds + seconds

    @property
    def value(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


@dataclass
class _Comparison:
    """Both kinds of passes with about the same number of requests."""

    plain: _Rate = field(default_factory=_Rate)
    drafted: _Rate = field(default_factory=_Rate)
    interval: int = FIRST_INTERVAL
    until_try: int = FIRST_INTERVAL
    num_tries_left: int = 0

    @property
    def speedup(self) -> float:
        if min(self.plain.num_passes, self.drafted.num_passes) < NUM_TRIALS:
            return 1.0
        return self.drafted.value / self.plain.value


class Pace:
    """Use the kind of pass that has been faster."""

    def __init__(self) -> None:
        self._comparisons: dict[int, _Comparison] = {}
        self.speedup: float | None = None

    def drafts(self, num_running: int) -> bool:
        """See `Pacing.drafts`."""
        one = self._of(num_running)
        if one.plain.num_passes < NUM_TRIALS:
            return False
        if one.drafted.num_passes < NUM_TRIALS:
            return True
        is_better = one.speedup > MARGIN
        return is_better != (one.num_tries_left > 0)

    def observe(self, num_running: int, *, drafted: bool, num_tokens: int, seconds: float) -> None:
        """See `Pacing.observe`."""
        one = self._of(num_running)
        was_better = one.speedup > MARGIN
        (one.drafted if drafted else one.plain).add(num_tokens / num_running, seconds)
        if min(one.plain.num_passes, one.drafted.num_passes) < NUM_TRIALS:
            return
        self.speedup = one.speedup
        if one.num_tries_left:
            one.num_tries_left -= 1
            changed = (one.speedup > MARGIN) != was_better
            if changed:
                one.num_tries_left, one.interval = 0, FIRST_INTERVAL
            elif not one.num_tries_left:
                one.interval = min(2 * one.interval, LAST_INTERVAL)
        else:
            one.until_try -= 1
            if one.until_try <= 0:
                one.until_try, one.num_tries_left = one.interval, 1

    def _of(self, num_running: int) -> _Comparison:
        # A pass computes rows in blocks of 16, so few numbers of requests differ in time.
        key = num_running.bit_length() if num_running <= 16 else 16 + -(-num_running // 16)
        return self._comparisons.setdefault(key, _Comparison())
