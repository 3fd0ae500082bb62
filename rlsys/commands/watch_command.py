"""Serve the report page of a run while it trains. Ctrl-C ends the server, not the run.

    rlsys watch
    rlsys watch runs/first --port 8000

Without a RUN it is the newest run below runs/.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from rlsys.common.number_text import integer
from rlsys.runs.find_runs import checked_run, newest_run


def main(arguments: Sequence[str]) -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="rlsys watch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=integer, default=0, help="port (default: a free one, which is printed)"
    )
    options = parser.parse_args(arguments)
    run = checked_run(options.run) if options.run else newest_run()
    importlib.import_module("rlsys.report").serve_report(run, host=options.host, port=options.port)
