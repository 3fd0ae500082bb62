"""Numbers in messages: counts with their unit, and measurements without false precision."""

from __future__ import annotations

import math


def counted(number: int, singular: str, plural: str = "") -> str:
    """Return a count with its unit, such as "1 resume" or "2,000 prompts"."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def significant(value: float, digits: int = 2) -> str:
    """Return a number with this many significant digits and without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"
