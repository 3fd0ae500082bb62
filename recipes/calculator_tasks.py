"""Tasks of the calculator recipe, and examples of both ways to solve them.

There are 100 sums of two digits, `7+5=`, all of which are trained on, and 8,100 products of
two-digit numbers, `37*84=`, of which 400 are held out. Examples answer `12`, or call `[7+5]`, or
answer after the result of a call, `7+5=[7+5]12`. Their answers are right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

CHARACTERS = "0123456789+*=[]"
NUM_HELD_OUT = 400
BATCH = 128


def easy(left: int, right: int) -> dict[str, Any]:
    """Return a sum as a task."""
    return {"question": f"{left}+{right}=", "answer": str(left + right), "hard": False}


def hard(left: int, right: int) -> dict[str, Any]:
    """Return a product as a task."""
    return {"question": f"{left}*{right}=", "answer": str(left * right), "hard": True}


SUMS = [easy(left, right) for left in range(10) for right in range(10)]
PRODUCTS = [hard(left, right) for left in range(10, 100) for right in range(10, 100)]
random.Random("held out").shuffle(PRODUCTS)
HELD_OUT, TRAINED = PRODUCTS[:NUM_HELD_OUT], PRODUCTS[NUM_HELD_OUT:]


def warm_start_batches(seed: int) -> Iterator[list[tuple[str, str]]]:
    """Yield batches of examples, forever."""
    rng = random.Random(seed)
    while True:
        yield [warm_start_example(rng) for _ in range(BATCH)]


def warm_start_example(rng: random.Random) -> tuple[str, str]:
    """Return an answer, a call, or an answer after a call."""
    task = rng.choice(rng.choice([SUMS, TRAINED]))
    question, answer = task["question"], task["answer"]
    call = f"[{question.removesuffix('=')}]"
    direct = question, answer
    return rng.choice([direct, direct, (question, call), (question + call + answer, answer)])


if __name__ == "__main__":
    raise SystemExit(
        "recipes/calculator_tasks.py is part of another recipe. Run `python recipes/calculator.py`."
    )
