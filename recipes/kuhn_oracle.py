"""Kuhn poker (1950) solved exactly: what a strategy loses against whoever knows it.

Three cards, J < Q < K, two players, a card each, a chip each in the pot. The first passes or bets;
the second passes, which is a fold behind a bet, or bets, which is a call behind one; behind pass
and bet the first passes, a fold, or bets, a call. A bet is one chip.

A strategy says for each of the twelve information sets, a player's card and the moves so far, how
likely a bet is: {"J": 0.2, ..., "Kpb": 1.0}. The second player's sets are those of one move.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

CARDS = "JQK"  # the later one wins
DEALS = tuple(itertools.permutations(CARDS, 2))
FIRST = tuple(card + moves for card in CARDS for moves in ("", "pb"))
SECOND = tuple(card + moves for card in CARDS for moves in ("p", "b"))
ENDS = ("pp", "pbp", "pbb", "bp", "bb")

Strategy = Mapping[str, float]

# Of the first player, where both play an equilibrium.
VALUE = -1 / 18


def gain(first: str, second: str, moves: str) -> float:
    """Chips that the first player wins."""
    if moves == "pbp":
        return -1.0
    if moves == "bp":
        return 1.0
    sign = 1.0 if CARDS.index(first) > CARDS.index(second) else -1.0
    return sign * (2.0 if moves.endswith("b") else 1.0)


def value(strategy: Strategy) -> float:
    """What the first player wins in the mean, where both play as it says."""
    return sum(
        _likelihood(strategy, first, second, end) * gain(first, second, end)
        for first, second in DEALS
        for end in ENDS
    ) / len(DEALS)


def exploitability(strategy: Strategy) -> float:
    """How much the best responses to it win, in the mean of both seats: 0 at an equilibrium, 11/24
    for coins. A best response is found among all 64 pure strategies of a seat.
    """
    as_first = max(value({**strategy, **pure}) for pure in _pure(FIRST))
    as_second = max(-value({**strategy, **pure}) for pure in _pure(SECOND))
    return (as_first + as_second) / 2


def equilibrium(alpha: float) -> Strategy:
    """Kuhn's, for each alpha from 0 to 1/3: how often the first player bluffs with the jack."""
    return {
        **{"J": alpha, "Q": 0.0, "K": 3 * alpha},
        **{"Jpb": 0.0, "Qpb": alpha + 1 / 3, "Kpb": 1.0},
        **{"Jp": 1 / 3, "Qp": 0.0, "Kp": 1.0},
        **{"Jb": 0.0, "Qb": 1 / 3, "Kb": 1.0},
    }


def _likelihood(strategy: Strategy, first: str, second: str, end: str) -> float:
    likelihood = 1.0
    for place, move in enumerate(end):
        card = second if place == 1 else first
        bet = strategy[card + end[:place]]
        likelihood *= bet if move == "b" else 1 - bet
    return likelihood


def _pure(sets: tuple[str, ...]) -> list[dict[str, float]]:
    choices = itertools.product((0.0, 1.0), repeat=len(sets))
    return [dict(zip(sets, one, strict=True)) for one in choices]


if __name__ == "__main__":
    raise SystemExit(
        "recipes/kuhn_oracle.py is a part of another recipe. Run `python recipes/kuhn.py`."
    )
