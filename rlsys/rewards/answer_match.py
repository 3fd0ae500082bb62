"""Verifiable rewards: 1.0 for a right completion, 0.0 for a wrong one.

In: the text of the completion and, for some rewards, a reference in a column of the dataset row.
A reference that cannot be read is an error of the dataset, never a 0 for the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial

from rlsys.errors import InvalidValue, require
from rlsys.rewards.column_paths import value_at
from rlsys.rewards.reward import Reward, check_column_name, check_type
from rlsys.types import Rollout

# Types of a reference.
EXACT: tuple[type, ...] = (str, int)
NUMBERS: tuple[type, ...] = (str, int, float)

ANSWER_MARK = "####"  # precedes the final answer, as in GSM8K

# 18, -5, 1,234.5, .5, 1e-3, -$20, 3/4, 1 1/2, and the 50 of 50%. A minus after a word or digit is a
# hyphen, and digits inside a word (CO2, v1.2) are not a number. Repetitions are bounded or start at
# one place only, so that the time is linear in the text: a slow match could not be interrupted.
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

# Numbers with more digits or a larger exponent count as infinite, or as 0: a model can write
# 1e999999999, which does not fit into memory as an exact number.
MAX_DIGITS = 4000


def final_number(text: str) -> float | None:
    """Return the first number after the last "####", or the last one of a text without that mark.

    A percent sign or a currency is a unit: "50%" is 50. Return None if there is no number.
    """
    number = exact_number(text)
    try:
        return None if number is None else float(number)
    except OverflowError:
        return math.inf if number is not None and number > 0 else -math.inf


def exact_number(text: str) -> Fraction | float | None:
    """Return the number of `final_number` exactly, or an infinite float."""
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
    """Return the value of digits with an optional fraction and exponent."""
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
    """Return a reward that is 1.0 if the final number equals the reference's.

    Both numbers are read like this: the first number after the last "####", or the last number of
    a text without that mark. So the reference may be a whole worked solution. The comparison is
    exact, including integers beyond 2^53.

    Args:
        column: The metadata column with the reference: a text or a number.
        tolerance: Largest absolute difference of equal numbers.

    Raises:
        InvalidValue: `column` is not a name.
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
        raise InvalidValue(
            f"metadata[{column!r}]",
            text,
            rule="contains no number",
            fix="Name the column with the answer, or use exact_match.",
        )
    found = exact_number(rollout.completion_text)
    return float(isinstance(found, Fraction) and abs(found - expected) <= tolerance)


def exact_match(column: str = "answer", *, normalize: Callable[[str], str] = str.strip) -> Reward:
    """Return a reward that is 1.0 if completion and reference are equal after `normalize`.

    Args:
        column: The metadata column with the reference: a text or an integer. Other types are
            refused, because a model would not write Python's text of them, such as 4.0 or ["4"].
        normalize: Applied to both texts.

    Raises:
        InvalidValue: `column` is not a name.
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
    """Return a reward that is 1.0 if a regular expression is found anywhere in the completion.

    Args:
        pattern: The regular expression. Anchor it with ^ and $. Avoid nested repetitions such as
            (a+)+: backtracking cannot be interrupted, so it ends as a time-out and kills the
            process.
        name: Name of the reward.

    Raises:
        InvalidValue: `pattern` is not a regular expression.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidValue(
            "format_reward: pattern",
            pattern,
            rule=f"is not a regular expression ({error})",
            fix="Escape special characters with a backslash.",
        ) from error
    return Reward(function=partial(_format_reward, pattern=pattern), name=name)


def _format_reward(rollout: Rollout, *, pattern: str) -> float:
    return float(re.search(pattern, rollout.completion_text) is not None)


def reference(rollout: Rollout, column: str, types: tuple[type, ...]) -> str:
    """Return the row's value as text, or raise InvalidValue if it is missing or of another type."""
    field = f"metadata[{column!r}]"
    value = value_at(rollout.metadata, column)
    require(
        value is not None,
        field,
        rule=f"is missing from the row, which has {sorted(rollout.metadata)}",
        fix="Name the column with the answer.",
    )
    check_type(value, types, field)
    return str(value)
