"""Decisions between passes with and without drafts, by the tokens per second of both.

    Pace.drafts ──► a pass with or without drafts ──► Pace.observe(tokens, seconds)

A pass with drafts computes more rows than a plain one, which pays if enough of them are accepted.
`Pace` compares the tokens per second of both kinds for each number of running requests, and uses
the faster kind. It tries the other one now and then: less often each time that it was slower. So
speculation costs a few percent at most. What is sampled does not depend on it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

# Passes of a kind before it is compared.
NUM_TRIALS = 3
# Newest passes of a kind that count.
WINDOW = 16
# Passes between two tries of the slower kind, at first and at most.
FIRST_INTERVAL, LAST_INTERVAL = 32, 1024
# A pass counts as at most this many median ones: another process may have had the processor.
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


class _Rate:
    """Tokens per request and second of the newest passes of a kind."""

    def __init__(self) -> None:
        self._passes: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # (tokens, seconds)

    def add(self, tokens: float, seconds: float) -> None:
        self._passes.append((tokens, seconds))

    def forget(self) -> None:
        self._passes.clear()

    @property
    def is_known(self) -> bool:
        return len(self._passes) >= NUM_TRIALS

    @property
    def value(self) -> float:
        limit = OUTLIER * median(seconds for _, seconds in self._passes)
        seconds = sum(min(one, limit) for _, one in self._passes)
        return sum(tokens for tokens, _ in self._passes) / max(seconds, 1e-9)


@dataclass
class _Comparison:
    """Both kinds of passes with about the same number of requests.

    A kind whose rate is not known is measured next. To try a kind again is to forget its rate, so
    one interrupted pass or a change of the text counts until the next try only.
    """

    plain: _Rate = field(default_factory=_Rate)
    drafted: _Rate = field(default_factory=_Rate)
    uses_drafts: bool = False
    is_trying: bool = True
    interval: int = FIRST_INTERVAL // 2
    until_try: int = 0
    speedup: float | None = None

    def drafts(self) -> bool:
        if not self.plain.is_known:
            return False
        return not self.drafted.is_known or self.uses_drafts

    def observe(self, *, drafted: bool, tokens: float, seconds: float) -> None:
        (self.drafted if drafted else self.plain).add(tokens, seconds)
        if not (self.plain.is_known and self.drafted.is_known):
            return
        self.speedup = self.drafted.value / self.plain.value
        changed = (self.speedup > MARGIN) != self.uses_drafts
        self.uses_drafts ^= changed
        if changed:
            self.interval = max(FIRST_INTERVAL, self.interval // 4)
        elif self.is_trying:
            self.interval = min(2 * self.interval, LAST_INTERVAL)
        if changed or self.is_trying:
            self.until_try, self.is_trying = self.interval, False
            return
        self.until_try -= 1
        if self.until_try <= 0:
            self.is_trying = True
            (self.plain if self.uses_drafts else self.drafted).forget()


class Pace:
    """Use the kind of pass that has been faster."""

    def __init__(self) -> None:
        self._comparisons: dict[int, _Comparison] = {}
        self.speedup: float | None = None

    def drafts(self, num_running: int) -> bool:
        """See `Pacing.drafts`."""
        return self._of(num_running).drafts()

    def observe(self, num_running: int, *, drafted: bool, num_tokens: int, seconds: float) -> None:
        """See `Pacing.observe`."""
        one = self._of(num_running)
        one.observe(drafted=drafted, tokens=num_tokens / num_running, seconds=seconds)
        if one.speedup is not None:
            self.speedup = one.speedup

    def _of(self, num_running: int) -> _Comparison:
        # A pass computes rows in blocks of 16, so few numbers of requests differ in time.
        key = num_running.bit_length() if num_running <= 16 else 16 + -(-num_running // 16)
        return self._comparisons.setdefault(key, _Comparison())
