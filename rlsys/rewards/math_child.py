"""The math-verify library in its own process. Only math_answer.py runs this script.

In: on stdin, a line of JSON for each question: [reference, completion, limit in CPU seconds].
Out: on stdout, a line of JSON for each: true, false, or the error as a text.

A model can write 10^{10^{10}}. Python then computes a power in C and holds the interpreter lock, so
neither an exception nor another thread can interrupt it. The kernel enforces the limit instead: the
CPU timer's signal has its default action, which ends the process.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
import reprlib
import signal
import sys
from decimal import Decimal
from typing import Any

from math_verify import parse, verify

ANSWER_MARK = "####"  # as in answer_match.py; this script does not import the package

# Formulas between dollars, in \( \) or \[ \], or in \boxed.
MARKED = re.compile(r"\$|\\[\[(]|\\boxed\b")

# A currency before its number. An escaped dollar does not begin a formula.
CURRENCY = re.compile(r"(?:\\\$|[\N{EURO SIGN}\N{POUND SIGN}])\s*(?=[-.\d])")

# As Python and C write a float: 5e-05, 1e+22. With fewer digits it may be Euler's number: 2e+1.
SCIENTIFIC = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][-+]\d{2,3}(?!\w|\.\d)")

MIXED = re.compile(r"(?<![\w/.])(\d{1,9}) (\d{1,9})/(\d{1,9})(?![\w/]|\.\d)")  # 1 1/2
ROW_SPACE = re.compile(r"\\\\\[[\d.]+ ?(?:pt|em|ex|mm|cm)\]")  # in a matrix

# A number and the words of its unit: 5 dollars, 36.50 per hour, 12 cm^2.
_WORD = r"[A-Za-z\N{DEGREE SIGN}]+(?:\^\{?\d\}?|[\N{SUPERSCRIPT TWO}\N{SUPERSCRIPT THREE}])?\.?"
WITH_UNIT = re.compile(
    rf"(?P<number>-?\d[\d,]*(?:\.\d+)?(?: ?/ ?\d+)?) ?%?\s+(?P<words>{_WORD}(?:[ /-]+{_WORD})*)"
)
_UNITS = """
    bit bits bpm cent cents cm cu cup cups day days deg dl egg eggs eur eurs ev ft gal gb gbp gbps
    gm gms hr hrs hz kb kg kgs khz kj km kmh kn kph kpa kw kwh lb lbs man mb mbps men mg mhz mi
    min mins ml mm mo mol mph ms nm oz pa pie pies psi pt pts qt qts rad rpm secs sqft tb tbsp ton
    tons tsp usd wk wks yd yds yr yrs
"""
# Words and letters that may accompany a unit: 12 sq cm, 36.50 per hour, 5 km/h.
_WITH_UNITS = "a all an c cubed cubic each f for g h k l m of per s sq square squared the"
# Words of formulas: functions, letters, operators, and multiples.
_FORMULA_WORDS = """
    alpha beta gamma delta epsilon zeta theta iota kappa lambda omicron sigma upsilon omega
    arcsin arccos arctan arccot arcsec arccsc arcsinh arccosh arctanh arsinh arcosh artanh
    asin acos atan acot asec acsc asinh acosh atanh sine cosine tangent cotangent secant cosecant
    sinh cosh tanh coth sech csch ceil ceiling floor trunc round sign
    infinity infty undefined union intersect intersection choose factorial root sqrt cbrt
    plus minus times over divided equals modulo base where else otherwise
    hundred thousand million billion trillion
"""
UNITS = frozenset(_UNITS.split())
WORDS_WITH_UNITS = frozenset(_WITH_UNITS.split())
FORMULA_WORDS = frozenset(_FORMULA_WORDS.split())

# Another word counts as a unit if it looks like an English one.
ENGLISH = re.compile(r"(?=[A-Za-z]*[AEIOUaeiou])[A-Za-z][a-z]{3,}")

# Decimal places in which numbers must agree, their maximum, and the minimum significant digits.
PLACES, MAX_PLACES, MIN_DIGITS = 6, 400, 3


def normalised(text: str) -> str:
    """Return the text with numbers in the notation that the library reads correctly."""
    text = CURRENCY.sub("", text)
    text = SCIENTIFIC.sub(lambda match: format(Decimal(match[0]), "f"), text)
    text = MIXED.sub(_improper, text)
    return ROW_SPACE.sub(r"\\\\", text)


def _improper(match: re.Match[str]) -> str:
    whole, numerator, denominator = map(int, match.groups())
    return f"{whole * denominator + numerator}/{denominator}" if denominator else match[0]


def forms_of(answer: str) -> list[str]:
    """Return texts in which the library finds the answer, plain or LaTeX."""
    if MARKED.search(ROW_SPACE.sub("", answer)):
        return [answer]
    forms = [f"${answer}$"]
    unit = WITH_UNIT.fullmatch(answer)
    if unit and _is_unit(unit["words"]):
        forms.append(f"${unit['number']}$")
    return forms


def _is_unit(phrase: str) -> bool:
    """Return whether the words after a number name a unit, and not factors such as xy or max."""
    words = [one for one in re.findall("[A-Za-z]+", phrase) if one.lower() not in WORDS_WITH_UNITS]
    return bool(words) and all(
        one.lower() in UNITS or (ENGLISH.fullmatch(one) and one.lower() not in FORMULA_WORDS)
        for one in words
    )


@functools.lru_cache(maxsize=1024)
def parse_reference(text: str) -> Any:
    """Return the expressions of the answer. The list is empty if the text has none."""
    answer = normalised(text.rpartition(ANSWER_MARK)[2].strip())
    return [one for form in forms_of(answer) for one in parse(form, parsing_timeout=None)]


def places_of(gold: list[Any]) -> int:
    """Return how many decimal places count. An answer close to 0 needs more than usual.

    Infinity and integers beyond the range of floats do not count.
    """
    sizes = [abs(float(one)) for one in gold if getattr(one, "is_Number", False)]
    least = min((size for size in sizes if 0 < size < math.inf), default=1.0)
    zeros = math.ceil(-math.log10(least)) - 1  # after the decimal point
    return min(MAX_PLACES, max(PLACES, zeros + MIN_DIGITS))


def judge(reference: str, completion: str) -> bool | str:
    """Return whether the completion equals the reference, or what is wrong with the reference."""
    gold = parse_reference(reference)
    if not gold:
        return "contains no mathematical expression"
    # The library's own limits use signals that Python handles, which do not arrive inside C.
    found = parse(normalised(completion), parsing_timeout=None)
    return bool(verify(gold, found, float_rounding=places_of(gold), timeout_seconds=None))


def answer_of(reference: str, completion: str) -> bool | str:
    """Return the verdict, or the error that the library raised for these texts."""
    try:
        return judge(reference, completion)
    except Exception as error:  # noqa: BLE001 - sympy raises any type
        reason = f"{type(error).__name__}: {reprlib.repr(str(error))}"
        return f"math-verify failed with {reason}"


def main() -> None:
    """Answer questions until standard input closes."""
    # The library warns on each call that its own limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    print("ready", flush=True)
    for line in sys.stdin:
        reference, completion, limit_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        verdict = answer_of(reference, completion)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
