"""A range of optimizer steps as text: 5:8 for the steps 5, 6 and 7, 5 for step 5 alone."""

from __future__ import annotations

import re

from rlsys.errors import InvalidValue

STEP_RANGE = re.compile(r"(\d+)(?::(\d+))?", re.ASCII)


def parse_steps(text: str, field: str, *, at_most: int) -> range:
    """Return the steps that a text names; an empty text names none.

    Raises:
        InvalidValue: The text has another form, or names no step or too many.
    """
    if not text:
        return range(0)
    match = STEP_RANGE.fullmatch(text.strip())
    first = int(match[1]) if match else 0
    end = int(match[2] or first + 1) if match else 0
    if not 1 <= first < end <= first + at_most:
        raise InvalidValue(
            field,
            text,
            rule=f"must name 1 to {at_most} steps, counted from 1",
            fix="Use FIRST:END such as 5:8, which are the steps 5, 6 and 7, or one step such as 5.",
        )
    return range(first, end)
