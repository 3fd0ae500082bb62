"""The pace of vLLM's n-gram drafts, with a proposer and passes that take given times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rlsys.engines.generation.vllm.vllm_ngrams import PacedNgrams


class Proposer:
    """vLLM's proposer: two drafted tokens for each request, by a look-up of 0.1 s."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def propose(
        self, num_tokens: int, sampled: Sequence[Sequence[int]], *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        self._runner.seconds += 0.1
        return [[7, 7] for _ in sampled]


class Runner:
    """Passes over two requests, of 1 s or, with drafts, of `drafted_s`."""

    def __init__(self, drafted_s: float, num_accepted: int) -> None:
        self.seconds = 0.0
        self.num_tokens = 0
        self.num_drafted_passes = 0
        self._drafted_s, self._num_accepted = drafted_s, num_accepted
        self._drafts: list[list[int]] = [[], []]
        self._proposer = Proposer(self)
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
        self._drafts = self._proposer.propose(2, sampled, None, slot_mappings=None)

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
    assert speedup == pytest.approx((1 + num_accepted) / (drafted_s + 0.1), rel=0.05)


def test_drafts_that_pay_are_made_after_almost_each_pass() -> None:
    runner = Runner(1.1, 2)
    assert runner.rate(1000) > 0.95 * 6 / 1.2
    assert runner.num_drafted_passes > 900


def test_prefills_and_the_time_between_two_passes_do_not_count() -> None:
    runner = Runner(1.1, 2)
    runner.rate(100)
    for _ in range(50):
        runner.step(prefill_s=50.0)
        runner.seconds += 1000.0  # nothing to do
    assert runner.paced.speedup == pytest.approx(3 / 1.2, rel=0.05)


def test_requests_without_a_sampled_token_have_no_part() -> None:
    runner = Runner(1.1, 2)
    runner.paced.begin({"a": 50}, {})
    assert runner.paced.propose(2, [[]]) == [[]]
    assert runner.paced.propose(2, []) == []
    assert runner.paced.speedup is None
