"""Incremental reading of files of JSON lines, of which some may be damaged.

    LineFile.read() ── each new complete line ──► accept(value, offset)
                    └─ a line that cannot be used ──► damages

A live page calls `read` again: it continues where the file ended before. If the file was cut or
replaced meanwhile, `read` calls `restart` and begins again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import regular_file
from rlsys.common.safe_json import parse_json

MAX_SHOWN = 20  # damaged lines of a file that are described; all are counted
TAIL_BYTES = 256  # the end of what was read, to notice that the file was replaced


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A damaged line or file."""

    file: str
    line: int  # 0: the file as a whole
    fault: str


class LineFile:
    """Reader of one file.

    Args:
        path: The file. A missing file has no lines.
        accept: Gets each value and the offset of its line. Raises ValueError, KeyError or TypeError
            for a value that it cannot use.
        restart: Forgets what `accept` got.
        in_array: Whether the lines are the elements of one JSON array, as in trace.json.
    """

    def __init__(
        self,
        path: Path,
        accept: Callable[[Any, int], None],
        restart: Callable[[], None],
        *,
        in_array: bool = False,
    ) -> None:
        self._path = path
        self._accept = accept
        self._restart = restart
        self._in_array = in_array
        self._forget()

    def _forget(self) -> None:
        self.damages: list[Damage] = []
        self.num_damaged = 0
        self.num_lines = 0
        self._end = 0
        self._tail = b""

    def read(self) -> None:
        """Read what was appended since the last call."""
        try:
            with regular_file(self._path).open("rb") as file:
                file.seek(max(0, self._end - len(self._tail)))
                if file.read(len(self._tail)) != self._tail:
                    self._forget()
                    self._restart()
                    file.seek(0)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # still being written, or cut by a crash
                    self._take(line)
        except FileNotFoundError:
            if self._end:
                self._forget()
                self._restart()
        except (OSError, ValueError) as error:
            self._forget()
            self._restart()
            self._add_damage(0, str(error))

    def _take(self, line: bytes) -> None:
        offset = self._end
        content = line.strip()
        if self._in_array:
            content = content.rstrip(b",")
            if content == b"]":
                # The next event overwrites the line break before the bracket.
                self._end -= 1
                self._tail = self._tail[:-1]
                return
        self._end += len(line)
        self._tail = (self._tail + line)[-TAIL_BYTES:]
        if self._in_array and content in (b"", b"["):
            return
        self.num_lines += 1
        try:
            self._accept(parse_json(content), offset)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            self._add_damage(self.num_lines, f"{type(error).__name__}: {error}"[:200])

    def _add_damage(self, line: int, fault: str) -> None:
        self.num_damaged += 1
        if len(self.damages) < MAX_SHOWN:
            self.damages.append(Damage(file=self._path.name, line=line, fault=fault))
