"""Drafts by repetition, and the pace of drafting, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.engines.generation.draft_pace import Pace
from rlsys.engines.generation.ngram_draft import repeated


def draft(tokens: Sequence[int], **options: Any) -> list[int] | None:
    """Return the draft for one sequence."""
    given = {"min_match": 2, "max_match": 4, "num_tokens": 3} | options
    drafts, found = repeated(
        np.array([tokens], np.int32), np.array([len(tokens)], np.int32), **given
    )
    return drafts[0].tolist() if found[0] else None


def test_a_draft_repeats_what_followed() -> None:
    assert draft([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5]
    assert draft([1, 2, 3, 4, 5, 9, 7, 2]) is None  # one token is less than min_match
    assert draft([1, 2, 3, 4, 5, 9, 7, 2], min_match=1) == [3, 4, 5]
    assert draft([5]) is None


def test_the_longest_match_wins_and_of_equal_ones_the_latest() -> None:
    assert draft([9, 1, 2, 5, 5, 5, 3, 1, 2, 6, 6, 6, 9, 1, 2]) == [5, 5, 5]
    assert draft([1, 2, 5, 0, 1, 2, 6, 0, 8, 1, 2]) == [6, 0, 8]


def test_a_draft_beyond_the_end_goes_on_with_the_period() -> None:
    assert draft([7, 8, 4, 8, 4], num_tokens=5) == [8, 4, 8, 4, 8]
    assert draft([3, 3, 3], num_tokens=4) == [3, 3, 3, 3]


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=5),
    min_match=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_drafts_equal_those_of_a_plain_search(
    rows: list[list[int]], min_match: int, more: int
) -> None:
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.full((len(rows), 14), 1, np.int32)  # what follows a row must not matter
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    options = {"min_match": min_match, "max_match": min_match + more, "num_tokens": 4}
    drafts, found = repeated(tokens, lengths, **options)
    for i, row in enumerate(rows):
        expected = plain_search(row, **options)
        assert found[i] == (expected is not None)
        if expected is not None:
            assert drafts[i].tolist() == expected


def plain_search(
    row: list[int], *, min_match: int, max_match: int, num_tokens: int
) -> list[int] | None:
    for size in range(max_match, min_match - 1, -1):
        for end in range(len(row) - 1, size - 1, -1):
            if row[end - size : end] == row[len(row) - size :]:
                longer = [*row]
                while len(longer) < len(row) + num_tokens:
                    longer.append(longer[len(longer) - (len(row) - end)])
                return longer[len(row) :]
    return None


class Machine:
    """Passes that take a given time."""

    def __init__(self, plain_s: float, drafted_s: float, tokens_of_drafted: int) -> None:
        self.pace = Pace()
        self.times = {False: plain_s, True: drafted_s}
        self.tokens = {False: 1, True: tokens_of_drafted}
        self.seconds = 0.0
        self.num_tokens = 0

    def run(self, num_tokens: int) -> None:
        end = self.num_tokens + num_tokens
        while self.num_tokens < end:
            drafted = self.pace.drafts(1)
            self.seconds += self.times[drafted]
            self.num_tokens += self.tokens[drafted]
            self.pace.observe(
                1,
                drafted=drafted,
                num_tokens=self.tokens[drafted],
                seconds=self.times[drafted],
            )


@pytest.mark.parametrize(("drafted_s", "tokens"), [(2.0, 1), (5.0, 1), (1.5, 1), (3.0, 2)])
def test_useless_drafts_cost_little(drafted_s: float, tokens: int) -> None:
    machine = Machine(1.0, drafted_s, tokens)
    machine.run(4000)
    assert machine.num_tokens / machine.seconds > 0.97


@pytest.mark.parametrize(("drafted_s", "tokens"), [(1.2, 3), (2.0, 5), (1.05, 2)])
def test_useful_drafts_are_used(drafted_s: float, tokens: int) -> None:
    machine = Machine(1.0, drafted_s, tokens)
    machine.run(4000)
    assert machine.num_tokens / machine.seconds > 0.95 * tokens / drafted_s


def test_the_pace_follows_a_change() -> None:
    machine = Machine(1.0, 2.0, 1)
    machine.run(300)
    machine.tokens[True] = 5  # the completions begin to repeat
    before = machine.seconds
    machine.run(5000)
    assert 5000 / (machine.seconds - before) > 1.8
    machine.tokens[True] = 1
    before = machine.seconds
    machine.run(3000)
    assert 3000 / (machine.seconds - before) > 0.95


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(("drafted_s", "tokens", "best"), [(2.0, 1, 1.0), (1.2, 3, 2.5)])
def test_one_of_the_first_passes_that_was_interrupted_is_soon_forgotten(
    drafted: bool, number: int, drafted_s: float, tokens: int, best: float
) -> None:
    machine = Machine(1.0, drafted_s, tokens)
    seen = 0
    while seen <= number:
        kind = machine.pace.drafts(1)
        seconds = machine.times[kind]
        if kind == drafted:
            seconds *= 1000 if seen == number else 1
            seen += 1
        machine.pace.observe(1, drafted=kind, num_tokens=machine.tokens[kind], seconds=seconds)
    machine.seconds, machine.num_tokens = 0.0, 0
    machine.run(2000)
    assert machine.num_tokens / machine.seconds > 0.94 * best


def test_drafts_that_become_useful_are_used_after_the_next_try() -> None:
    machine = Machine(1.0, 2.0, 1)
    machine.run(20_000)
    machine.tokens[True] = 5
    machine.run(1200)
    before = machine.seconds
    machine.run(2000)
    assert 2000 / (machine.seconds - before) > 2.4


def test_a_pass_that_was_interrupted_hardly_counts() -> None:
    machine = Machine(1.0, 2.0, 1)
    machine.run(100)
    machine.pace.observe(1, drafted=False, num_tokens=1, seconds=1000.0)
    before = machine.seconds
    machine.run(1000)
    assert 1000 / (machine.seconds - before) > 0.97
