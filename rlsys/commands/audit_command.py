"""Prove from a run's files that no data was lost, repeated or trained too late.

    rlsys audit
    rlsys audit runs/quickstart

Without a RUN it is the newest run below runs/.

In: a run directory, finished or not, with any number of crashes and resumes. Out: one line about
the run and exit code 0, or the faults (rlsys/runs/audit.py) and exit code 1. Of faults that differ
only in numbers and quoted texts, the first three and their number are printed.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlsys.runs.audit import audit
from rlsys.runs.find_runs import checked_run, newest_run
from rlsys.runs.run_history import read_evidence

NUM_SHOWN = 3  # faults of each kind
VARYING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\d+")


def shown(faults: Sequence[str]) -> Iterator[str]:
    """Return one line for each of the first faults of a kind, and the number of the others."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for fault in faults:
        kinds[VARYING.sub("…", fault)].append(fault)
    for alike in kinds.values():
        yield from alike[:NUM_SHOWN]
        if len(alike) > NUM_SHOWN:
            yield f"and {len(alike) - NUM_SHOWN:,} more like this; the last one: {alike[-1]}"


def main(arguments: Sequence[str]) -> int:
    """Audit a run and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="rlsys audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="directory of a run")
    given = parser.parse_args(arguments).run
    path = checked_run(given) if given else newest_run()
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
