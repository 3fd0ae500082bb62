"""outcome.json: how the last process of a run ended.

The launching process writes the file when the run ends, and removes it when the run starts or
resumes. A process that was killed leaves none.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rlsys.common.append_only_file import regular_file
from rlsys.common.atomic_files import write_atomically
from rlsys.common.safe_json import dump_json, parse_json

Outcome = Literal["finished", "interrupted", "failed"]
MAX_REASON = 20_000  # characters


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended, with the message of the error that ended it."""

    outcome: str
    reason: str
    unix_s: float


def write_outcome(path: Path, outcome: Outcome, *, reason: str = "") -> None:
    """Write the file atomically."""
    ended = RunOutcome(outcome=outcome, reason=reason[:MAX_REASON], unix_s=time.time())
    write_atomically(path, dump_json(asdict(ended)) + "\n")


def read_outcome(path: Path) -> RunOutcome | None:
    """Return how the run ended, or None for a missing or damaged file."""
    try:
        found = parse_json(regular_file(path).read_bytes())
        return RunOutcome(
            outcome=str(found["outcome"]),
            reason=str(found["reason"]),
            unix_s=float(found["unix_s"]),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
