"""The math-verify library in a process of its own; run as a script, by math_answer.py alone.

In: on stdin, a line of JSON for each question: [reference, completion, limit in CPU seconds].
Out: on stdout, a line of JSON for each: true, false, or a text that says what is wrong.

A model can write 10^{10^{10}}. Python then computes a power in C, holds the interpreter lock, and
heeds no exception and no thread. So the kernel keeps the limit: the CPU timer's signal has its
default action, which ends the process.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
import signal
import sys
from decimal import Decimal
from typing import Any

from math_verify import parse, verify

ANSWER_MARK = "####"  # as in verifiers.py; this script imports nothing of the package


# Formulas between dollars, in \( \) or \[ \], or in \boxed.
MARKED = re.compile(r"\$|\\[\[(]|\\boxed\b")

# A currency before its number. An escaped dollar is none that begins a formula.
CURRENCY = re.compile(r"(?:\\\$|[\N{EURO SIGN}\N{POUND SIGN}])\s*(?=[-.\d])")

# As Python and C write a float: 5e-05, 1e+22. With fewer digits it may be Euler's number: 2e+1.
SCIENTIFIC = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][-+]\d{2,3}(?!\w|\.\d)")

MIXED = re.compile(r"(?<![\w/.])(\d{1,9}) (\d{1,9})/(\d{1,9})(?![\w/]|\.\d)")  # 1 1/2
ROW_SPACE = re.compile(r"\\\\\[[\d.]+ ?(?:pt|em|ex|mm|cm)\]")  # of a matrix

# A number and the words of its unit: 5 dollars, 36.50 per hour, 12 cm^2.
_WORD = r"[A-Za-z\N{DEGREE SIGN}]+(?:\^\{?\d\}?|[\N{SUPERSCRIPT TWO}\N{SUPERSCRIPT THREE}])?\.?"
WITH_UNIT = re.compile(
    rf"(?P<number>-?\d[\d,]*(?:\.\d+)?(?: ?/ ?\d+)?) ?%?\s+(?P<words>{_WORD}(?:[ /-]+{_WORD})*)"
)
FORMULA_WORD = re.compile(
    r"\b(?:or|and|to|in|mod|pi|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|cup|cap|union|inf|infinity)\b",
    re.IGNORECASE,
)

# Decimal places in which numbers must agree, the most of them, and the least significant digits.
PLACES, MAX_PLACES, MIN_DIGITS = 6, 400, 3


def normalised(text: str) -> str:
    """Return the text with numbers written so that the library reads them as they are meant."""
    text = CURRENCY.sub("", text)
    text = SCIENTIFIC.sub(lambda match: format(Decimal(match[0]), "f"), text)
    text = MIXED.sub(_improper, text)
    return ROW_SPACE.sub(r"\\\\", text)


def _improper(match: re.Match[str]) -> str:
    whole, numerator, denominator = map(int, match.groups())
    return f"{whole * denominator + numerator}/{denominator}" if denominator else match[0]


def forms_of(answer: str) -> list[str]:
    """Return texts in which the library finds the answer, which may be plain or LaTeX."""
    if MARKED.search(ROW_SPACE.sub("", answer)):
        return [answer]
    forms = [f"${answer}$"]
    unit = WITH_UNIT.fullmatch(answer)
    # One letter may be a variable: 5 x.
    if unit and re.search("[A-Za-z]{2}", unit["words"]) and not FORMULA_WORD.search(unit["words"]):
        forms.append(f"${unit['number']}$")
    return forms


@functools.lru_cache(maxsize=1024)
def parse_reference(text: str) -> Any:
    """Return the expressions that count as the answer, empty where the text holds none."""
    answer = normalised(text.rpartition(ANSWER_MARK)[2].strip())
    return [one for form in forms_of(answer) for one in parse(form, parsing_timeout=None)]


def places_of(gold: list[Any]) -> int:
    """Return how many decimal places count: more than usual for an answer close to 0."""
    sizes = [abs(float(one)) for one in gold if getattr(one, "is_Number", False)]
    least = min((size for size in sizes if size > 0), default=1.0)
    zeros = math.ceil(-math.log10(least)) - 1  # behind the decimal point
    return min(MAX_PLACES, max(PLACES, zeros + MIN_DIGITS))


def judge(reference: str, completion: str) -> bool | str:
    """Return whether the completion equals the reference, or what is wrong with the reference."""
    gold = parse_reference(reference)
    if not gold:
        return f"reference {reference!r} holds no mathematical expression"
    # The library's own limits are signals too, which it could not raise inside C either.
    found = parse(normalised(completion), parsing_timeout=None)
    return bool(verify(gold, found, float_rounding=places_of(gold), timeout_seconds=None))


def main() -> None:
    # It warns, on each call, that its own limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    print("ready", flush=True)
    for line in sys.stdin:
        reference, completion, limit_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        verdict = judge(reference, completion)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
