"""Records of the end of a run: outcome.json and the report page."""

from __future__ import annotations

from rlsys.report import write_report
from rlsys.runs.run_files import RunFiles
from rlsys.runs.run_outcome import Outcome, write_outcome

from ..cluster.local_ray import within

# Limits for both files. A run that has ended must not keep its process for longer.
LIMIT_S = 60.0
INTERRUPTED_LIMIT_S = 10.0


def record_end(files: RunFiles, outcome: Outcome, *, reason: str = "") -> list[str]:
    """Write outcome.json and report.html. Return warnings about what was not written.

    Nothing is raised: the result of the run, or the error that ended it, matters more.
    """
    faults: list[str] = []

    def write() -> None:
        try:
            write_outcome(files.outcome, outcome, reason=reason)
            write_report([files.path])
        except Exception as error:  # noqa: BLE001 - see above
            faults.append(f"the report page was not written: {type(error).__name__}: {error}")

    limit_s = INTERRUPTED_LIMIT_S if outcome == "interrupted" else LIMIT_S
    if not within(limit_s, write):
        faults.append(f"the report page was not written within {limit_s:.0f} s")
    return faults
