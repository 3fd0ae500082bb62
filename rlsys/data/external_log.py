"""external.jsonl: whose group stands at which prompt index of a run.

    {"prompt": 3, "group": {"peer": "swarm-1", "group_id": 12, "asked": ..., "completions": [...]}}
    {"prompt": 7, "group": null}

A line for each index at which a group of another run may stand: what it got, whole, so that it can
be trained on again when the peer's files are gone; null where the run sampled itself.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlsys.data.shared import SharedCompletion, SharedGroup
from rlsys.growing_file import GrowingFile, Tally, ordinary
from rlsys.json_text import parse_json


class ExternalLog:
    """Goes on where the file ends. A line reaches the operating system before `decide` returns.
    Raises ValueError for a damaged file."""

    def __init__(self, path: Path) -> None:
        self._places: dict[int, int] = {}  # of a prompt's line in the file
        self.keys: list[str] = []
        """Of the groups that were taken."""
        kept = self._read(path) if path.exists() else Tally()
        self._file = GrowingFile(path, kept=kept)
        self._reader = path.open("rb")

    def __contains__(self, index: int) -> bool:
        return index in self._places

    def group(self, index: int) -> SharedGroup | None:
        """What `decide` was given for this prompt."""
        self._reader.seek(self._places[index])
        found = parse_json(self._reader.readline())["group"]
        return None if found is None else _group(found)

    def decide(self, index: int, group: SharedGroup | None) -> None:
        """None: the prompt is the run's own."""
        line = json.dumps({"prompt": index, "group": None if group is None else asdict(group)})
        place = self._file.tally.num_bytes
        self._file.append(line.encode() + b"\n")
        self._places[index] = place

    def close(self) -> None:
        self._file.close()
        self._reader.close()

    def _read(self, path: Path) -> Tally:
        """What was decided, and how much of the file tells it."""
        kept = Tally()
        with ordinary(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):  # a crash came in the middle of writing it
                    break
                try:
                    decided = parse_json(line)
                    self._places[int(decided["prompt"])] = kept.num_bytes
                    if decided["group"] is not None:
                        self.keys.append(_group(decided["group"]).key)
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{path} line {number} is damaged ({type(error).__name__}: {error}); "
                        "restore the file from a copy, or start a new run under another --name."
                    ) from error
                kept = kept.plus(line)
        return kept


def _group(found: Any) -> SharedGroup:
    """Raises TypeError or KeyError for what is none."""
    if not isinstance(found, dict):
        raise TypeError(f"{found!r} is no group")
    completions = [SharedCompletion(**completion) for completion in found.pop("completions")]
    return SharedGroup(**found, completions=completions)


def read_external(path: Path) -> dict[int, SharedGroup | None]:
    """All that was decided, by prompt index; nothing where there is no file. Raises ValueError for
    a damaged line."""
    decided: dict[int, SharedGroup | None] = {}
    if not path.exists():
        return decided
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            found = parse_json(line)
            group = found["group"]
            decided[int(found["prompt"])] = None if group is None else _group(group)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} line {number} is damaged ({type(error).__name__}: {error})"
            ) from error
    return decided
