"""An append-only file of JSON lines, each of which carries the optimizer step that it belongs to.

In: mappings with an integer "step". Out: a file whose lines read back to the same numbers, bit for
bit (floats are written with repr).

A line counts once its newline is written. What a crash leaves behind the last newline is no line:
readers skip it, and a log that continues the file removes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any


class StepLog:
    """Appends lines to `path`; every line reaches the operating system before `append` returns.

    Lines of steps beyond `after_step` (where a resumed run starts again) are removed first, so that
    no step stands twice: the file is replaced by a shortened copy in one rename.
    """

    def __init__(self, path: Path, *, after_step: int = 0) -> None:
        self._path = path
        self._file = _open(path, after_step)

    def go_back(self, step: int) -> None:
        """Training went back to `step`: lines of later steps are removed."""
        self._file.close()
        self._file = _open(self._path, step)

    def append(self, line: Mapping[str, Any]) -> None:
        """Raises ValueError for NaN and infinities, which JSON has no numbers for, and
        FileNotFoundError where the file was deleted or moved away: the line would be lost."""
        assert "step" in line, f"a line without a step: {sorted(line)}"
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if not self._is_in_place():
            raise FileNotFoundError(
                f"{self._path} was deleted or moved while the run was writing to it, so that its "
                "steps cannot be kept; leave run directories alone until their runs have ended."
            )

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every complete line, in order. Raises ValueError naming a line that is no JSON object."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield _parse(line, path, number)


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{path}, line {number} is no JSON ({error}); restore the file or remove the line."
        ) from error
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        raise ValueError(
            f"{path}, line {number} is no object with an integer step; restore the file or remove "
            "the line."
        )
    return value


def _open(path: Path, after_step: int) -> IO[str]:
    if path.exists():
        _keep_through(path, after_step)
    return path.open("a", encoding="ascii")


def _keep_through(path: Path, step: int) -> None:
    shortened = path.with_name(path.name + ".tmp")
    with path.open("rb") as source, shortened.open("wb") as target:
        for number, line in enumerate(source, start=1):
            if line.endswith(b"\n") and _parse(line, path, number)["step"] <= step:
                target.write(line)
        target.flush()
        os.fsync(target.fileno())
    shortened.replace(path)
