"""Kuhn poker: the exact solution against a brute force, and the endings of the environment."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlsys
from recipes.kuhn import KuhnConfig, graph, kuhn, strategy_of, tasks
from recipes.kuhn_oracle import (
    DEALS,
    ENDS,
    FIRST,
    SECOND,
    VALUE,
    Strategy,
    equilibrium,
    exploitability,
    gain,
    value,
)
from rlsys import RolloutConfig, SamplingConfig
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.dataflow.graph.stages import PlayStage
from rlsys.environments.episode_host import Ended
from rlsys.launcher.tiny_models import build_tiny_model
from tests.environments.playing import hosted, played, request

SETS = (*FIRST, *SECOND)
STRATEGIES = st.lists(
    st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1)), min_size=12, max_size=12
).map(lambda bets: dict(zip(SETS, bets, strict=True)))

# The rules again, as a table: the amount for the first player, where the sign of a showdown is that
# of the higher card.
SHOWDOWN = {"pp": 1, "pbb": 2, "bb": 2}
FOLD = {"pbp": -1, "bp": 1}


def chips(first: str, second: str, moves: str) -> int:
    wins = 1 if "JQK".index(first) > "JQK".index(second) else -1
    return FOLD[moves] if moves in FOLD else wins * SHOWDOWN[moves]


def likelihood(strategy: Strategy, card: str, at: Iterable[tuple[str, str]]) -> Fraction:
    """Return the likelihood of one player's moves, each with the moves before it."""
    result = Fraction(1)
    for before, move in at:
        bet = Fraction(strategy[card + before])
        result *= bet if move == "b" else 1 - bet
    return result


def best_response(strategy: Strategy, sets: tuple[str, ...]) -> Fraction:
    """Return the value of the best response of a player with these information sets.

    Backward induction: each set takes the move with the higher value, later sets first.
    """
    is_first = sets is FIRST
    mine: dict[str, str] = {}

    def value_of(one: str, move: str) -> Fraction:
        """Return the value of a move: the mean over hidden cards and the other's moves."""
        card, before = one[0], one[1:]
        total = Fraction(0)
        for other, end in itertools.product(set("JQK") - {card}, ENDS):
            if not end.startswith(before + move):
                continue
            later = end[len(before) + 1 :]
            if is_first and before == "" and len(later) == 2 and mine[card + "pb"] != later[1]:
                continue
            theirs = [(end[:at], end[at]) for at in range(len(end)) if (at == 1) is is_first]
            deal = (card, other) if is_first else (other, card)
            sign = 1 if is_first else -1
            total += likelihood(strategy, other, theirs) * sign * chips(*deal, end)
        return total / 6

    total = Fraction(0)
    for one in sorted(sets, key=len, reverse=True):
        of_moves = {move: value_of(one, move) for move in "pb"}
        mine[one] = max(of_moves, key=lambda move: of_moves[move])
        if len(one) == (1 if is_first else 2):  # the first moves of the player
            total += of_moves[mine[one]]
    return total


def test_every_ending_pays_what_the_rules_say() -> None:
    for (first, second), end in itertools.product(DEALS, ENDS):
        assert gain(first, second, end) == chips(first, second, end)


@pytest.mark.parametrize("alpha", [Fraction(0), Fraction(1, 6), Fraction(1, 4), Fraction(1, 3)])
def test_kuhns_equilibria_are_not_exploitable(alpha: Fraction) -> None:
    strategy = equilibrium(float(alpha))
    assert value(strategy) == pytest.approx(VALUE, abs=1e-12)
    assert exploitability(strategy) == pytest.approx(0.0, abs=1e-12)


def test_too_many_bluffs_are_exploitable() -> None:
    assert exploitability({**equilibrium(1 / 3), "J": 0.4}) > 0.01


def test_the_exploitability_of_random_bets_is_eleven_of_twenty_four() -> None:
    coins = dict.fromkeys(SETS, 0.5)
    by_hand = (best_response(coins, FIRST) + best_response(coins, SECOND)) / 2
    assert by_hand == Fraction(11, 24)
    assert exploitability(coins) == pytest.approx(11 / 24)
    assert value(coins) == pytest.approx(1 / 8)  # the second player folds half of all hands


