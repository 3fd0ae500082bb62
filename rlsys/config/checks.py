"""Limits of configuration values, and the checks that several sections share."""

from __future__ import annotations

from rlsys.errors import InvalidValue
from rlsys.errors import require as check

# Seconds. Every clock and lock accepts this number; a time limit of months is a mistake.
MAX_SECONDS = 1e7

# Processes of one kind: more than any cluster has, and few enough to list one by one.
MAX_PROCESSES = 65_536

# CPU cores. Ray counts them in ten-thousandths; less than this is a mistake.
MIN_CPUS = 0.01


def check_at_least(field: str, value: float, minimum: float, *, fix: str = "") -> None:
    """Raise an InvalidValue if `value` is below `minimum`."""
    check(
        value >= minimum,
        field,
        value,
        rule=f"must be at least {minimum}",
        fix=fix or f"Use {minimum} or more.",
    )


def check_num_processes(field: str, value: int) -> None:
    """Raise an InvalidValue if `value` is not a possible number of processes or threads."""
    check(
        1 <= value <= MAX_PROCESSES,
        field,
        value,
        rule=f"must be between 1 and {MAX_PROCESSES}",
        fix="Use a number in this range.",
    )


def check_time_limit(field: str, value: float) -> None:
    """Raise an InvalidValue if `value` is not a possible time limit in seconds."""
    check(
        0 < value <= MAX_SECONDS,
        field,
        value,
        rule=f"must be more than 0 s and at most {MAX_SECONDS:g} s",
        fix="Use a time limit in this range.",
    )


def check_k(k: int, num_samples: int, prefix: str = "") -> None:
    """Raise an InvalidValue if pass@k cannot be estimated from `num_samples` samples.

    `prefix` is put before the names of the fields.
    """
    check_at_least(f"{prefix}k", k, 1)
    if k > num_samples:
        raise InvalidValue(
            f"{prefix}k",
            k,
            rule=f"must be at most {prefix}num_samples={num_samples} to estimate pass@{k}",
            fix=f"Draw at least {k} samples for each prompt, or use a smaller k.",
        )
