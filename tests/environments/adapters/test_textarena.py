"""Adapter for TextArena, with the real package."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rlsys.environments.adapters.textarena import TextArena
from tests.environments.adapters.scripted import Script
from tests.errors import error_about, invalid

pytest.importorskip("textarena", reason="the extra rlsys[textarena]")

GUESS = TextArena(game="GuessTheNumber-v0")
TOE = TextArena(game="TicTacToe-v0", num_players=2)


def bisecting() -> Script:
    """Return a policy that finds the number by bisection."""
    low, high = 1, 20

    def guess(text: str) -> str:
        nonlocal low, high
        if "higher" in text:
            low = last[0] + 1
        elif "lower" in text:
            high = last[0] - 1
        last[0] = (low + high) // 2
        return f"I say [{last[0]}]."

    last = [0]
    return Script(guess)


def test_a_game_of_one_player() -> None:
    for task in GUESS.tasks(3):
        script = bisecting()
        assert GUESS(script.plain(), task) == 1.0
        assert 1 <= script.num_turns <= 5
        assert not any("I say" in text for text in script.received())  # the player's own moves
        assert script.received()[0] not in "".join(script.received()[1:])


def test_a_seed_determines_a_game_while_others_draw_random_numbers() -> None:
    def moves(task: dict[str, Any]) -> list[str]:
        script = bisecting()
        GUESS(script.plain(), task)
        random.random()
        return script.received()

    tasks = GUESS.tasks(12) * 2
    with ThreadPoolExecutor(4) as pool:
        games = list(pool.map(moves, tasks))
    assert games[:12] == games[12:]
    assert len({len(texts) for texts in games}) > 1


def test_pythons_random_generator_is_not_changed() -> None:
    random.seed(1)
    expected = [random.random() for _ in range(2)]
    random.seed(1)
    first = random.random()
    GUESS(bisecting().plain(), {"seed": 9, "player": 0})
    assert [first, random.random()] == expected


def test_the_policy_plays_both_sides() -> None:
    # The first takes the upper row, the second the middle one.
    script = Script(["0", "3", "1", "4", "2"])
    assert TOE(script.plain(), TOE.tasks(1)[0]) is None
    assert script.seats == ["player_0", "player_1"]
    assert sorted(script.rewards) == [(1, "player_0", 1.0), (2, "player_1", -1.0)]
    assert "[0]" in script.received(2)[0]  # the second has seen the first move
    assert TOE.environment().seats == ("player_0", "player_1")


def test_the_policy_plays_against_an_opponent() -> None:
    def lowest_free(text: str) -> str:
        """Return the first free cell of the board at the end of the text."""
        moves = re.findall(r"\[(\d)\]", text.rpartition("Available Moves")[2])
        return f"[{moves[0]}]"

    game = TextArena(game="TicTacToe-v0", num_players=2, opponent=lowest_free)
    assert game.environment().seats == ("policy",)
    first, second = game.tasks(2)
    assert (first["player"], second["player"]) == (0, 1)
    # Against one who fills from the upper left: the diagonal through 4.
    assert game(Script(["4", "2", "6"]).plain(), first) == 1.0
    assert game(Script(["8", "7", "5"]).plain(), second) == -1.0


def test_an_invalid_move_of_the_opponent_that_ends_the_game_is_an_error() -> None:
    game = TextArena(game="TicTacToe-v0", num_players=2, opponent=lambda text: "[4]")
    with invalid("TextArena('TicTacToe-v0'): opponent", "[4]") as error:
        game(Script(["4"]).plain(), game.tasks(1)[0])
    assert "occupied" in error.value.rule  # the game's own reason
    # The game may allow another try after an invalid move.
    moves = iter(["nonsense", "0", "1", "2"])
    game = TextArena(game="TicTacToe-v0", num_players=2, opponent=lambda text: next(moves))
    assert game(Script(["4", "3", "5"]).plain(), game.tasks(1)[0]) == 1.0


def test_a_game_that_its_limits_end_is_worth_nothing() -> None:
    assert GUESS(Script(["[1]", "[2]"], max_turns=2).plain(), GUESS.tasks(1)[0]) == 0.0
    script = Script(["0", "3"], max_turns=2)
    TOE(script.plain(), TOE.tasks(1)[0])
    assert {value for _, _, value in script.rewards} == {0.0}


def test_an_unknown_game_fails() -> None:
    with error_about(ValueError, "NoSuch-v0"):
        TextArena(game="NoSuch-v0")(Script([]).plain(), {"seed": 0, "player": 0})
