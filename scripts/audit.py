"""Proves from a run's files that nothing was lost, repeated or trained too late.

    python scripts/audit.py runs/quickstart

In: a run directory, finished or not, over any number of crashes and resumes. Out: a line that says
what the run did, and exit code 0; or everything that is broken (rlsys/audit.py), and exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlsys.audit import audit
from rlsys.history import read_evidence


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run directory")
    path = parser.parse_args().run
    try:
        evidence, unreadable = read_evidence(path)
    except ValueError as error:
        print(f"broken: {error}")
        return 1
    verdict = audit(evidence)
    faults = [*unreadable, *verdict.faults]
    for fault in faults:
        print(f"broken: {fault}")
    state = "finished" if verdict.finished else "not finished"
    print(f"{path}, {state}: {verdict.summary}; {len(faults) or 'nothing'} broken")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
