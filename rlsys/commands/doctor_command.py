"""Check that this machine and environment can run rlsys.

    rlsys doctor
    rlsys doctor --runs-dir /shared/runs

Prints one line for each check: ok, warn (runs work, with a limit) or fail, and how to fix it. The
exit code is 1 if a check fails. Nothing is created.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlsys.commands.machine_checks import Check, checks
from rlsys.runs.find_runs import RUNS_DIR


def report(results: Iterable[Check]) -> int:
    """Print each result as it comes, and return the exit code."""
    failed = 0
    for check in results:
        print(check, flush=True)
        failed += check.status == "fail"
    print(f"{failed} check(s) failed" if failed else "ready")
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    """Check the machine and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="rlsys doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--runs-dir", type=Path, default=RUNS_DIR, help="directory of the runs (default: runs)"
    )
    return report(checks(parser.parse_args(arguments).runs_dir))
