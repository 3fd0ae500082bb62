"""vLLM's n-gram drafts, left out while passes without them are faster.

    begin ──► pass of the runner ──► propose ──► drafts of the next pass, or none

vLLM itself drafts after each pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlsys.engines.generation.draft_pace import Pace, Pacing


class PacedNgrams:
    """Addition to a proposer of vLLM, whose `propose` it replaces.

    `pace` decides between passes with and without drafts. `clock` returns seconds.
    """

    def __init__(
        self,
        proposer: Any,
        *,
        clock: Callable[[], float] = time.perf_counter,
        pace: Pacing | None = None,
    ) -> None:
        self._look_up = proposer.propose
        proposer.propose = self.propose
        self._pace: Pacing = Pace() if pace is None else pace
        self._clock = clock
        self._began: float | None = None  # when a pass began that only decodes
        self._is_drafting = False
        self._look_up_s = 0.0  # time of making the drafts of the pass

    @property
    def speedup(self) -> float | None:
        """See `Pacing.speedup`."""
        return self._pace.speedup

    def begin(self, num_tokens: Mapping[str, int], drafted: Mapping[str, Sequence[int]]) -> None:
        """Note that a pass begins, with numbers of tokens and drafted ones, by request."""
        decodes = all(num == 1 + len(drafted.get(name, ())) for name, num in num_tokens.items())
        self._began = self._clock() if decodes else None

    def propose(
        self, num_tokens: int, sampled: Sequence[Sequence[int]], *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        """Return drafts after a pass has sampled tokens; see vLLM's NgramProposer.propose."""
        now = self._clock()
        num_running = sum(len(tokens) > 0 for tokens in sampled)
        if self._began is not None and num_running:
            self._pace.observe(
                num_running,
                drafted=self._is_drafting,
                num_tokens=sum(len(tokens) for tokens in sampled),
                seconds=now - self._began + self._look_up_s,
            )
        self._began, self._look_up_s = None, 0.0
        self._is_drafting = num_running > 0 and self._pace.drafts(num_running)
        if not self._is_drafting:
            return [[] for _ in sampled]
        drafts: list[list[int]] = self._look_up(num_tokens, sampled, *args, **kwargs)
        self._look_up_s = self._clock() - now
        return drafts
