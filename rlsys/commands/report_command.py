"""Write the report page of one run, or of several for comparison, as one HTML file.

    rlsys report
    rlsys report runs/first
    rlsys report runs/first runs/second --output both.html

Without a RUN it is the newest run below runs/. The page is report.html in the directory of the
first run. It needs neither a server nor a network.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from rlsys.runs.find_runs import checked_run, newest_run


def main(arguments: Sequence[str]) -> None:
    """Write the page and print its path."""
    parser = argparse.ArgumentParser(
        prog="rlsys report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="page to write (default: RUN/report.html)"
    )
    options = parser.parse_args(arguments)
    runs = [checked_run(run) for run in options.runs] or [newest_run()]
    print(importlib.import_module("rlsys.report").write_report(runs, options.output))
