"""Recipes with environments, played by scripts, and their reports."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rlsys
from recipes import calculator, guess
from recipes.calculator_tasks import (
    CHARACTERS,
    HELD_OUT,
    NUM_HELD_OUT,
    easy,
    hard,
    warm_start_example,
)
from recipes.kuhn_oracle import FIRST, SECOND
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.environments.episode_host import Ended
from rlsys.runs.observe.metrics_file import MetricsWriter
from scripts import plot_recipes
from scripts.bench import environment_recipes
from tests.environments.playing import hosted, played, request
from tests.errors import error_about
from tests.test_contracts import CONFIGS


def plays(environment: Any, policy: Callable[[str], str], characters: str, task: Any) -> Ended:
    async def run() -> Ended:
        host, _ = hosted(environment, policy, characters=characters)
        (ended,) = await played(host, [request(task=task)])
        await host.close()
        return ended

    return run_in_virtual_time(run())


def texts(ended: Ended) -> list[str]:
    assert ended.played is not None, ended.failure
    return [line["text"].removesuffix("<eos>") for line in ended.played.transcript]


# Guessing


def halving(text: str) -> str:
    return guess.DIGITS[(guess.DIGITS.index(text[-1]) + 1) // 2]


def guesses(number: int, policy: Callable[[str], str]) -> Ended:
    return plays(guess.guess, policy, guess.DIGITS + "?", {"number": number})


@pytest.mark.parametrize("number", range(1, guess.LARGEST + 1))
def test_halving_finds_each_number(number: int) -> None:
    ended = guesses(number, halving)
    assert ended.played is not None
    num_turns = len(ended.played.transcript) // 2
    assert num_turns <= 6
    assert ended.played.components == {"halving": num_turns, "found": 1.0}


def test_the_environment_shows_how_many_numbers_are_left() -> None:
    # The tenth of 63 is too small: 53 are left. The 60th of these, 69, does not exist and changes
    # nothing. The seventh is 17 and too large: six are left, from 11 on.
    replies = iter(["a", "Y", "7", "5"])
    ended = guesses(15, lambda text: next(replies))
    left = [guess.DIGITS.index(text) for text in texts(ended)[::2]]
    assert left == [63, 53, 53, 6]
    assert ended.played is not None
    # The middles are 32, 37, 37 and 13.
    assert ended.played.components == pytest.approx(
        {"halving": 1 / 23 + 1 / 34 + 1 / 21 + 1 / 3, "found": 1.0}
    )


def test_an_episode_ends_after_six_turns() -> None:
    ended = guesses(63, lambda text: "1")
    assert ended.played is not None
    assert len(texts(ended)) == 12
    assert ended.played.components["found"] == 0.0


def test_an_empty_guess_ends_the_episode() -> None:
    ended = guesses(1, lambda text: "")
    assert ended.played is not None
    assert ended.played.components == {"final": 0.0}


def test_an_invalid_guess_ends_the_episode() -> None:
    ended = guesses(32, lambda text: "?")
    assert ended.played is not None
    assert ended.played.total == 0.0
    assert ended.played.transcript[-1]["role"] == "ended"


def test_the_environment_has_twelve_lines_at_most() -> None:
    assert environment_recipes.lines_of(guess.guess.function) <= 12


# The calculator

SUM = easy(7, 5)
PRODUCT = hard(37, 84)


def answers(environment: Any, task: Any, *replies: str) -> Ended:
    left = iter(replies)
    ended = plays(environment, lambda text: next(left), CHARACTERS, task)
    assert next(left, None) is None, "not all replies were used"
    return ended


def test_an_answer_is_worth_one_and_a_call_costs() -> None:
    for task, replies, right, calls in (
        (SUM, ["12"], 1.0, 0),
        (SUM, ["13"], 0.0, 0),
        (SUM, ["[7+5]", "12"], 1.0, 1),
        (PRODUCT, ["[37*84]", "3108"], 1.0, 1),
        (PRODUCT, ["[37*84]", "3180"], 0.0, 1),
        (PRODUCT, ["[37*84]", "[3*8]"], 0.0, 2),
        (PRODUCT, ["[37*", "3108"][:1], 0.0, 0),  # not a call but a wrong answer
        (PRODUCT, ["37*84]"], 0.0, 0),
    ):
        ended = answers(calculator.sums_and_products, task, *replies)
        assert ended.played is not None, ended.failure
        assert ended.played.components == {"right": right, "calls": -calculator.COST * calls}


def test_the_result_of_the_tool_is_not_trained_on() -> None:
    ended = answers(calculator.sums_and_products, PRODUCT, "[37*84]", "3108")
    assert texts(ended) == ["37*84=", "[37*84]", "3108", "3108"]
    assert ended.played is not None
    versions = ended.played.trajectory.policy_versions.tolist()
    assert versions == [7] * len("[37*84]e") + [-1] * len("3108") + [7] * len("3108e")


def test_without_the_tool_a_call_has_no_result() -> None:
    alone = calculator.without_tool
    called = answers(alone, PRODUCT, "[37*84]", "3108")
    assert texts(called) == ["37*84=", "[37*84]", "3108"]
    assert called.played is not None
    assert called.played.total == 1.0
    wrong = answers(alone, PRODUCT, "3180")
    assert wrong.played is not None
    assert wrong.played.total == 0.0


def test_the_warm_start_has_both_ways_of_both_kinds_and_no_held_out_task() -> None:
    rng = random.Random(0)
    shown = [warm_start_example(rng) for _ in range(4000)]
    held_out = {task["question"] for task in HELD_OUT}
    assert len(held_out) == NUM_HELD_OUT
    kinds = set()
    for prompt, completion in shown:
        question, _, behind = prompt.partition("=")
        assert question + "=" not in held_out
        left, right = map(int, question.replace("+", "*").split("*"))
        answer = str(left * right if "*" in question else left + right)
        is_call = completion == f"[{question}]"
        assert is_call or completion == answer
        assert behind in ("", f"[{question}]{answer}")
        kinds.add(("*" in question, is_call, bool(behind)))
    assert kinds == {(hard, *way) for hard in (False, True) for way in ((0, 0), (1, 0), (0, 1))}


# Reports


def test_the_benchmark_reads_the_reports_of_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(model: Path, environment: Any, tasks: Any, **how: Any) -> list[Any]:
        """Play fake episodes.

        Half of the numbers are found, all if greedy. Sums are right without a call and products
        with one; without the tool, a fourth of the products is right.
        """
        every = len(tasks) * how.get("num_episodes", 1)
        if environment is guess.guess:
            made = [{"found": float(i % 2 or how.get("greedy", False))} for i in range(2 * every)]
        elif environment is calculator.without_tool:
            made = [{"final": float(i % 4 == 0)} for i in range(every)]
        else:
            cost = -calculator.COST if tasks[0]["hard"] else 0.0
            made = [{"right": 1.0, "calls": cost}] * every
        return [SimpleNamespace(components=one) for one in made]

    monkeypatch.setattr(rlsys, "play", play)
    report = guess.report(Path("hf"), guess.GuessConfig())
    assert environment_recipes.numbers_of("guess", f"much before\n{report}\n") == {
        "guess_found": 0.5,
        "guess_found_greedy": 1.0,
    }
    report = calculator.report(Path("hf"), calculator.CalculatorConfig())
    assert environment_recipes.numbers_of("calculator", report) == {
        "calculator_right": 1.0,
        "calculator_hard_with_tool": 1.0,
        "calculator_easy_with_tool": 0.0,
        "calculator_hard_without_tool": 0.25,
    }
    with error_about(ValueError, "recipes/guess.py"):
        environment_recipes.numbers_of("guess", "nothing")


def game(first: str, second: str, *lines: tuple[str, str]) -> dict[str, Any]:
    """Return a line of rollouts.jsonl from (seat, text); the policy samples moves and <eos>."""
    turns = [
        {"seat": seat, "text": text, "sampled": text in ("p", "b", "<eos>")} for seat, text in lines
    ]
    return {"step": 1, "row": {"first": first, "second": second}, "turns": turns}


def test_a_strategy_is_the_frequency_of_bets() -> None:
    one, other = "first", "second"
    long = game("J", "K", (one, "1J"), (one, "p"), (one, "b"), (one, "p"), (other, "2Kp"))
    long["turns"][2]["sampled"] = False  # text of the environment
    long["turns"].append({"seat": other, "text": "b", "sampled": True})
    short = game("J", "Q", (one, "1J"), (one, "b"), (other, "2Qb"), (other, "b"))
    broken = game("J", "Q", (one, "1J"), (one, "<eos>"))
    found = environment_recipes.bets_of([long, short, broken])
    assert set(found) == {*FIRST, *SECOND}
    expected = {"J": 0.5, "Jpb": 0.0, "Kp": 1.0, "Qb": 1.0}
    assert {one: bet for one, bet in found.items() if one in expected} == expected
    assert {bet for one, bet in found.items() if one not in expected} == {0.5}


def test_curves_are_drawn_from_the_runs_that_exist(tmp_path: Path) -> None:
    for name, metric in environment_recipes.METRICS.items():
        (tmp_path / name).mkdir()
        writer = MetricsWriter(tmp_path / name / "metrics.jsonl")
        for step in (1, 2):
            writer.write({"step": step, metric: step / 2})
        writer.close()
    (tmp_path / "kuhn").mkdir()
    coins = [json.dumps({**game("J", "K"), "step": step}) for step in (1, 2, 3)]
    (tmp_path / "kuhn" / "rollouts.jsonl").write_text("\n".join(coins) + "\n")
    found = plot_recipes.curves(tmp_path)
    assert {name: curve for name, (curve, _) in found.items()} == {
        "guess": [0.5, 1.0],
        "calculator": [0.5, 1.0],
        "kuhn": pytest.approx([11 / 24] * 3),
    }
    assert found["guess"][1] == "0.50 to 1.00 (found)"


@pytest.mark.parametrize("name", environment_recipes.PATTERNS)
def test_a_recipe_with_an_environment_has_its_own_directory(name: str) -> None:
    assert CONFIGS[f"{name}.py"]().name == name
