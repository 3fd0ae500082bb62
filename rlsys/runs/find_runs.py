"""Run directories that a command line names, or leaves out.

In: a path, or the directory of all runs. Out: a directory with the files of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from rlsys.errors import InvalidValue
from rlsys.runs.run_files import RunFiles

RUNS_DIR = Path("runs")  # default of RunConfig.runs_dir


def is_run(path: Path) -> bool:
    """Return whether a directory has files of a run, which may be damaged."""
    files = RunFiles(path)
    return files.config.is_file() or files.metrics.is_file()


def checked_run(path: Path, runs_dir: Path = RUNS_DIR) -> Path:
    """Return the path of a run.

    Raises:
        InvalidValue: It has no files of a run.
    """
    if is_run(path):
        return path
    names = {str(one): one for one in [*_runs_below(path), *_runs_below(runs_dir)]}
    names |= {one.name: one for one in _runs_below(runs_dir)}
    similar = get_close_matches(str(path), names, n=1) or get_close_matches(path.name, names, n=1)
    if similar:
        fix = f"Did you mean {names[similar[0]]}?"
    elif below := sorted(map(str, _runs_below(path))):
        fix = f"Give one of the runs below it, such as {below[0]}."
    else:
        fix = "Give the directory of a run, such as runs/quickstart."
    rule = "has no config.json and no metrics.jsonl, so it is not a run"
    raise InvalidValue("RUN", str(path), rule=rule if path.exists() else "does not exist", fix=fix)


def runs_of(path: Path) -> list[Path]:
    """Return the run at a path, or all runs in it if it is a directory of runs.

    Raises:
        InvalidValue: It is neither.
    """
    below = [] if is_run(path) else list(_runs_below(path))
    return below or [checked_run(path)]


def newest_run(runs_dir: Path = RUNS_DIR) -> Path:
    """Return the run that was written last.

    Raises:
        InvalidValue: The directory has no run.
    """
    found = list(_runs_below(runs_dir))
    if not found:
        raise InvalidValue(
            "RUN",
            rule=f"{runs_dir.absolute()} has no run",
            fix="Give the directory of a run, or change to the directory that has runs/.",
        )
    return max(found, key=_written_s)


def _runs_below(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        yield from (one for one in sorted(directory.iterdir()) if is_run(one))


def _written_s(run: Path) -> float:
    """Return the time of the newest change of a run's records, in seconds."""
    files = RunFiles(run)
    records = (files.config, *files.records, files.evaluations)
    return max(one.stat().st_mtime for one in records if one.is_file())
