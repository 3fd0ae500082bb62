"""Files of records that grow line by line, and can be truncated to an earlier length.

    StepLog, LedgerFile ── lines ──► GrowingFile ──► Tally ──► controller.json of a checkpoint
                                         Tally.fault(path) ◄── the run that resumes from it

A checkpoint records the length and the checksum of each file. When a run resumes, it reads these
bytes again to check that the file still starts with them, at one or two GB per second.
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
from rlsys.errors import InvalidValue

READ_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Length and checksum of the beginning of a file, which ends with a complete line."""

    num_bytes: int = 0
    num_lines: int = 0
    crc32: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or value < 0:
                raise ValueError(f"{name}={value!r} is not a count")

    def plus(self, lines: bytes) -> Self:
        """Return the tally after appending these bytes."""
        return type(self)(
            num_bytes=self.num_bytes + len(lines),
            num_lines=self.num_lines + lines.count(b"\n"),
            crc32=zlib.crc32(lines, self.crc32),
        )

    def to_dict(self) -> dict[str, int]:
        """Return the numbers as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Self:
        """Return the inverse of `to_dict`.

        Raises:
            TypeError: A key is missing or unknown.
            ValueError: A value is not a count.
        """
        return cls(**entry)

    @classmethod
    def of(cls, path: Path, num_bytes: int) -> Self:
        """Return the tally of the first `num_bytes` of a file, or of the file if it is shorter."""
        tally = cls()
        with regular_file(path).open("rb", buffering=0) as file:
            while chunk := file.read(min(READ_BYTES, num_bytes - tally.num_bytes)):
                tally = tally.plus(chunk)
        return tally

    def fault(self, path: Path) -> str | None:
        """Return what is wrong with a file that should start like this, or None."""
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
    """A file to which lines are appended. It is created if missing.

    The constructor truncates it to `kept`, which must be the tally of its beginning. Appended lines
    have reached the operating system, but not necessarily the disk.
    """

    def __init__(self, path: Path, *, kept: Tally) -> None:
        self.path = path
        self.tally = kept  # of the whole file
        self._file = path.open("ab", buffering=0)
        self.cut(kept)

    def append(self, line: bytes) -> None:
        """Append a line, which ends with a newline.

        Raises:
            DiskError: The line cannot be written. The file is as before.
        """
        with writing(self.path):
            try:
                write_all(self._file, line)
            except OSError:
                self.cut(self.tally)
                raise
        self.tally = self.tally.plus(line)

    def cut(self, kept: Tally) -> None:
        """Truncate the file to an earlier state."""
        self._file.truncate(kept.num_bytes)
        self.tally = kept

    @property
    def is_in_place(self) -> bool:
        """True if `path` still refers to this file."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def regular_file(path: Path) -> Path:
    """Return the path of a file that is safe to read; reading a pipe or a device may never end.

    Raises:
        InvalidValue: The path exists and is not a regular file.
    """
    if path.exists() and not path.is_file():
        raise InvalidValue(
            str(path), rule="is not a regular file", fix="Remove it, or put a regular file there."
        )
    return path


def _first_broken_line(path: Path, num_bytes: int) -> str | None:
    """Return a description of the first line that is not JSON, or None."""
    read = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                parse_json(line)
            except ValueError as error:
                return f"line {number} is not JSON ({error})"
            read += len(line)
            if read >= num_bytes:
                break
    return None
