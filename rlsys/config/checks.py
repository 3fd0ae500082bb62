"""What sections check their fields with."""

from __future__ import annotations

# A whole number of seconds that every clock and lock takes; a limit of months is none.
MAX_SECONDS = 1e7

# Processes of one kind: beyond any cluster, within what can be counted up one by one.
MAX_PROCESSES = 65_536

# Ray counts cores in ten-thousandths; less than this is a mistake.
MIN_CPUS = 0.01


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) for a user's mistake."""
    if not condition:
        raise ValueError(message)
