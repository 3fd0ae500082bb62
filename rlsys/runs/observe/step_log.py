"""Append-only file of JSON lines, each with the optimizer step that it belongs to.

Input: mappings with an integer "step". Output: a file whose lines read back to the same numbers,
bit for bit (floats are written with repr).

A line counts once its newline is written. A crash may leave an incomplete line at the end: readers
skip it, and a log that continues the file removes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import GrowingFile, Tally, regular_file
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.errors import InvalidValue


class StepLog:
    """Writer of a file of steps. `append` returns when the line has reached the operating system.

    Args:
        path: The file.
        after_step: Step from which a resumed run continues. Lines of later steps are removed, so
            that each step is there once.
        kept: Tally of the lines up to that step, if it is known (rlsys.runs.run_history).
            Otherwise, the lines are read.
    """

    def __init__(self, path: Path, *, after_step: int = 0, kept: Tally | None = None) -> None:
        if kept is None:
            kept = _through(path, after_step) if path.exists() else Tally()
        self._file = GrowingFile(path, kept=kept)
        self._after = {after_step: kept}  # tally of the file at the end of each step

    @property
    def tally(self) -> Tally:
        """Tally of the whole file."""
        return self._file.tally

    def go_back(self, step: int) -> None:
        """Remove the lines of steps after `step`, to which training went back."""
        self._after = {end: tally for end, tally in self._after.items() if end <= step}
        if not self._after:
            self._after[step] = _through(self._file.path, step)
        self._file.cut(self._after[max(self._after)])

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line.

        Raises:
            ValueError: A number is NaN or infinite, which JSON cannot express.
            OSError: The disk is full.
            FileNotFoundError: The file was deleted or moved, so that the line would be lost.
        """
        assert "step" in line, f"a line without a step: {sorted(line)}"
        self._file.append(dump_json(line, allow_nan=False).encode("ascii") + b"\n")
        self._after[line["step"]] = self._file.tally
        if not self._file.is_in_place:
            raise FileNotFoundError(
                f"{self._file.path} was deleted or moved while the run was writing to it, so "
                "later steps would be lost. Do not change run directories before their runs end."
            )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every complete line, in order.

    Raises:
        InvalidValue: A line is not a JSON object with a step.
    """
    with regular_file(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield parse_line(line, path, number)


def parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """Return the value of a line.

    Raises:
        InvalidValue: The line is not a JSON object with a step.
    """
    try:
        value = parse_json(line)
    except ValueError as error:
        raise damage_of_line(path, number, f"it is not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        raise damage_of_line(path, number, "it is not an object with an integer step")
    return value


def damage_of_line(path: Path, number: int, fault: str) -> InvalidValue:
    """Return the error about a damaged line."""
    return InvalidValue(
        f"{path}, line {number}",
        rule=f"{fault}, so the file was edited or damaged",
        fix=f"Restore the file from a copy. Without one, sed -i {number}d {path} removes the line: "
        "the file can be read again, but that step is missing, and checkpoints of that step or "
        "later cannot be resumed.",
    )


def _through(path: Path, step: int) -> Tally:
    """Return the tally of a file's lines up to a step."""
    tally = Tally()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") or parse_line(line, path, number)["step"] > step:
                break
            tally = tally.plus(line)
    return tally
