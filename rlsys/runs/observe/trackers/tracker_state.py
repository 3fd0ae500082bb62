"""trackers/NAME.json: which run of the tracker a run has, and what it has already."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.runs.observe.trackers.tracker_protocol import Position


@dataclass(frozen=True, kw_only=True)
class TrackerState:
    """State of one tracker of a run."""

    run_id: str | None = None
    """Identifier of the tracker's run, None before the first start."""
    position: Position = field(default_factory=Position)

    def write(self, path: Path) -> None:
        """Write or replace the file, once per event and therefore without waiting for the disk."""
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(dump_json(asdict(self)) + "\n")
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the recorded state, or that of a new tracker if there is no usable file.

        A crash of the machine may leave an empty file. The tracker then gets a run of its own, from
        the first step.
        """
        try:
            entry: Mapping[str, Any] = parse_json(path.read_bytes())
            return cls(run_id=entry["run_id"], position=Position(**entry["position"]))
        except FileNotFoundError:
            return cls()
        except (ValueError, KeyError, TypeError) as error:
            print(f"{path} is damaged ({error}): the tracker begins again", file=sys.stderr)
            return cls()


def tracker_files(run_directory: Path) -> Path:
    """Return the directory with the files of all trackers of a run."""
    return run_directory / "trackers"


def state_file(run_directory: Path, extra: str) -> Path:
    """Return the file with the state of a tracker."""
    return tracker_files(run_directory) / f"{extra}.json"


def log_file(run_directory: Path, extra: str) -> Path:
    """Return the file with what the last process of a tracker printed."""
    return tracker_files(run_directory) / f"{extra}.log"
