"""Files of records: they grow line by line, or are cut back to what they were before.

    StepLog, LedgerFile ── lines ──► GrowingFile ──► Tally ──► a checkpoint's controller.json
                                         Tally.fault(path) ◄── the run that resumes from it

So what a file held when a checkpoint was written stays its beginning, byte for byte, and whether it
still is costs one reading of these bytes, without understanding a line: a second per GB or two.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rlsys.common.atomic_files import write_all, writing
from rlsys.common.safe_json import parse_json

READ_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Of a file's beginning, which ends with a line."""

    num_bytes: int = 0
    num_lines: int = 0
    crc32: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or value < 0:
                raise ValueError(f"{name}={value!r} is no count")

    def plus(self, lines: bytes) -> Self:
        """With these bytes behind it."""
        return type(self)(
            num_bytes=self.num_bytes + len(lines),
            num_lines=self.num_lines + lines.count(b"\n"),
            crc32=zlib.crc32(lines, self.crc32),
        )

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Self:
        """Raises TypeError or ValueError for what `to_dict` did not make."""
        return cls(**entry)

    @classmethod
    def of(cls, path: Path, num_bytes: int) -> Self:
        """Of the first `num_bytes` of a file, or of all that it has."""
        tally = cls()
        with ordinary(path).open("rb", buffering=0) as file:
            while chunk := file.read(min(READ_BYTES, num_bytes - tally.num_bytes)):
                tally = tally.plus(chunk)
        return tally

    def fault(self, path: Path) -> str | None:
        """What is wrong with a file that should begin so; None if it does."""
        try:
            found = self.of(path, self.num_bytes)
        except FileNotFoundError:
            return "is missing"
        except (OSError, ValueError) as error:
            return f"cannot be read ({error})"
        if found == self:
            return None
        if found.num_bytes < self.num_bytes:
            return (
                f"has {found.num_lines:,} lines ({found.num_bytes:,} bytes) where there were "
                f"{self.num_lines:,} ({self.num_bytes:,} bytes): it was cut"
            )
        broken = _first_broken_line(path, self.num_bytes)
        return (
            f"does not begin with the {self.num_lines:,} lines ({self.num_bytes:,} bytes) that it "
            f"had{f': {broken}' if broken else ''}; it was edited or damaged"
        )


class GrowingFile:
    """The file at `path`, made where there is none. It is cut to `kept` first, which must be its
    beginning. What was appended has reached the operating system.
    """

    def __init__(self, path: Path, *, kept: Tally) -> None:
        self.path = path
        self.tally = kept  # of all that is there
        self._file = path.open("ab", buffering=0)
        self.cut(kept)

    def append(self, line: bytes) -> None:
        """A line, with its end. On a full disk nothing of it stays, and DiskError tells the fix."""
        with writing(self.path):
            try:
                write_all(self._file, line)
            except OSError:
                self.cut(self.tally)
                raise
        self.tally = self.tally.plus(line)

    def cut(self, kept: Tally) -> None:
        """Back to what was there before."""
        self._file.truncate(kept.num_bytes)
        self.tally = kept

    @property
    def is_in_place(self) -> bool:
        """Whether `path` still leads to it."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        self._file.close()


def ordinary(path: Path) -> Path:
    """The path, if it may be opened: a pipe or a device would never come to an end. Raises
    ValueError for one.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no ordinary file")
    return path


def _first_broken_line(path: Path, num_bytes: int) -> str | None:
    """The first line that is no JSON, for people to look at."""
    read = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                parse_json(line)
            except ValueError as error:
                return f"line {number} is no JSON ({error})"
            read += len(line)
            if read >= num_bytes:
                break
    return None
