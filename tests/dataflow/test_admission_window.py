"""The limit of running requests: by hand, its properties, and in the time model of an engine."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.controller.simulation.batching_engine import BatchingEngine, SampledSequence
from rlsys.dataflow.scheduling.admission_window import NO_LIMIT, AdmissionWindow, StepTimes


def test_there_is_no_limit_while_preemptions_waste_little() -> None:
    window = AdmissionWindow()
    window.worked(10.0, wasted_s=2.0)  # a fifth is tolerated
    window.preempted(50)
    window.ended(7, num_running=50, is_binding=True)
    assert window.limit == NO_LIMIT


def test_a_preemption_cuts_once_and_ended_requests_raise_the_limit_again() -> None:
    window = AdmissionWindow()
    window.worked(7.0, wasted_s=0.0)
    window.worked(3.0, wasted_s=3.0)
    window.preempted(50)
    assert window.limit == 45
    window.worked(1.0, wasted_s=1.0)
    window.preempted(49)  # requests of before the cut
    assert window.limit == 45
    window.preempted(45)
    assert window.limit == 40  # 0.9 x 45 = 40.5
    window.worked(1.0)
    window.ended(1, num_running=40, is_binding=True)
    assert window.limit == 40  # 40.8
    window.ended(1, num_running=40, is_binding=False)
    window.ended(1, num_running=40, is_binding=True)
    assert window.limit == 41  # 41.1


def test_the_limit_does_not_grow_while_much_is_wasted() -> None:
    window = AdmissionWindow()
    window.worked(1.0, wasted_s=0.5)
    window.preempted(10)
    window.worked(1.0, wasted_s=0.5)
    window.ended(20, num_running=9, is_binding=True)
    assert (window.limit, window.wasted_share) == (9, 0.5)
    window.ended(100, num_running=9, is_binding=True)  # all of it is long ago
    assert (window.limit, window.wasted_share) == (39, 0.0)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("work"), st.floats(0.001, 10), st.floats(0, 1)),
            st.tuples(st.just("preempt"), st.integers(1, 500)),
            st.tuples(st.just("end"), st.integers(0, 50), st.booleans()),
        )
    )
)
def test_the_limit_is_at_least_one_and_falls_only_by_preemptions(
    events: list[tuple[Any, ...]],
) -> None:
    window = AdmissionWindow()
    has_preempted = False
    for event in events:
        before = window.limit
        if event[0] == "work":
            window.worked(event[1], wasted_s=event[1] * event[2])
            assert window.limit == before
        elif event[0] == "preempt":
            has_preempted = True
            window.preempted(event[1])
            assert 1 <= window.limit <= before
        else:
            window.ended(event[1], num_running=20, is_binding=event[2])
            assert window.limit >= before
            assert event[2] or window.limit == before
        assert has_preempted or window.limit == NO_LIMIT
        assert 0.0 <= window.wasted_share <= 1.0


def test_the_time_of_recomputed_tokens_is_what_a_step_takes_longer() -> None:
    times = StepTimes()
    assert times.wasted_s(9.0, num_prefill=10, num_recomputed=10) == 0.0  # no step to compare with
    assert times.wasted_s(2.0, num_prefill=0, num_recomputed=0) == 0.0
    assert times.wasted_s(5.0, num_prefill=30, num_recomputed=10) == pytest.approx(1.0)
    assert times.wasted_s(1.0, num_prefill=30, num_recomputed=10) == 0.0


@dataclass(frozen=True)
class Costs:
    """A step of 8 ms, and prefills of this time for each token."""

    prefill_token_s: float

    def decode_step_s(self, num_sequences: int, context_tokens: float) -> float:
        return 8e-3 + 2e-5 * num_sequences + 4e-8 * context_tokens

    def prefill_s(self, num_tokens: int) -> float:
        return self.prefill_token_s * num_tokens


def finished(costs: Costs, cache_tokens: int, window: AdmissionWindow | None) -> BatchingEngine:
    """Return an engine that has run 160 sequences of 8 to 800 tokens, in groups of 8."""
    lengths = random.Random(1)
    engine = BatchingEngine(costs, cache_tokens=cache_tokens, window=window)
    engine.is_admitting = False
    for number in range(160):
        drawn = int(lengths.lognormvariate(math.log(100), 0.8))
        engine.add(
            SampledSequence(
                name=str(number),
                prompt=number // 8,
                num_prompt_tokens=25,
                num_tokens=min(800, max(8, drawn)),
            ),
            0.0,
        )
    engine.admit_again(0.0)
    while (now_s := engine.next_event_s()) is not None:
        engine.advance(now_s)
    assert len(engine.take_finished()) == 160
    return engine


@pytest.mark.parametrize(
    ("prefill_token_s", "cache_tokens", "least_gain"),
    [
        (2e-4, 1 << 20, 1.0),  # no preemption: the same to the last digit
        (2e-5, 5000, 0.98),  # cheap ones are tolerated
        (4e-4, 5000, 1.05),  # expensive ones are avoided
    ],
)
def test_an_engine_with_a_window_is_as_fast_or_faster(
    prefill_token_s: float, cache_tokens: int, least_gain: float
) -> None:
    costs, window = Costs(prefill_token_s), AdmissionWindow()
    plain = finished(costs, cache_tokens, None)
    limited = finished(costs, cache_tokens, window)
    assert plain.num_sampled == limited.num_sampled
    assert plain.busy_s >= least_gain * limited.busy_s
    if not plain.num_preempted:
        assert (limited.busy_s, window.limit) == (plain.busy_s, NO_LIMIT)
    if least_gain > 1:
        assert limited.num_preempted < plain.num_preempted
