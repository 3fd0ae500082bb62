"""Options of rlsys plan that describe the work of a step: from text to checked values.

    --completion-tokens mean=3000,max=8192,spread=0.8 ─► parse_lengths ─► Lengths
    --tool-seconds mean=2                             ─► parse_seconds ─► seconds
    --prompt-tokens 200                               ─► parse_number  ─► tokens
    --turns 4                                         ─► parse_count   ─► turns

Digits are ASCII, and texts of numbers are short, so that each text is a finite number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from rlsys.errors import InvalidValue
from rlsys.planner.lengths import MAX_TOKENS, Lengths, fixed, lognormal

MAX_TOOL_S: Final = 86_400.0
MAX_COUNT: Final = 10**9

_NUMBER: Final = re.compile(r"[0-9]{1,15}(?:\.[0-9]{0,15})?|\.[0-9]{1,15}")
_COUNT: Final = re.compile(r"[0-9]{1,15}")


def parse_number(name: str, text: str, least: float, most: float) -> float:
    """Return a number of an option.

    Raises:
        InvalidValue: The text is not a decimal number from `least` to `most`.
    """
    if _NUMBER.fullmatch(text) is None or not least <= (value := float(text)) <= most:
        raise InvalidValue(
            name,
            text,
            rule=f"must be a number from {least:,g} to {most:,.0f}",
            fix="Write it in decimal digits, such as 200.",
        )
    return value


def parse_count(name: str, text: str, least: int, most: int = MAX_COUNT) -> int:
    """Return an integer of an option.

    Raises:
        InvalidValue: The text is not an integer from `least` to `most`.
    """
    if _COUNT.fullmatch(text) is None or not least <= int(text) <= most:
        raise InvalidValue(
            name,
            text,
            rule=f"must be an integer from {least:,} to {most:,}",
            fix="Write it in decimal digits, such as 4.",
        )
    return int(text)


def parse_lengths(text: str) -> Lengths:
    """Return the lengths of mean=3000,max=8192[,spread=0.8], or of a number: all equal.

    Raises:
        InvalidValue: The text is neither, or a number is out of range.
    """
    field = "completion_tokens"
    if "=" not in text:
        return fixed(parse_count(field, text, 1, MAX_TOKENS))
    given = _pairs(field, text, ("mean", "max", "spread"))
    if not {"mean", "max"} <= given.keys():
        raise InvalidValue(
            field,
            text,
            rule="must have mean=N and max=N",
            fix="Write such as mean=3000,max=8192, or a number if all lengths are equal.",
        )
    most = parse_count(f"{field}.max", given["max"], 1, MAX_TOKENS)
    mean = parse_number(f"{field}.mean", given["mean"], 1, MAX_TOKENS)
    if "spread" not in given:
        return lognormal(mean, most)
    return lognormal(mean, most, parse_number(f"{field}.spread", given["spread"], 0, MAX_COUNT))


def parse_seconds(text: str) -> float:
    """Return the mean of mean=2, or of a number.

    Raises:
        InvalidValue: The text is neither, or out of range.
    """
    name = "--tool-seconds"
    mean = _pairs(name, text, ("mean",))["mean"] if "=" in text else text
    return parse_number(name, mean, 0, MAX_TOOL_S)


def _pairs(field: str, text: str, names: tuple[str, ...]) -> Mapping[str, str]:
    """Return the values of NAME=VALUE,NAME=VALUE.

    Raises:
        InvalidValue: A part is not NAME=VALUE, or its name is unknown or repeated.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in names or name in found:
            forms = ",".join(f"{one}=N" for one in names)
            raise InvalidValue(
                field,
                text,
                rule=f"{part.strip()[:40]!r} is not one of {', '.join(names)} with a value, or "
                "is repeated",
                fix=f"Write {forms}, each at most once.",
            )
        found[name] = value
    return found
