"""Exact solution of Kuhn poker (1950): values and exploitability of strategies.

Three cards, J < Q < K. Two players have a card each, and a chip each in the pot. The first passes
or bets. The second passes, which folds after a bet, or bets, which calls a bet. After pass and bet,
the first passes (folds) or bets (calls). A bet is one chip.

A strategy contains the probability of a bet for each of the twelve information sets, a player's
card and the moves so far: {"J": 0.2, ..., "Kpb": 1.0}. The sets of the second player contain one
move.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

CARDS = "JQK"  # in increasing order
DEALS = tuple(itertools.permutations(CARDS, 2))
FIRST = tuple(card + moves for card in CARDS for moves in ("", "pb"))
SECOND = tuple(card + moves for card in CARDS for moves in ("p", "b"))
ENDS = ("pp", "pbp", "pbb", "bp", "bb")

Strategy = Mapping[str, float]

# Value of the game for the first player in an equilibrium.
VALUE = -1 / 18


def gain(first: str, second: str, moves: str) -> float:
    """Return the chips that the first player wins."""
    if moves == "pbp":
        return -1.0
    if moves == "bp":
        return 1.0
    sign = 1.0 if CARDS.index(first) > CARDS.index(second) else -1.0
    return sign * (2.0 if moves.endswith("b") else 1.0)


def value(strategy: Strategy) -> float:
    """Return the mean gain of the first player if both players use the strategy."""
    return sum(
        _likelihood(strategy, first, second, end) * gain(first, second, end)
        for first, second in DEALS
        for end in ENDS
    ) / len(DEALS)


def exploitability(strategy: Strategy) -> float:
    """Return the mean gain of the best responses of both seats.

    It is 0 at an equilibrium and 11/24 for random bets. A best response is found among all 64 pure
    strategies of a seat.
    """
    as_first = max(value({**strategy, **pure}) for pure in _pure(FIRST))
    as_second = max(-value({**strategy, **pure}) for pure in _pure(SECOND))
    return (as_first + as_second) / 2


def equilibrium(alpha: float) -> Strategy:
    """Return Kuhn's equilibrium for an `alpha` from 0 to 1/3, the probability of a bluff."""
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
