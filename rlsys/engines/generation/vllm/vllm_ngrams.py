"""n-gram drafts inside vLLM: those of the torch engine, while passes with drafts are faster.

    begin ──► pass of the runner ──► propose ──► drafts of the next pass, or none

vLLM itself drafts after each pass, and compiles its search when it first drafts.

Shape legend: N requests of a pass, C tokens of the longest request that vLLM can hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlsys.engines.generation.draft_pace import Pace, Pacing
from rlsys.engines.generation.ngram_draft import repeated
from rlsys.types import Int32Array


class PacedNgrams:
    """Replacement of the method `propose` of vLLM's NgramProposer.

    `pace` decides between passes with and without drafts. `clock` returns seconds.
    """

    def __init__(
        self,
        proposer: Any,
        *,
        clock: Callable[[], float] = time.perf_counter,
        pace: Pacing | None = None,
    ) -> None:
        self._proposer = proposer
        proposer.propose = self.propose
        self._pace: Pacing = Pace() if pace is None else pace
        self._clock = clock
        self._began: float | None = None  # when a pass began that only decodes
        self._is_drafting = False
        self._search_s = 0.0  # time of making the drafts of the pass

    @property
    def speedup(self) -> float | None:
        """See `Pacing.speedup`."""
        return self._pace.speedup

    def begin(self, num_tokens: Mapping[str, int], drafted: Mapping[str, Sequence[int]]) -> None:
        """Note that a pass begins, with numbers of tokens and drafted ones, by request."""
        decodes = all(num == 1 + len(drafted.get(name, ())) for name, num in num_tokens.items())
        self._began = self._clock() if decodes else None

    def propose(
        self,
        num_drafted: int,
        sampled: Sequence[Sequence[int]],
        lengths: Int32Array,
        tokens: Int32Array,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return drafts [N] after a pass has sampled tokens.

        Args:
            num_drafted: Tokens of a draft.
            sampled: Sampled tokens [N] of each request; none for one whose prompt goes on.
            lengths: Tokens of each request with the sampled ones; N at least.
            tokens: These tokens; N at least, C.
            slot_mappings: Unused, as in vLLM.
        """
        now = self._clock()
        num_running = sum(len(tokens) > 0 for tokens in sampled)
        if self._began is not None and num_running:
            self._pace.observe(
                num_running,
                drafted=self._is_drafting,
                num_tokens=sum(len(tokens) for tokens in sampled),
                seconds=now - self._began + self._search_s,
            )
        self._began, self._search_s = None, 0.0
        self._is_drafting = num_running > 0 and self._pace.drafts(num_running)
        if not self._is_drafting:
            return [[] for _ in sampled]
        found, is_found = repeated(
            tokens[: len(sampled)],
            lengths[: len(sampled)],
            min_match=self._proposer.min_n,
            max_match=self._proposer.max_n,
            num_tokens=num_drafted,
        )
        room = np.maximum(tokens.shape[1] - lengths, 0)
        drafts = [
            draft[:limit].tolist() if has_draft and new else []
            for draft, limit, has_draft, new in zip(found, room, is_found, sampled, strict=False)
        ]
        self._search_s = self._clock() - now
        return drafts