@given(STRATEGIES)
def test_exploitability_is_the_gain_of_best_responses(strategy: Strategy) -> None:
    found = exploitability(strategy)
    wins = (best_response(strategy, FIRST) + best_response(strategy, SECOND)) / 2
    assert found == pytest.approx(float(wins), abs=1e-9)
    assert found >= -1e-12


@given(STRATEGIES, st.sampled_from(SETS), st.floats(0, 1))
def test_no_change_of_a_seat_wins_more_than_the_best_response(
    strategy: Strategy, where: str, bet: float
) -> None:
    sets = FIRST if where in FIRST else SECOND
    sign = 1 if where in FIRST else -1
    changed = {**strategy, where: bet}
    assert sign * value(changed) <= float(best_response(strategy, sets)) + 1e-9


def plays(first: str, second: str, moves: str, asked: list[str] | None = None) -> Ended:
    """Play one game in which the policy of both seats makes these moves."""
    replies = iter(moves)
    asked = [] if asked is None else asked

    def says(text: str) -> str:
        asked.append(text)
        return next(replies)

    async def run() -> Ended:
        host, _ = hosted(kuhn, says, characters="12JQKpbx")
        (ended,) = await played(host, [request(task={"first": first, "second": second})])
        return ended

    ended = run_in_virtual_time(run())
    assert next(replies, None) is None, f"asked {asked}, not for all of {moves}"
    return ended


def of_seats(ended: Ended) -> dict[str, float]:
    assert ended.played is not None, ended.failure
    assert ended.played.total == 0.0
    return dict(ended.played.components)


@pytest.mark.parametrize(
    ("moves", "won"), [("pp", -1), ("pbp", -1), ("pbb", -2), ("bp", 1), ("bb", -2)]
)
def test_each_ending_is_worth_its_chips_to_both_seats(moves: str, won: float) -> None:
    # The first player has the queen, the second the king.
    assert of_seats(plays("Q", "K", moves)) == {"first": won, "second": -won}


def test_each_seat_sees_its_card_and_the_moves() -> None:
    asked: list[str] = []
    ended = plays("J", "K", "pbb", asked)
    assert ended.played is not None
    assert asked == ["1J", "2Kp", "1Jpb"]  # like the prompts of strategy_of
    texts = [(line["role"], line["text"]) for line in ended.played.transcript]
    assert texts == [
        ("user", "1J"),
        ("assistant", "p"),
        ("user", "b"),
        ("assistant", "b"),
        ("user", "2Kp"),
        ("assistant", "b"),
    ]
    rewards = ended.played.trajectory.turn_rewards
    assert sorted(rewards[rewards != 0].tolist()) == [-2.0, 2.0]


@pytest.mark.slow
def test_strategy_of_agrees_with_sampled_games(tmp_path: Path) -> None:
    # For a model with random weights: its computed and its sampled bets.
    build_tiny_model(tmp_path, characters="12JQKpb", width=16, num_layers=1, max_context=64)
    strategy = strategy_of(tmp_path)
    assert list(strategy) == [*FIRST, *SECOND]
    rollout = RolloutConfig(max_running=256, kv_cache_gib=0.01)
    sampling = SamplingConfig(max_tokens=12)
    games = rlsys.play(
        tmp_path,
        kuhn,
        tasks(),
        sampling=sampling,
        rollout=rollout,
        num_episodes=500,
        max_prompt_tokens=8,
    )
    for number, task in enumerate(tasks()):
        mine = games[500 * number : 500 * (number + 1)]
        moves = [one.transcript[1]["text"] for one in mine]
        bets, num = moves.count("b"), moves.count("b") + moves.count("p")
        expected = strategy[task["first"]]
        assert num > 20
        assert abs(bets / num - expected) < 5 * (expected * (1 - expected) / num) ** 0.5


def test_the_graph_is_valid() -> None:
    flow = graph(KuhnConfig())
    flow.check()
    assert flow.all(PlayStage)[0].environment is kuhn


@pytest.mark.parametrize("moves", ["x", "px", "pbx"])
def test_an_invalid_move_costs_more_than_any_game(moves: str) -> None:
    ended = plays("J", "K", moves)
    assert ended.played is not None
    assert ended.played.components == {"final": -3.0}
    rewards = ended.played.trajectory.turn_rewards
    assert rewards.sum() == -3.0
