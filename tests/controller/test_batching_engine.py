"""The time model of a generation engine: times by hand, and properties of its accounting."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.controller.simulation.batching_engine import BatchingEngine, SampledSequence


@dataclass(frozen=True)
class Costs:
    """Linear costs, in seconds."""

    step_s: float = 1.0
    sequence_s: float = 0.0
    context_s: float = 0.0
    prefill_token_s: float = 0.0

    def decode_step_s(self, num_sequences: int, context_tokens: float) -> float:
        return self.step_s + self.sequence_s * num_sequences + self.context_s * context_tokens

    def prefill_s(self, num_tokens: int) -> float:
        return self.prefill_token_s * num_tokens


def sequence(
    name: str, num_tokens: int, *, prompt: int = 0, num_prompt_tokens: int = 10
) -> SampledSequence:
    return SampledSequence(
        name=name, prompt=prompt, num_prompt_tokens=num_prompt_tokens, num_tokens=num_tokens
    )


def ends(engine: BatchingEngine) -> dict[str, float]:
    """Return the time at which each sequence finishes."""
    found: dict[str, float] = {}
    while (now_s := engine.next_event_s()) is not None:
        engine.advance(now_s)
        found |= {one.name: now_s for one in engine.take_finished()}
    return found


def test_sequences_get_one_token_per_step_after_their_prefill() -> None:
    engine = BatchingEngine(Costs(step_s=1.0, prefill_token_s=0.1), cache_tokens=1000)
    engine.add(sequence("a", 3), 0.0)
    engine.add(sequence("b", 5), 0.0)  # shares the prompt: no second prefill
    engine.add(sequence("c", 5, prompt=1), 0.0)
    assert ends(engine) == pytest.approx({"a": 5.0, "b": 7.0, "c": 7.0})
    assert engine.num_sampled == 13
    assert engine.busy_s == pytest.approx(7.0)


def test_a_step_takes_longer_with_more_sequences_and_more_context() -> None:
    engine = BatchingEngine(Costs(step_s=1.0, sequence_s=0.5, context_s=0.01), cache_tokens=1000)
    engine.add(sequence("a", 2), 0.0)
    engine.add(sequence("b", 3), 0.0)
    # steps: 2 + .01 * 20, 2 + .01 * 22, then b alone: 1.5 + .01 * 12
    assert ends(engine) == pytest.approx({"a": 4.42, "b": 4.42 + 1.62})


def test_a_sequence_that_arrives_within_a_step_starts_after_it() -> None:
    engine = BatchingEngine(Costs(), cache_tokens=1000)
    engine.add(sequence("a", 4), 0.0)
    engine.add(sequence("b", 2), 1.5)
    assert ends(engine) == pytest.approx({"a": 4.0, "b": 4.0})


def test_a_full_cache_lets_sequences_wait_and_preempts_the_newest() -> None:
    # a and b fit with their prompts (10 each), and grow to 25 tokens together after 2 steps.
    engine = BatchingEngine(Costs(), cache_tokens=25)
    engine.add(sequence("a", 6), 0.0)
    engine.add(sequence("b", 6, prompt=1), 0.0)
    engine.add(sequence("c", 1, prompt=2), 0.0)
    assert engine.num_waiting == 1
    found = ends(engine)
    assert engine.num_preempted == 1
    assert found["a"] == pytest.approx(6.0)
    assert found["b"] == pytest.approx(10.0)  # 2 tokens, waits until 6, 4 more
    assert found["c"] == pytest.approx(7.0)  # beside b


def test_a_pause_delays_the_rest_and_an_abort_keeps_the_tokens_so_far() -> None:
    engine = BatchingEngine(Costs(), cache_tokens=1000)
    engine.add(sequence("a", 4), 0.0)
    engine.add(sequence("b", 9), 0.0)
    engine.pause(2.0)
    assert engine.next_event_s() is None
    engine.resume(7.0)
    aborted = engine.abort("b", 8.0)
    assert aborted is not None
    assert aborted.num_done == 3
    assert engine.abort("b", 8.0) is None
    assert ends(engine) == pytest.approx({"a": 9.0})


def test_forgotten_tokens_are_computed_again_by_the_sequences_that_ran() -> None:
    costs = Costs(step_s=1.0, prefill_token_s=0.1)
    engine = BatchingEngine(costs, cache_tokens=1000)
    engine.add(sequence("a", 4), 0.0)  # its prompt of 10 tokens takes 1 s
    engine.add(sequence("b", 6), 0.0)  # has the same prompt
    engine.pause(3.0)  # after two steps
    engine.forget()
    assert (engine.num_running, engine.num_waiting) == (0, 2)
    engine.resume(3.0)
    # The prompt and two tokens of each take 1.4 s; then a needs 2 steps and b 4.
    assert ends(engine) == pytest.approx({"a": 6.4, "b": 8.4})
    assert engine.num_preempted == 0


def test_no_new_sequence_starts_while_the_engine_drains() -> None:
    engine = BatchingEngine(Costs(), cache_tokens=1000)
    engine.add(sequence("a", 2), 0.0)
    engine.is_admitting = False
    engine.add(sequence("b", 2), 0.0)
    engine.advance(5.0)
    assert [one.name for one in engine.take_finished()] == ["a"]
    assert (engine.num_running, engine.num_waiting) == (0, 1)
    engine.admit_again(5.0)
    assert ends(engine) == pytest.approx({"b": 7.0})


def test_a_sequence_that_never_fits_is_refused() -> None:
    engine = BatchingEngine(Costs(), cache_tokens=25)
    with pytest.raises(ValueError, match="a needs 30 tokens"):
        engine.add(sequence("a", 20), 0.0)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=20),
    gaps=st.lists(st.floats(0, 5), min_size=20, max_size=20),
    cache_tokens=st.integers(50, 300),
    max_running=st.integers(1, 8),
)
def test_every_sequence_finishes_once_with_all_its_tokens(
    lengths: list[tuple[int, int]], gaps: list[float], cache_tokens: int, max_running: int
) -> None:
    costs = Costs(step_s=1.0, sequence_s=0.1, context_s=0.001, prefill_token_s=0.05)
    engine = BatchingEngine(costs, cache_tokens=cache_tokens, max_running=max_running)
    now_s = 0.0
    for i, (num_tokens, prompt) in enumerate(lengths):
        now_s += gaps[i]
        engine.add(sequence(str(i), num_tokens, prompt=prompt), now_s)
        assert engine.num_running <= max_running
    finished = [one.name for one in engine.take_finished()]
    last_s = 0.0
    while (event_s := engine.next_event_s()) is not None:
        assert event_s >= last_s
        last_s = event_s
        engine.advance(event_s)
        finished += [one.name for one in engine.take_finished()]
        assert engine.num_running + engine.num_waiting + len(finished) == len(lengths)
    assert sorted(finished, key=int) == [str(i) for i in range(len(lengths))]
    assert engine.num_sampled == sum(num_tokens for num_tokens, _ in lengths)
    assert engine.busy_s <= last_s + 1e-6
