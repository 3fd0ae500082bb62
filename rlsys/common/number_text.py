"""Numbers in texts: ASCII digits that users write, counts with units, and rounded measurements."""

from __future__ import annotations

import math


def integer(text: str) -> int:
    """Return an integer. Unlike int, refuse the digits of other scripts.

    Raises:
        ValueError: The text is not an integer in ASCII digits.
    """
    return int(_ascii(text))


def number(text: str) -> float:
    """Return a number. Unlike float, refuse the digits of other scripts.

    Raises:
        ValueError: The text is not a number in ASCII digits.
    """
    return float(_ascii(text))


def _ascii(text: str) -> str:
    if not text.isascii():
        raise ValueError(f"{text!r} is not written in ASCII digits")
    return text


def counted(number: int, singular: str, plural: str = "") -> str:
    """Return a count with its unit, such as "1 resume" or "2,000 prompts"."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def verb(number: int, singular: str = "is", plural: str = "are") -> str:
    """Return the form of a verb that goes with a count."""
    return singular if number == 1 else plural


def span(first: object, last: object) -> str:
    """Return a range, such as "3 to 5", or one value if both ends read alike."""
    return f"{first}" if f"{first}" == f"{last}" else f"{first} to {last}"


def significant(value: float, digits: int = 2) -> str:
    """Return a number with this many significant digits and without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"
