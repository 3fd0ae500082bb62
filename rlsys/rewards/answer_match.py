"""Verifiable rewards: 1.0 for a completion that is right, 0.0 for one that is not.

In: the completion's text and, where there is a reference, a column of the prompt's dataset row.
A reference that cannot be read is an error (the dataset's fault), never a 0 for the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial

from rlsys.rewards.column_paths import value_at
from rlsys.rewards.reward import Reward, check_column_name, is_of, not_of
from rlsys.types import Rollout

# What a reference may be.
EXACT: tuple[type, ...] = (str, int)
NUMBERS: tuple[type, ...] = (str, int, float)

ANSWER_MARK = "####"  # stands before the final answer, as in GSM8K

# 18, -5, 1,234.5, .5, 1e-3, -$20, 3/4, 1 1/2; of 50% the 50. A minus after a word or a number is a
# hyphen, and digits inside a word (CO2, v1.2) are no number. Repetitions start at one place only or
# are bounded, so that the time is linear in the text: nothing could stop a slow match.
NUMBER = re.compile(
    r"""
    (?P<prefix> (?<![\w)\]]) [-+$€£\N{MINUS SIGN}]{1,3} )?
    (?: (?<!\w) (?P<whole> \d+ ) [ ] (?= \d+ / \d ) )?
    (?P<numerator>
        (?<!\w) (?<!\d\.) (?: \d{1,3} (?: ,\d{3} )+ (?!\d) | \d+ ) (?: \.\d+ )? (?: [eE][-+]?\d+ )?
        | (?<![\w.]) \.\d+ (?: [eE][-+]?\d+ )?
    )
    (?: [ ]? / [ ]? (?P<denominator> \d+ (?: \.\d+ )? ) )?
    """,
    re.VERBOSE | re.ASCII,
)


# Numbers of more digits, or with a larger exponent, count as infinite, or as 0: a model can write
# 1e999999999, which an exact number would try to hold.
MAX_DIGITS = 4000


def final_number(text: str) -> float | None:
    """Return the first number after the last "####", or the last one of a text without that mark.

    A percent sign or a currency is a unit: "50%" is 50. None where there is no number.
    """
    number = exact_number(text)
    try:
        return None if number is None else float(number)
    except OverflowError:
        return math.inf if number is not None and number > 0 else -math.inf


def exact_number(text: str) -> Fraction | float | None:
    """Return the number of `final_number` exactly; a float only where it is infinite."""
    _, mark, answer = text.rpartition(ANSWER_MARK)
    matches = NUMBER.finditer(answer)
    for match in matches if mark else reversed(list(matches)):
        if (value := _value(match)) is not None:
            return value
    return None


def _value(match: re.Match[str]) -> Fraction | float | None:
    whole, numerator = _decimal(match["whole"] or "0"), _decimal(match["numerator"])
    denominator = _decimal(match["denominator"] or "1")
    if denominator == 0:
        return None
    if isinstance(denominator, float):
        value = whole
    elif isinstance(whole, float) or isinstance(numerator, float):
        value = math.inf
    else:
        value = whole + numerator / denominator
    return -value if set(match["prefix"] or "") & {"-", "\N{MINUS SIGN}"} else value


def _decimal(text: str) -> Fraction | float:
    """Return a number written in digits, with a fraction and an exponent if need be."""
    mantissa, _, exponent = text.replace(",", "").lower().partition("e")
    size = int(exponent or 0) if len(exponent) <= 6 else math.inf
    if exponent.startswith("-"):
        size = -abs(size)
    if len(mantissa) > MAX_DIGITS or size > MAX_DIGITS:
        return math.inf if set(mantissa) - {"0", "."} else Fraction(0)
    if size < -MAX_DIGITS:
        return Fraction(0)
    return Fraction(mantissa) * Fraction(10) ** int(size)


def numeric_answer(column: str = "answer", *, tolerance: float = 1e-6) -> Reward:
    """Whether the final number equals the reference's, up to `tolerance` (absolute).

    Both are read as by `final_number`, so the reference may be a whole worked solution. They are
    compared exactly: integers beyond 2^53 too.
    """
    check_column_name(column, "numeric_answer")
    return Reward(
        function=partial(_numeric_answer, column=column, tolerance=tolerance),
        name="numeric_answer",
        required_columns=(column,),
        column_types=NUMBERS,
    )


def _numeric_answer(rollout: Rollout, *, column: str, tolerance: float) -> float:
    text = reference(rollout, column, NUMBERS)
    expected = exact_number(text)
    if not isinstance(expected, Fraction):
        raise ValueError(
            f"metadata[{column!r}]={text!r} holds no number; name the column with the answer, or "
            "use exact_match."
        )
    found = exact_number(rollout.completion_text)
    return float(isinstance(found, Fraction) and abs(found - expected) <= tolerance)


def exact_match(column: str = "answer", *, normalize: Callable[[str], str] = str.strip) -> Reward:
    """Whether completion and reference are equal after `normalize`. The reference is a text, or a
    whole number: of anything else, 4.0 or ["4"], nobody would write what Python makes of it.
    """
    check_column_name(column, "exact_match")
    return Reward(
        function=partial(_exact_match, column=column, normalize=normalize),
        name="exact_match",
        required_columns=(column,),
        column_types=EXACT,
    )


def _exact_match(rollout: Rollout, *, column: str, normalize: Callable[[str], str]) -> float:
    expected = reference(rollout, column, EXACT)
    return float(normalize(rollout.completion_text) == normalize(expected))


def format_reward(pattern: str, *, name: str = "format") -> Reward:
    """Whether the regular expression is found anywhere in the completion; anchor it with ^ and $.

    Raises ValueError for what is no regular expression. Avoid nested repetitions such as (a+)+: one
    that backtracks ends as a time-out, and takes its process with it.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}.") from error
    return Reward(function=partial(_format_reward, pattern=pattern), name=name)


def _format_reward(rollout: Rollout, *, pattern: str) -> float:
    return float(re.search(pattern, rollout.completion_text) is not None)


def reference(rollout: Rollout, column: str, types: tuple[type, ...]) -> str:
    """The row's value as text. Raises ValueError where it has none, or one of no such type."""
    value = value_at(rollout.metadata, column)
    if value is None:
        raise ValueError(
            f"metadata[{column!r}] is missing from the row, which has {sorted(rollout.metadata)}; "
            "name the column with the answer."
        )
    if not is_of(value, types):
        raise ValueError(f"metadata[{column!r}]={value!r} {not_of(value, types)}")
    return str(value)
