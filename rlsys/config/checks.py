"""Limits of configuration values, and the checks that several sections share."""

from __future__ import annotations

from rlsys.errors import InvalidValue
from rlsys.errors import require as check

# Seconds. Every clock and lock accepts this number; a time limit of months is a mistake.
MAX_SECONDS = 1e7

# Processes of one kind: more than any cluster has, and few enough to list one by one.
MAX_PROCESSES = 65_536

# Lowest and highest temperature: vLLM raises lower ones to the lowest and rejects higher ones.
VLLM_TEMPERATURES = (0.01, 2.0)

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


def check_above(field: str, value: float, limit: float, *, fix: str) -> None:
    """Raise an InvalidValue unless `value` is greater than `limit`."""
    check(value > limit, field, value, rule=f"must be above {limit}", fix=fix)


def check_between(
    field: str, value: float, minimum: float, maximum: float, *, fix: str = ""
) -> None:
    """Raise an InvalidValue unless `value` is from `minimum` to `maximum`, both included."""
    check(
        minimum <= value <= maximum,
        field,
        value,
        rule=f"must be between {minimum} and {maximum}",
        fix=fix or "Use a number in this range.",
    )


def check_fraction(field: str, value: float, *, fix: str) -> None:
    """Raise an InvalidValue unless `value` is above 0 and at most 1."""
    check(0 < value <= 1, field, value, rule="must be above 0 and at most 1", fix=fix)


def check_num_processes(field: str, value: int) -> None:
    """Raise an InvalidValue if `value` is not a possible number of processes or threads."""
    check_between(field, value, 1, MAX_PROCESSES)


def check_time_limit(field: str, value: float) -> None:
    """Raise an InvalidValue if `value` is not a possible time limit in seconds."""
    check(
        0 < value <= MAX_SECONDS,
        field,
        value,
        rule=f"must be more than 0 s and at most {MAX_SECONDS:g} s",
        fix="Use a time limit in this range.",
    )


def check_vllm_temperature(field: str, value: float) -> None:
    """Raise an InvalidValue if vLLM cannot sample at a temperature other than 0 (greedy)."""
    lowest, highest = VLLM_TEMPERATURES
    check(
        lowest <= value <= highest,
        field,
        value,
        rule=f"vLLM only samples between {lowest} and {highest}",
        fix='Use a temperature in this range, or engine="torch".',
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
