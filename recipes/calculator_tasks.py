"""The calculator's tasks, and a teacher who shows both ways of doing them.

Sums of two digits, `7+5=`: 100 of them, all of which are shown and trained on. Products of two
numbers of two digits, `37*84=`: 8,100, of which 400 are held out. The teacher answers `12` or
calls, `[7+5]`, and shows what to say behind the result, `7+5=[7+5]12`; its answers are right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

CHARACTERS = "0123456789+*=[]"
NUM_HELD_OUT = 400
BATCH = 128


def easy(left: int, right: int) -> dict[str, Any]:
    return {"question": f"{left}+{right}=", "answer": str(left + right), "hard": False}


def hard(left: int, right: int) -> dict[str, Any]:
    return {"question": f"{left}*{right}=", "answer": str(left * right), "hard": True}


SUMS = [easy(left, right) for left in range(10) for right in range(10)]
PRODUCTS = [hard(left, right) for left in range(10, 100) for right in range(10, 100)]
random.Random("held out").shuffle(PRODUCTS)
HELD_OUT, TRAINED = PRODUCTS[:NUM_HELD_OUT], PRODUCTS[NUM_HELD_OUT:]


def lessons(seed: int) -> Iterator[list[tuple[str, str]]]:
    """Batches of what the teacher shows: an answer, a call, or what to answer behind a call."""
    rng = random.Random(seed)
    while True:
        yield [lesson(rng) for _ in range(BATCH)]


def lesson(rng: random.Random) -> tuple[str, str]:
    task = rng.choice(rng.choice([SUMS, TRAINED]))
    question, answer = task["question"], task["answer"]
    call = f"[{question.removesuffix('=')}]"
    by_itself = question, answer
    return rng.choice([by_itself, by_itself, (question, call), (question + call + answer, answer)])


if __name__ == "__main__":
    raise SystemExit(
        "recipes/calculator_tasks.py is a part of another recipe. Run "
        "`python recipes/calculator.py`."
    )
