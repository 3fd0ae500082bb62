"""Proves from a run's files that nothing was lost, repeated or trained too late.

    python scripts/audit.py runs/quickstart

In: a run directory, finished or not, over any number of crashes and resumes. Out: a line that says
what the run did, and exit code 0; or what is broken (rlsys/runs/audit.py), and exit code 1. Of
faults that differ in numbers and quoted texts alone, the first three are shown, and how many there
are.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlsys.runs.audit import audit
from rlsys.runs.run_history import read_evidence

NUM_SHOWN = 3  # of each kind
VARYING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\d+")


def shown(faults: Sequence[str]) -> Iterator[str]:
    """Lines that name them: the first of each kind, and how many more."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for fault in faults:
        kinds[VARYING.sub("…", fault)].append(fault)
    for alike in kinds.values():
        yield from alike[:NUM_SHOWN]
        if len(alike) > NUM_SHOWN:
            yield f"and {len(alike) - NUM_SHOWN:,} more like that, the last: {alike[-1]}"


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
    for line in shown(faults):
        print(f"broken: {line}")
    state = "finished" if verdict.finished else "not finished"
    print(f"{path}, {state}: {verdict.summary}; {len(faults) or 'nothing'} broken")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
