"""Files and errors after a write that fails in its middle.

A limit on the size of files simulates a full disk.
"""

from __future__ import annotations

import contextlib
import errno
import json
import pickle
import resource
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsys.common.append_only_file import GrowingFile, Tally
from rlsys.common.atomic_files import DiskError, write_atomically, writing
from rlsys.common.manifest import (
    READ_BYTES,
    ManifestEntry,
    faults_of,
    read_manifest,
    write_manifest,
)
from rlsys.data.swarm.external_log import ExternalLog, read_external
from rlsys.data.swarm.shared_pool import SharedCompletion, SharedGroup
from rlsys.runs.observe.trace import Tracer
from rlsys.runs.observe.trace_file import TraceFile
from tests.errors import error_about


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def lines(path: Path) -> tuple[Callable[[], None], Any]:
    file = GrowingFile(path, kept=Tally())
    return lambda: file.append(b'{"step": 1}\n' * 9), file


def trace(path: Path) -> tuple[Callable[[], None], Any]:
    file = TraceFile(path)

    def write() -> None:
        tracer = Tracer("trainer 0")
        for _ in range(9):
            tracer.instant("x", "t")
        file.write(tracer.drain())

    return write, file


def external(path: Path) -> tuple[Callable[[], None], Any]:
    log = ExternalLog(path)
    group = SharedGroup(
        peer="p",
        group_id=1,
        asked="1+1",
        row={},
        rewards=[0.0],
        completions=[SharedCompletion(text="2" * 90, truncated=False)],
    )
    indices = iter(range(9))
    return lambda: log.decide(next(indices), group), log


def read_lines(path: Path) -> None:
    assert path.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize(
    ("opened", "read"),
    [
        (lines, read_lines),
        (trace, lambda path: json.loads(path.read_bytes())),
        (external, read_external),
    ],
)
@pytest.mark.parametrize("num_more", [0, 1, 3, 50])
def test_files_that_grow_stay_whole(
    tmp_path: Path, opened: Any, read: Callable[[Path], object], num_more: int
) -> None:
    path = tmp_path / "file"
    write, file = opened(path)
    write()
    before = path.read_bytes()
    with files_of_at_most(len(before) + num_more), pytest.raises(DiskError) as raised:
        write()
    assert raised.value.errno == errno.EFBIG
    for part in (str(path), f"{len(before) + num_more:,} bytes", "ulimit -f unlimited"):
        assert part in str(raised.value)
    assert path.read_bytes() == before
    write()
    read(path)
    file.close()


def test_a_file_is_complete_or_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for before in (None, "before"):
        with files_of_at_most(3), error_about(OSError) as raised:
            write_atomically(path, "longer")
        assert raised.value.errno == errno.EFBIG
        assert (path.read_text() if path.exists() else None) == before
        write_atomically(path, "before")
    assert list(tmp_path.iterdir()) == [path]


def test_a_manifest_is_complete_or_absent(tmp_path: Path) -> None:
    (tmp_path / "model").touch()
    with files_of_at_most(10), error_about(OSError) as raised:
        write_manifest(tmp_path)
    assert raised.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_checksum_of_a_file_of_several_parts_is_that_of_its_bytes(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(2 * READ_BYTES + 1)
    (tmp_path / "file").write_bytes(data)
    write_manifest(tmp_path)
    entry = ManifestEntry(bytes=len(data), crc32=f"{zlib.crc32(data):08x}")
    assert read_manifest(tmp_path) == {"file": entry}
    (tmp_path / "file").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert faults_of(tmp_path)


def test_an_error_is_pickled_with_its_number(tmp_path: Path) -> None:
    with pytest.raises(DiskError) as raised, writing(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value)
    assert again.errno == errno.ENOSPC
