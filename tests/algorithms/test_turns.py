from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algorithms.advantages import (
    dr_grpo_advantage,
    reinforce_plus_plus_baseline_advantage,
    rloo_advantage,
)
from rlsys.algorithms.turn_credit import turn_advantage, turn_batch_advantage, turn_mean_advantage
from tests.errors import invalid
from tests.tiers import examples

# Of each turn its number of tokens, its reward and whose it is; between turns stands a token that
# nobody sampled.
Turn = tuple[int, float, int]


def columns_of(
    rollouts: Sequence[Sequence[Turn]], group_index: Sequence[int], *, seats: bool = False
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """What a function over the step is given, by position and by name."""
    rewards: list[float] = []
    turns: list[int] = []
    whose: list[int] = []
    lengths = []
    for rollout in rollouts:
        start = len(turns)
        for number, (num_tokens, reward, seat) in enumerate(rollout):
            rewards += [*[0.0] * (num_tokens - 1), reward, 0.0]
            turns += [*[number] * num_tokens, -1]
            whose += [*[seat] * num_tokens, 0]
        lengths.append(len(turns) - start)
    given = (torch.tensor(rewards, dtype=torch.float64), torch.tensor(turns, dtype=torch.int32))
    facts = {
        "row_offsets": torch.tensor([0, *lengths]).cumsum(0),
        "group_index": torch.tensor(group_index),
        "loss_mask": torch.tensor(turns) >= 0,
    }
    return (*given, torch.tensor(whose, dtype=torch.int32))[: 3 if seats else 2], facts


def of_turns(function: Callable[..., torch.Tensor], *given: Any, **options: Any) -> list[float]:
    """The advantage of every turn, in order; it is the same at all of its tokens, 0 at others."""
    columns, facts = columns_of(*given, seats=options.pop("seats", False))
    advantages = function(*columns, **facts, **options)
    found: list[float] = []
    last = -1
    for turn, advantage in zip(columns[1].tolist(), advantages.tolist(), strict=True):
        if turn < 0:
            assert advantage == 0.0
        elif turn == last:
            assert advantage == found[-1]
        else:
            found.append(advantage)
        last = turn
    return found


# Returns 0.8 and 0.4.
BY_HAND = [[(2, -0.1, 0), (1, -0.1, 0), (1, 1.0, 0)], [(2, 0.4, 0)]]


@pytest.mark.parametrize(
    ("function", "discount", "expected"),
    [
        # 0.8 − 0.4, 0.9 − 0.4, 1 − 0.4 | 0.4 − 0.8.
        (turn_advantage, 1.0, [0.4, 0.5, 0.6, -0.4]),
        # Returns of turns 1, −0.1 + ½, −0.1 + 0.2; of the rollouts 0.1 and 0.4.
        (turn_advantage, 0.5, [-0.3, 0.0, 0.6, 0.3]),
        (turn_mean_advantage, 1.0, [0.2, 0.3, 0.4, -0.2]),
        (turn_mean_advantage, 0.5, [-0.15, 0.15, 0.75, 0.15]),
        # √((0.04 + 0.09 + 0.16 + 0.04)/3) = √0.11.
        (turn_batch_advantage, 1.0, [x / (0.11**0.5 + 1e-4) for x in (0.2, 0.3, 0.4, -0.2)]),
    ],
)
def test_three_turns_and_one_by_hand(
    function: Callable[..., torch.Tensor], discount: float, expected: list[float]
) -> None:
    assert of_turns(function, BY_HAND, [0, 0], discount=discount) == pytest.approx(expected)


def test_a_seat_is_compared_with_the_same_seat() -> None:
    """Seat 0 earns 1 + 2 and 5, seat 1 earns −1 and 4; the fourth turn comes a turn later."""
    rollouts = [
        [(1, 1.0, 0), (2, -1.0, 1), (1, 2.0, 0)],
        [(2, 5.0, 0), (1, 4.0, 1)],
    ]
    found = of_turns(turn_advantage, rollouts, [0, 0], seats=True)
    assert found == pytest.approx([3 - 5, -1 - 4, 2 - 5, 5 - 3, 4 - -1])
    # Between the two turns of seat 0 there is one of seat 1.
    found = of_turns(turn_advantage, rollouts, [0, 0], seats=True, discount=0.5)
    assert found == pytest.approx([1.5 - 5, -1 - 4, 2 - 5, 5 - 1.5, 4 - -1])


def test_a_seat_that_acts_in_one_rollout_alone_has_nothing_to_be_compared_with() -> None:
    rollouts = [[(1, 1.0, 0), (1, 7.0, 1)], [(1, 3.0, 0)]]
    assert of_turns(turn_advantage, rollouts, [0, 0], seats=True) == [-2.0, 0.0, 2.0]
    assert of_turns(turn_advantage, rollouts, [0, 1]) == [0.0, 0.0, 0.0]


def test_what_is_not_trained_on_counts_nowhere() -> None:
    rollouts = [[(1, 1.0, 0)], [(2, 3.0, 0)], [(1, 100.0, 0)]]
    columns, facts = columns_of(rollouts, [0, 0, 0])
    facts["loss_mask"][-2:] = False
    found = turn_advantage(*columns, **facts)
    assert found.tolist() == [-2.0, 0.0, 2.0, 2.0, 0.0, 0.0, 0.0]


def test_no_tokens_at_all() -> None:
    columns, facts = columns_of([[], []], [0, 0])
    for function in (turn_advantage, turn_mean_advantage, turn_batch_advantage):
        assert function(*columns, **facts).shape == (0,)


groups = st.lists(
    st.lists(
        st.lists(
            st.tuples(st.integers(1, 3), st.integers(-8, 8).map(lambda n: n / 4), st.just(0)),
            min_size=1,
            max_size=4,
        ),
        min_size=2,
        max_size=4,
    ),
    min_size=1,
    max_size=3,
)


def _flat(
    groups: Sequence[Sequence[Sequence[Turn]]],
) -> tuple[list[Sequence[Turn]], list[int]]:
    rollouts = [rollout for group in groups for rollout in group]
    return rollouts, [number for number, group in enumerate(groups) for _ in group]


@given(groups=groups)
def test_one_turn_is_what_whole_rollouts_have(groups: list[list[list[Turn]]]) -> None:
    rollouts, index = _flat([[rollout[:1] for rollout in group] for group in groups])
    rewards = torch.tensor([turn[0][1] for turn in rollouts], dtype=torch.float64)
    sizes = [len(group) for group in groups]
    for function, of_group in (
        (turn_advantage, rloo_advantage),
        (turn_mean_advantage, dr_grpo_advantage),
    ):
        expected = torch.cat([of_group(part) for part in rewards.split(sizes)])
        assert of_turns(function, rollouts, index) == pytest.approx(expected.tolist(), abs=1e-12)
    expected = reinforce_plus_plus_baseline_advantage(rewards, torch.tensor(index))
    found = of_turns(turn_batch_advantage, rollouts, index)
    assert found == pytest.approx(expected.tolist(), abs=1e-9)


@given(groups=groups, discount=st.sampled_from([0.0, 0.5, 1.0]))
def test_each_turn_by_its_definition(groups: list[list[list[Turn]]], discount: float) -> None:
    def returns(rollout: Sequence[Turn]) -> list[float]:
        rewards = [reward for _, reward, _ in rollout]
        return [
            sum(discount**j * reward for j, reward in enumerate(rewards[k:]))
            for k in range(len(rewards))
        ]

    expected = []
    for group in groups:
        of_rollouts = [returns(rollout) for rollout in group]
        for number, own in enumerate(of_rollouts):
            others = [one[0] for i, one in enumerate(of_rollouts) if i != number]
            expected += [value - sum(others) / len(others) for value in own]
    found = of_turns(turn_advantage, *_flat(groups), discount=discount)
    assert found == pytest.approx(expected, abs=1e-12)


def test_equal_returns_leave_exactly_nothing() -> None:
    rollouts = [[(1, 0.1, 0)], [(2, 0.1, 0)], [(3, 0.1, 0)]]
    for function in (turn_advantage, turn_mean_advantage, turn_batch_advantage):
        assert of_turns(function, rollouts, [0] * 3) == [0.0] * 3


def test_a_reward_at_a_token_of_no_turn_is_refused() -> None:
    columns, facts = columns_of(BY_HAND, [0, 0])
    columns[0][2] = 1.0
    with invalid("turn_rewards"):
        turn_advantage(*columns, **facts)
    with invalid("discount", 1.5):
        turn_advantage(*columns, **facts, discount=1.5)


# An episode of at most two turns, in each of which the policy stops (0) or goes on in one of two
# ways: the episodes there are, as the actions of their turns. A state is what was done so far.
EPISODES: list[tuple[int, ...]] = [(0,), *itertools.product((1, 2), (0, 1, 2))]
STATES: list[tuple[int, ...]] = [(), (1,), (2,)]


def _decisions(episode: tuple[int, ...]) -> list[tuple[int, int]]:
    """State and action of each turn."""
    return [(STATES.index(episode[:k]), action) for k, action in enumerate(episode)]


def _expected_gradient(
    function: Callable[..., torch.Tensor],
    logits: torch.Tensor,
    rewards: torch.Tensor,
    group_size: int,
    discount: float = 1.0,
) -> torch.Tensor:
    """Over all groups that there can be, weighted by how likely they are, of the sum over an
    episode's turns of the advantage times the log-probability: [states, actions]."""
    logprobs = torch.log_softmax(logits, -1)
    each = [
        sum((logprobs[state, action] for state, action in _decisions(one)), logits.new_zeros(()))
        for one in EPISODES
    ]
    groups = list(itertools.product(range(len(EPISODES)), repeat=group_size))
    rollouts = [
        [(1 + state, float(rewards[state, action]), 0) for state, action in _decisions(EPISODES[i])]
        for group in groups
        for i in group
    ]
    index = [number for number in range(len(groups)) for _ in range(group_size)]
    advantages = iter(of_turns(function, rollouts, index, discount=discount))
    total = logits.new_zeros(())
    for group in groups:
        chance = sum((each[i] for i in group), logits.new_zeros(())).exp().detach()
        for i in group:
            for state, action in _decisions(EPISODES[i]):
                total = total + chance * next(advantages) * logprobs[state, action] / group_size
    (gradient,) = torch.autograd.grad(total, logits)
    return gradient


tables = st.lists(st.floats(-2, 2), min_size=9, max_size=9).map(
    lambda numbers: torch.tensor(numbers, dtype=torch.float64).reshape(3, 3)
)


@settings(max_examples=examples(40))
@given(logits=tables, rewards=tables, group_size=st.sampled_from([2, 3]))
def test_over_all_groups_it_is_the_policy_gradient(
    logits: torch.Tensor, rewards: torch.Tensor, group_size: int
) -> None:
    logits = logits.requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    value = logits.new_zeros(())
    for episode in EPISODES:
        taken = _decisions(episode)
        chance = sum((logprobs[one] for one in taken), logits.new_zeros(())).exp()
        value = value + chance * sum(float(rewards[one]) for one in taken)
    (exact,) = torch.autograd.grad(value, logits)
    found = _expected_gradient(turn_advantage, logits, rewards, group_size)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)
    # The group's mean knows of the episode: less by a factor, and by the same for each turn.
    found = _expected_gradient(turn_mean_advantage, logits, rewards, group_size)
    factor = (group_size - 1) / group_size
    torch.testing.assert_close(found, factor * exact, rtol=1e-9, atol=1e-12)


