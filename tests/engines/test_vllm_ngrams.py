"""n-gram drafts in vLLM, with a proposer and passes that take given times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rlsys.engines.generation.vllm.vllm_ngrams import PacedNgrams
from rlsys.types import Int32Array

# Two requests that repeat themselves, and the memory of vLLM after them.
LENGTHS: Int32Array = np.array([6, 7], np.int32)
TOKENS: Int32Array = np.array(
    [[1, 2, 3, 4, 1, 2, 9, 9, 9, 9], [5, 6, 7, 8, 9, 5, 6, 0, 0, 0]], np.int32
)


class Proposer:
    """The part of vLLM's NgramProposer that is used."""

    min_n, max_n = 2, 4
    propose: Any


class Runner:
    """Passes over two requests, of 1 s or, with drafts, of `drafted_s`."""

    def __init__(self, drafted_s: float, num_accepted: int) -> None:
        self.seconds = 0.0
        self.num_tokens = 0
        self.num_drafted_passes = 0
        self._drafted_s, self._num_accepted = drafted_s, num_accepted
        self._drafts: list[list[int]] = [[], []]
        self._proposer = Proposer()
        self.paced = PacedNgrams(self._proposer, clock=lambda: self.seconds)

    def step(self, *, prefill_s: float = 0.0) -> None:
        """Run a pass. One that also prefills has the longer time, and 100 tokens more."""
        names = ["a", "b"]
        drafted = {name: one for name, one in zip(names, self._drafts, strict=True) if one}
        num_tokens = {name: 1 + len(drafted.get(name, ())) for name in names}
        if prefill_s:
            num_tokens["b"] = 100
        self.paced.begin(num_tokens, drafted)
        self.num_drafted_passes += bool(drafted)
        self.seconds += (self._drafted_s if drafted else 1.0) + prefill_s
        sampled = [[5] * (1 + (self._num_accepted if name in drafted else 0)) for name in names]
        self.num_tokens += sum(len(one) for one in sampled)
        self._drafts = self._proposer.propose(2, sampled, LENGTHS, TOKENS, slot_mappings=None)

    def rate(self, num_passes: int) -> float:
        """Return the tokens per second of further passes."""
        tokens, seconds = self.num_tokens, self.seconds
        for _ in range(num_passes):
            self.step()
        return (self.num_tokens - tokens) / (self.seconds - seconds)


@pytest.mark.parametrize(("drafted_s", "num_accepted"), [(2.0, 0), (1.0, 0), (3.0, 1)])
def test_drafts_that_slow_the_engine_down_are_left_out(drafted_s: float, num_accepted: int) -> None:
    runner = Runner(drafted_s, num_accepted)
    assert runner.rate(4000) > 0.97 * 2
    speedup = runner.paced.speedup
    assert speedup == pytest.approx((1 + num_accepted) / drafted_s, rel=0.05)


def test_drafts_that_pay_are_made_after_almost_each_pass() -> None:
    runner = Runner(1.1, 2)
    assert runner.rate(1000) > 0.95 * 6 / 1.1
    assert runner.num_drafted_passes > 900


def test_prefills_and_the_time_between_two_passes_do_not_count() -> None:
    runner = Runner(1.1, 2)
    runner.rate(100)
    for _ in range(50):
        runner.step(prefill_s=50.0)
        runner.seconds += 1000.0  # nothing to do
    assert runner.paced.speedup == pytest.approx(3 / 1.1, rel=0.05)


def test_requests_without_a_sampled_token_have_no_part() -> None:
    runner = Runner(1.1, 2)
    runner.paced.begin({"a": 50}, {})
    assert runner.paced.propose(2, [[]], LENGTHS, TOKENS) == [[]]
    assert runner.paced.propose(2, [], LENGTHS, TOKENS) == []
    assert runner.paced.speedup is None


class Always:
    """Drafts after each pass."""

    speedup = None

    def drafts(self, num_running: int) -> bool:
        return True

    def observe(self, num_running: int, **result: Any) -> None:
        pass


def drafts(
    num_tokens: int, sampled: Sequence[Sequence[int]], tokens: Int32Array
) -> list[list[int]]:
    return PacedNgrams(Proposer(), pace=Always()).propose(num_tokens, sampled, LENGTHS, tokens)


def test_a_draft_repeats_what_followed_within_the_length_that_vllm_can_hold() -> None:
    assert drafts(2, [[2], [6]], TOKENS) == [[3, 4], [7, 8]]
    assert drafts(2, [[2], []], TOKENS) == [[3, 4], []]  # the prompt of the second goes on
    assert drafts(2, [[2]], TOKENS) == [[3, 4]]
    assert drafts(3, [[2], [6]], TOKENS[:, :8]) == [[3, 4], [7]]
    assert drafts(2, [[2], [6]], TOKENS[:, :7]) == [[3], []]
    other = TOKENS.copy()
    other[0, 5] = 0
    assert drafts(2, [[0], [6]], other) == [[], [7, 8]]
