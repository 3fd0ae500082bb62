"""Games of TextArena, the real package."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rlsys.environments.adapters.textarena import TextArena
from tests.environments.adapters.scripted import Script

pytest.importorskip("textarena", reason="the extra rlsys[textarena]")

GUESS = TextArena(game="GuessTheNumber-v0")
TOE = TextArena(game="TicTacToe-v0", num_players=2)


def bisecting() -> Script:
    """Finds the number by halving what the game has told is left."""
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
        assert not any("I say" in text for text in script.told())  # his own moves, he knows
        assert script.told()[0] not in "".join(script.told()[1:])


def test_a_seed_makes_a_game_though_others_draw_meanwhile() -> None:
    def moves(task: dict[str, Any]) -> list[str]:
        script = bisecting()
        GUESS(script.plain(), task)
        random.random()
        return script.told()

    tasks = GUESS.tasks(12) * 2
    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(moves, tasks))
    assert told[:12] == told[12:]
    assert len({len(texts) for texts in told}) > 1


def test_the_others_draws_are_left_alone() -> None:
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
    assert "[0]" in script.told(2)[0]  # the second has seen the first move
    assert TOE.environment().seats == ("player_0", "player_1")


def test_the_policy_plays_against_an_opponent() -> None:
    def lowest_free(text: str) -> str:
        """What the board at the end of the text offers first."""
        moves = re.findall(r"\[(\d)\]", text.rpartition("Available Moves")[2])
        return f"[{moves[0]}]"

    game = TextArena(game="TicTacToe-v0", num_players=2, opponent=lowest_free)
    assert game.environment().seats == ("policy",)
    first, second = game.tasks(2)
    assert (first["player"], second["player"]) == (0, 1)
    # Against one who fills from the upper left: the diagonal through 4.
    assert game(Script(["4", "2", "6"]).plain(), first) == 1.0
    assert game(Script(["8", "7", "5"]).plain(), second) == -1.0


def test_a_game_that_an_opponent_ends_by_a_refused_move_says_why() -> None:
    """The policy has won nothing by it."""
    game = TextArena(game="TicTacToe-v0", num_players=2, opponent=lambda text: "[4]")
    with pytest.raises(ValueError, match="occupied") as error:
        game(Script(["4"]).plain(), game.tasks(1)[0])
    assert "TicTacToe-v0" in str(error.value)
    assert "'[4]'" in str(error.value)
    # One that the game lets it take back, it may.
    moves = iter(["nonsense", "0", "1", "2"])
    game = TextArena(game="TicTacToe-v0", num_players=2, opponent=lambda text: next(moves))
    assert game(Script(["4", "3", "5"]).plain(), game.tasks(1)[0]) == 1.0


def test_a_game_that_its_limits_end_is_worth_nothing() -> None:
    assert GUESS(Script(["[1]", "[2]"], max_turns=2).plain(), GUESS.tasks(1)[0]) == 0.0
    script = Script(["0", "3"], max_turns=2)
    TOE(script.plain(), TOE.tasks(1)[0])
    assert {value for _, _, value in script.rewards} == {0.0}


def test_an_unknown_game_fails() -> None:
    with pytest.raises(ValueError, match="NoSuch-v0"):
        TextArena(game="NoSuch-v0")(Script([]).plain(), {"seed": 0, "player": 0})
