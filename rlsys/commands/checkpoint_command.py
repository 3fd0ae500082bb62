"""Make runs write a checkpoint now, and wait until it is complete on disk.

    rlsys checkpoint
    rlsys checkpoint runs/first --timeout 240
    rlsys checkpoint runs

RUN is the directory of a run, or a directory of runs, which means all of them. Without a RUN it is
the newest run below runs/.

Call it before a run is ended from outside: deploy/ does so in the preStop hook of Kubernetes and at
the preemption signal of SLURM. It works on any node that sees the run directory. The runs continue
to train. Exit code 0: each checkpoint is complete, or no process trains the run, so that there is
nothing to save. Exit code 1: a checkpoint is not complete in time; an older one remains.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlsys.errors import require
from rlsys.runs.checkpoint_request import Outcome, request_checkpoints
from rlsys.runs.find_runs import newest_run, runs_of


def main(arguments: Sequence[str]) -> int:
    """Request checkpoints and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="rlsys checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", type=Path, nargs="*", metavar="RUN", help="a run directory, or a directory of runs"
    )
    parser.add_argument("--timeout", type=float, default=100.0, help="seconds (default: 100)")
    given = parser.parse_args(arguments)
    require(
        0 <= given.timeout < float("inf"),
        "--timeout",
        given.timeout,
        rule="is not a time",
        fix="Give seconds, 0 or more.",
    )
    runs = [run for path in given.runs for run in runs_of(path)] or [newest_run()]
    outcomes = request_checkpoints(runs, given.timeout)
    for run, outcome in outcomes.items():
        print(f"{run}: {outcome.value}")
    return 1 if Outcome.TIMEOUT in outcomes.values() else 0
