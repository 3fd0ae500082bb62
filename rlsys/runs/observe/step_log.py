"""An append-only file of JSON lines, each of which carries the optimizer step that it belongs to.

In: mappings with an integer "step". Out: a file whose lines read back to the same numbers, bit for
bit (floats are written with repr).

A line counts once its newline is written. What a crash leaves behind the last newline is no line:
readers skip it, and a log that continues the file removes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import GrowingFile, Tally, regular_file
from rlsys.common.safe_json import dump_json, parse_json


class StepLog:
    """Appends lines to `path`; every line reaches the operating system before `append` returns.

    Lines of steps beyond `after_step` (where a resumed run starts again) are removed first, so that
    no step stands twice. `kept` is what that leaves of the file, where it is known
    (rlsys.runs.run_history); else its lines are read.
    """

    def __init__(self, path: Path, *, after_step: int = 0, kept: Tally | None = None) -> None:
        if kept is None:
            kept = _through(path, after_step) if path.exists() else Tally()
        self._file = GrowingFile(path, kept=kept)
        self._after = {after_step: kept}  # what stood there at the end of each step

    @property
    def tally(self) -> Tally:
        """What stands there."""
        return self._file.tally

    def go_back(self, step: int) -> None:
        """Training went back to `step`: lines of later steps are removed."""
        self._after = {end: tally for end, tally in self._after.items() if end <= step}
        if not self._after:
            self._after[step] = _through(self._file.path, step)
        self._file.cut(self._after[max(self._after)])

    def append(self, line: Mapping[str, Any]) -> None:
        """Raises ValueError for NaN and infinities, which JSON has no numbers for, OSError for a
        full disk, and FileNotFoundError where the file was deleted or moved away: the line would be
        lost.
        """
        assert "step" in line, f"a line without a step: {sorted(line)}"
        self._file.append(dump_json(line, allow_nan=False).encode("ascii") + b"\n")
        self._after[line["step"]] = self._file.tally
        if not self._file.is_in_place:
            raise FileNotFoundError(
                f"{self._file.path} was deleted or moved while the run was writing to it, so that "
                "its steps cannot be kept; leave run directories alone until their runs have ended."
            )

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every complete line, in order. Raises ValueError naming a line that is no JSON object."""
    with regular_file(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield _parse(line, path, number)


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise _damage(path, number, f"no JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        raise _damage(path, number, "no object with an integer step")
    return value


def _damage(path: Path, number: int, what: str) -> ValueError:
    return ValueError(
        f"{path}, line {number} is {what}; it was edited or damaged: restore the file from a copy. "
        f"Without one, sed -i {number}d {path} removes the line: the file can be read again, but "
        "its step is missing there, and no checkpoint of that step or later can be resumed from."
    )


def _through(path: Path, step: int) -> Tally:
    """Of the file's lines up to a step, of which later ones stand behind."""
    tally = Tally()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") or _parse(line, path, number)["step"] > step:
                break
            tally = tally.plus(line)
    return tally