@settings(max_examples=examples(40))
@given(logits=tables, rewards=tables)
def test_with_a_discount_the_baseline_changes_nothing_in_the_mean(
    logits: torch.Tensor, rewards: torch.Tensor
) -> None:
    def without_baseline(
        turn_rewards: torch.Tensor, turns: torch.Tensor, discount: float, **facts: torch.Tensor
    ) -> torch.Tensor:
        """Alone in a group of other episodes that earn nothing."""
        advantages = torch.zeros_like(turn_rewards)
        offsets = facts["row_offsets"].tolist()
        for start, end in itertools.pairwise(offsets):
            own = turns[start:end]
            for place in range(start, end):
                later = own - turns[place]
                counts = (later >= 0) & (own >= 0)
                weights = torch.where(counts, discount ** later.clamp(min=0).double(), 0.0)
                if turns[place] >= 0:
                    advantages[place] = (weights * turn_rewards[start:end]).sum()
        return advantages

    logits = logits.requires_grad_()
    exact = _expected_gradient(without_baseline, logits, rewards, 2, discount=0.5)
    found = _expected_gradient(turn_advantage, logits, rewards, 2, discount=0.5)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)


@given(
    logits=st.lists(st.floats(-2, 2), min_size=6, max_size=6),
    payoffs=st.lists(st.floats(-2, 2), min_size=8, max_size=8),
)
def test_in_a_game_each_seat_follows_its_own_payoff(
    logits: list[float], payoffs: list[float]
) -> None:
    """Seat 0 moves, seat 1 sees it and moves; each earns by both moves."""
    of_first = torch.tensor(logits[:2], dtype=torch.float64, requires_grad=True)
    of_second = torch.tensor(logits[2:], dtype=torch.float64).reshape(2, 2).requires_grad_()
    payoff = torch.tensor(payoffs, dtype=torch.float64).reshape(2, 2, 2)  # seat, moves
    first, second = torch.log_softmax(of_first, -1), torch.log_softmax(of_second, -1)
    games = list(itertools.product((0, 1), (0, 1)))
    chances = {game: (first[game[0]] + second[game]).exp() for game in games}
    likely = torch.stack([chances[game] for game in games])
    values = [(likely * payoff[seat].flatten()).sum() for seat in (0, 1)]
    exact = [
        torch.autograd.grad(value, theta, retain_graph=True)[0]
        for value, theta in zip(values, (of_first, of_second), strict=True)
    ]
    pairs = list(itertools.product(games, games))
    rollouts = [
        [(1, float(payoff[0][game]), 0), (2, float(payoff[1][game]), 1)]
        for pair in pairs
        for game in pair
    ]
    index = [number for number in range(len(pairs)) for _ in range(2)]
    advantages = iter(of_turns(turn_advantage, rollouts, index, seats=True))
    total = torch.zeros((), dtype=torch.float64)
    for pair in pairs:
        chance = (chances[pair[0]] * chances[pair[1]]).detach()
        for game in pair:
            total = total + chance * next(advantages) * first[game[0]] / 2
            total = total + chance * next(advantages) * second[game] / 2
    found = torch.autograd.grad(total, (of_first, of_second))
    for one, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-12)
