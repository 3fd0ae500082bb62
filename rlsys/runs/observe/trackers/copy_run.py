"""Copy a run that has ended to trackers, or what they lack of it.

Example: python -m rlsys.runs.observe.trackers.copy_run runs/quickstart tensorboard mlflow
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlsys.errors import InvalidValue
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.observe.trackers.run_trackers import RunTrackers
from rlsys.runs.observe.trackers.tracker_kinds import check_trackers
from rlsys.runs.observe.trackers.tracker_process import TrackerLimits
from rlsys.runs.run_directory import RunDirectory
from rlsys.runs.run_files import RunFiles

COPY_LIMIT_S = 24 * 3600.0


def copy_run(directory: Path, names: list[str], *, limits: TrackerLimits) -> list[str]:
    """Copy a run and return the warnings.

    Raises:
        InvalidValue: A tracker or the directory cannot be used.
    """
    check_trackers(names)
    if not RunFiles(directory).metrics.is_file():
        raise InvalidValue(
            "RUN", str(directory), rule="has no metrics.jsonl", fix="Name a run's directory."
        )
    run = RunDirectory(directory)
    try:
        lines = read_metrics(run.metrics)
        last_step = int(lines[-1]["step"]) if lines else 0
        trackers = RunTrackers(names, directory, first_step=last_step, limits=limits)
        trackers.close(failed=False)
    finally:
        run.close()
    warnings = []
    for is_warning, text in trackers.messages():
        print(text, file=sys.stderr if is_warning else sys.stdout)
        warnings += [text] if is_warning else []
    return warnings


def main() -> None:
    """Copy a run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("trackers", nargs="+", metavar="TRACKER", help="as in --trackers")
    arguments = parser.parse_args()
    try:
        warnings = copy_run(
            arguments.run, arguments.trackers, limits=TrackerLimits(finish_s=COPY_LIMIT_S)
        )
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    raise SystemExit(1 if warnings else 0)


if __name__ == "__main__":
    main()
