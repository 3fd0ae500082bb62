"""The report page of a run: one HTML file that needs no server and no network.

    files of a run directory ─► damaged_lines.py ─► curve_sampling.py, ledger_funnel.py,
    rollout_choice.py, timeline.py, event_rows.py, run_state.py, reward_forecast.py
        ─► report_model.py (JSON) ─► page.py + assets/ ─► report.html, or live_page.py

docs/report.md describes the page.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from rlsys.common.atomic_files import write_atomically, writing
from rlsys.errors import require
from rlsys.report.page import page_html
from rlsys.report.report_model import RunReader, check_runs, page_model

__all__ = ["serve_report", "write_report"]

FILE = "report.html"


def write_report(runs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the report page of a run, or of two to four runs side by side, and return its path.

    The runs may be running, finished or crashed.

    Args:
        runs: Run directories.
        output: The file. By default, report.html in the directory of the first run.

    Raises:
        InvalidValue: A directory holds no run, or there are too many.
        OSError: The file cannot be written. The message has the cause and the fix.
    """
    paths = [Path(run) for run in runs]
    check_runs(paths)
    model = page_model([RunReader(path) for path in paths], now_s=time.time(), live=False)
    target = paths[0] / FILE if output is None else Path(output)
    _check_target(target, paths)
    with writing(target):
        write_atomically(target, page_html(model, live=False))
    return target


def _check_target(target: Path, runs: Sequence[Path]) -> None:
    """Raise an InvalidValue if writing the page would replace something else than a page."""
    if target.exists() or target.is_symlink():
        require(
            target.is_file(),
            "output",
            str(target),
            rule="is not a regular file",
            fix="Give the path of a new file, such as report.html.",
        )
    for run in runs:
        is_inside = target.resolve().parent == run.resolve()
        require(
            not is_inside or target.suffix == ".html",
            "output",
            str(target),
            rule=f"would be among the records of {run}",
            fix="Give a name that ends with .html, or another directory.",
        )


def serve_report(run: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
    """Serve the report page of a run, which updates itself, until the process is interrupted.

    The address is printed.

    Args:
        run: Run directory.
        host: Address to listen on. The default is reachable from this machine only.
        port: Port; 0 takes any free one.

    Raises:
        InvalidValue: The directory holds no run, or the address or port cannot be used.
    """
    from rlsys.report.live_page import ReportServer

    with ReportServer(Path(run), host=host, port=port) as server:
        print(f"Report of {run}: {server.url}  (Ctrl-C ends)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
