"""The micro-batch plan: each row once, within the budget, balanced, with few repeated prompts."""

from __future__ import annotations

import random
from collections import Counter
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.dataflow.scheduling.microbatch_plan import (
    Budget,
    GroupLengths,
    RowPlace,
    plan_micro_batches,
)


def group(prompt: int, *completions: int) -> GroupLengths:
    return GroupLengths(prompt=prompt, completions=completions)


def num_tokens(groups: list[GroupLengths], rows: list[RowPlace]) -> int:
    prompts = sum(groups[number].prompt for number in {number for number, _ in rows})
    return prompts + sum(groups[number].completions[row] for number, row in rows)


def cost(groups: list[GroupLengths], rows: list[RowPlace], budget: Budget) -> float:
    prompts = [groups[number].prompt for number in {number for number, _ in rows}]
    of_rows = (budget.cost(groups[n].prompt, groups[n].completions[row]) for n, row in rows)
    return sum(budget.cost(0, prompt) for prompt in prompts) + sum(of_rows)


def test_cost_by_hand() -> None:
    budget = Budget(num_ranks=1, max_tokens=100, attention_tokens=10)
    # Four tokens behind six others: half of them see one more than the half before, 8 on average.
    assert budget.cost(6, 4) == 4 * (1 + 8 / 10)


def test_groups_stay_whole_where_that_is_even() -> None:
    groups = [group(10, 5, 5), group(10, 5, 5), group(10, 5, 5), group(10, 5, 5)]
    budget = Budget(num_ranks=2, max_tokens=40, attention_tokens=1e9)
    [shares] = plan_micro_batches(groups, budget)
    assert [len({number for number, _ in rows}) for rows in shares] == [2, 2]


def test_a_group_is_cut_where_a_rank_would_wait() -> None:
    budget = Budget(num_ranks=2, max_tokens=1000, attention_tokens=1e9)
    [shares] = plan_micro_batches([group(10, 50, 50, 50, 50)], budget)
    assert [num_tokens([group(10, 50, 50, 50, 50)], rows) for rows in shares] == [110, 110]
    # But not where that computes long prompts again for little.
    groups = [group(200, 5, 4), group(200, 5, 5), group(200, 5, 6), group(200, 5, 5)]
    [shares] = plan_micro_batches(groups, budget)
    assert [len({number for number, _ in rows}) for rows in shares] == [2, 2]


def test_whole_groups_are_never_cut() -> None:
    groups = [group(4, 30, 30), group(4, 8, 8)]
    budget = Budget(num_ranks=2, max_tokens=20, attention_tokens=1e9)
    passes = plan_micro_batches(groups, budget, whole_groups=True)
    assert passes == [[[(0, 0), (0, 1)], [(1, 0), (1, 1)]]]


lengths = st.builds(
    lambda prompt, completions: group(prompt, *completions),
    st.integers(1, 30),
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
)


@given(
    groups=st.lists(lengths, min_size=1, max_size=12),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(1, 120),
    whole_groups=st.booleans(),
)
def test_each_row_once_and_within_the_budget(
    groups: list[GroupLengths], num_ranks: int, max_tokens: int, whole_groups: bool
) -> None:
    budget = Budget(num_ranks=num_ranks, max_tokens=max_tokens, attention_tokens=50)
    passes = plan_micro_batches(groups, budget, whole_groups=whole_groups)
    found = Counter(row for shares in passes for rows in shares for row in rows)
    wanted = [(n, row) for n, one in enumerate(groups) for row in range(len(one.completions))]
    assert found == Counter(wanted)
    assert all(len(shares) == num_ranks for shares in passes)
    for rows in (rows for shares in passes for rows in shares):
        alone = len({number for number, _ in rows}) == 1 if whole_groups else len(rows) == 1
        assert num_tokens(groups, rows) <= max_tokens or alone
    heaviest = [max(cost(groups, rows, budget) for rows in shares) for shares in passes]
    # Costs are sums, which the order of their rows rounds.
    assert heaviest == pytest.approx(sorted(heaviest, reverse=True))
    assert passes == plan_micro_batches(groups, budget, whole_groups=whole_groups)


@pytest.mark.parametrize("num_ranks", [1, 4, 8])
@pytest.mark.parametrize("group_tokens", [16_000, 32_000, 128_000])
def test_ranks_wait_little_for_each_other(group_tokens: int, num_ranks: int) -> None:
    """Per micro-batch, with completions of very different lengths."""
    chance = random.Random(group_tokens + num_ranks)
    groups = [
        group(512, *(int(group_tokens / 8 * chance.lognormvariate(-0.125, 0.5)) for _ in range(8)))
        for _ in range(32)
    ]
    budget = Budget(num_ranks=num_ranks, max_tokens=16_384, attention_tokens=12_000)
    costs = [
        [cost(groups, rows, budget) for rows in shares]
        for shares in plan_micro_batches(groups, budget)
    ]
    assert sum(map(fmean, costs)) >= 0.9 * sum(map(max, costs))
    everything = [(n, row) for n in range(32) for row in range(8)]
    assert sum(map(sum, costs)) <= 1.1 * cost(groups, everything, budget)
