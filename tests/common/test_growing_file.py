"""Files of records and the tallies of their beginnings."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.common import append_only_file
from rlsys.common.append_only_file import GrowingFile, Tally
from rlsys.common.atomic_files import DiskError, write_all


def test_a_tally_by_hand() -> None:
    tally = Tally().plus(b"ab\n").plus(b"c\n")
    assert tally == Tally(num_bytes=5, num_lines=2, crc32=zlib.crc32(b"ab\nc\n"))
    assert Tally.from_dict(tally.to_dict()) == tally


@pytest.mark.parametrize("entry", [{}, {"num_bytes": -1}, {"num_bytes": "1"}, {"lines": 1}])
def test_an_invalid_tally_is_refused(entry: dict[str, Any]) -> None:
    if entry:
        with pytest.raises((TypeError, ValueError)):
            Tally.from_dict(entry)
    else:
        assert Tally.from_dict(entry) == Tally()


@settings(max_examples=50, deadline=None)
@given(
    lines=st.lists(st.binary(max_size=5).map(lambda b: b.replace(b"\n", b"") + b"\n"), max_size=9),
    kept=st.integers(0, 9),
)
def test_a_file_has_the_appended_lines_without_the_truncated_ones(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], kept: int
) -> None:
    path = tmp_path_factory.mktemp("file") / "lines"
    file = GrowingFile(path, kept=Tally())
    tallies = [file.tally]
    for line in lines:
        file.append(line)
        tallies.append(file.tally)
    assert path.read_bytes() == b"".join(lines)
    assert [tally.fault(path) for tally in tallies] == [None] * len(tallies)
    file.cut(tallies[min(kept, len(lines))])
    file.close()
    assert path.read_bytes() == b"".join(lines[:kept])


def test_each_changed_byte_at_the_beginning_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    text = b'{"a": 1}\n{"b": 2}\n'
    tally = Tally().plus(text)
    for place in range(len(text)):
        path.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :] + b"more")
        assert "2 lines (18 bytes)" in (tally.fault(path) or "")
    path.write_bytes(text + b"more")
    assert tally.fault(path) is None


class FullDisk:
    """A file whose first write is incomplete and whose next one fails."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.is_full = False

    def write(self, data: bytes) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.is_full = True
        written: int = self.file.write(data[: len(data) // 2])
        return written


def test_a_failed_line_leaves_the_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    file = GrowingFile(path, kept=Tally())
    file.append(b"first\n")

    def write(file: Any, data: bytes) -> None:
        write_all(FullDisk(file), data)  # type: ignore[arg-type]

    monkeypatch.setattr(append_only_file, "write_all", write)
    with pytest.raises(DiskError) as raised:
        file.append(b"second\n")
    assert raised.value.errno == errno.ENOSPC
    assert str(path) in str(raised.value)
    assert path.read_bytes() == b"first\n"
    monkeypatch.undo()
    file.append(b"third\n")
    file.close()
    assert path.read_bytes() == b"first\nthird\n"
    assert file.tally.fault(path) is None
