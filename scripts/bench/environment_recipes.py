"""Train the recipes of environments as a user would, and report their results.

    python scripts/bench/environment_recipes.py [NAME ...] [--runs-dir runs/environments]

Runs `python recipes/NAME.py` with the recipe's settings, one process after the other. Prints one
line of JSON last: guess_lines, the lines of the environment with its decorator; the result of each
recipe; and NAME_minutes of the whole command. scripts/plot_recipes.py draws the curves of
--runs-dir, by default a temporary directory.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Scripts of this folder have the names of recipes, so the checkout must come first.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.guess import guess
from recipes.kuhn_oracle import FIRST, SECOND, exploitability
from rlsys.runs.observe.metrics_file import read_metrics

ROOT = Path(__file__).resolve().parents[2]

# By recipe: a pattern of its last lines, and the keys of the numbers in it.
PATTERNS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "guess": (
        r"found NUMBER of the numbers, NUMBER with the likeliest guess each time",
        ("guess_found", "guess_found_greedy"),
    ),
    "calculator": (
        r"right: NUMBER; calls the calculator: for NUMBER of the products and NUMBER of the sums; "
        r"right products without it: NUMBER",
        (
            "calculator_right",
            "calculator_hard_with_tool",
            "calculator_easy_with_tool",
            "calculator_hard_without_tool",
        ),
    ),
    "kuhn": (r"exploitability NUMBER", ("kuhn_exploitability",)),
}
NUMBER = r"(-?[0-9.]+[0-9])"

# By recipe: the metric of its progress.
METRICS = {"guess": "found/mean", "calculator": "right/mean"}

# Kuhn poker: number of steps whose recorded games give the strategy of a step.
WINDOW = 20


def lines_of(function: Callable[..., Any]) -> int:
    """Return the number of lines of a function's source without docstring and empty lines."""
    return len([line for line in inspect.getsource(function).splitlines() if line.strip()])


def numbers_of(name: str, output: str) -> dict[str, float]:
    """Return the numbers that a recipe printed.

    Raises:
        ValueError: They are not in the output.
    """
    pattern, keys = PATTERNS[name]
    found = re.search(pattern.replace("NUMBER", NUMBER), output)
    if found is None:
        raise ValueError(f"recipes/{name}.py did not print {pattern!r} but {output[-2000:]}")
    return dict(zip(keys, map(float, found.groups()), strict=True))


def curve_of(name: str, directory: Path) -> list[float]:
    """Return the progress of a run by step.

    It is the fraction of found numbers or right answers, or the exploitability of the recorded
    games.

    Raises:
        OSError: The run does not exist.
    """
    if name in METRICS:
        return [line[METRICS[name]] for line in read_metrics(directory / "metrics.jsonl")]
    with (directory / "rollouts.jsonl").open() as file:
        games = [json.loads(line) for line in file]
    return [
        exploitability(bets_of([game for game in games if end - WINDOW < game["step"] <= end]))
        for end in range(1, max(game["step"] for game in games) + 1)
    ]


def bets_of(games: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the frequency of bets in each information set, ½ for sets that never occurred."""
    asked: Counter[str] = Counter()
    bet: Counter[str] = Counter()
    for game in games:
        first, second = moves_of(game, "first"), moves_of(game, "second")
        hand, other = game["row"]["first"], game["row"]["second"]
        sets = [hand, hand + "pb"], [other + first[:1]]
        for theirs, moves in zip(sets, (first, second), strict=True):
            for one, move in zip(theirs, moves, strict=False):
                asked[one] += 1
                bet[one] += move == "b"
    return {one: bet[one] / asked[one] if asked[one] else 0.5 for one in (*FIRST, *SECOND)}


def moves_of(game: Mapping[str, Any], seat: str) -> str:
    """Return the moves of a seat; an illegal move ended the game."""
    moves = [turn["text"] for turn in game["turns"] if turn["sampled"] and turn["seat"] == seat]
    return "".join(text for text in moves if text in ("p", "b"))


def measured(name: str, runs_dir: Path) -> dict[str, float]:
    """Return the results and the minutes; exit if the recipe fails."""
    start = time.monotonic()
    command = [sys.executable, f"recipes/{name}.py", "--name", name, "--runs-dir", str(runs_dir)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    minutes = (time.monotonic() - start) / 60
    if done.returncode:
        sys.exit(f"error: {name} ended with code {done.returncode}:\n{done.stdout[-2000:]}")
    return numbers_of(name, done.stdout) | {f"{name}_minutes": round(minutes, 2)}


def main() -> None:
    """Run the recipes."""
    parser = argparse.ArgumentParser(description="Train the recipes of environments.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(PATTERNS)}")
    parser.add_argument("--runs-dir", type=Path, help="directory of the runs, to keep them")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in PATTERNS]:
        parser.error(f"{unknown[0]!r} is not a recipe. Use some of {', '.join(PATTERNS)}.")
    found: dict[str, float] = {"guess_lines": lines_of(guess.function)}
    with tempfile.TemporaryDirectory() as directory:
        runs_dir = (given.runs_dir or Path(directory)).resolve()
        for name in given.names or PATTERNS:
            of_recipe = measured(name, runs_dir)
            print(name, json.dumps(of_recipe), file=sys.stderr, flush=True)
            found |= of_recipe
    print(json.dumps(found))


if __name__ == "__main__":
    main()
