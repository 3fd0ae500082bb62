"""Make runs write a checkpoint now, and wait until it is complete on disk.

    python scripts/request_checkpoint.py runs/quickstart --timeout 100

Call it before a run is ended from outside: deploy/ does so in the preStop hook of Kubernetes and at
the preemption signal of SLURM. It works on any node that sees the run directory. The runs continue
to train. Exit code 0: each checkpoint is complete, or no process trains the run, so that there is
nothing to save. Exit code 1: a checkpoint is not complete in time; an older one remains.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlsys.runs.checkpoint_request import Outcome, request_checkpoints


def main() -> int:
    """Request checkpoints and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run directory")
    parser.add_argument("--timeout", type=float, default=100.0, help="seconds (default: 100)")
    arguments = parser.parse_args()
    if not 0 <= arguments.timeout < float("inf"):
        parser.error(f"--timeout={arguments.timeout}: give seconds, 0 or more")
    for run in arguments.runs:
        if not (run / "config.json").is_file():
            parser.error(f"{run}: is not the directory of a run")
    try:
        outcomes = request_checkpoints(arguments.runs, arguments.timeout)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for run, outcome in outcomes.items():
        print(f"{run}: {outcome.value}")
    return 1 if Outcome.TIMEOUT in outcomes.values() else 0


if __name__ == "__main__":
    sys.exit(main())
