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


def check_k(k: int, num_samples: int, prefix: str = "") -> None:
    """Raises ValueError for a k that `num_samples` samples cannot tell of; `prefix` stands before
    both in messages.
    """
    if k < 1:
        raise ValueError(f"{prefix}k={k} samples pass nothing; use at least 1.")
    if k > num_samples:
        raise ValueError(
            f"{prefix}k={k} is larger than the number of samples, {num_samples} "
            f"({prefix}num_samples), which says nothing of pass@{k}; draw at least {k} samples for "
            "each prompt, or use a smaller k."
        )
