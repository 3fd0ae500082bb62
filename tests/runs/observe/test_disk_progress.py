"""Progress of a directory that another process writes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rich.console import Console

from rlsys.common.atomic_directory import new_directory
from rlsys.common.manifest import faults_of, write_manifest
from rlsys.runs.observe import disk_progress
from rlsys.runs.observe.disk_progress import bytes_in, showing_bytes
from rlsys.runs.observe.phases import Phases


def test_the_bytes_of_an_unfinished_directory_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_progress, "POLL_S", 0.001)
    phase = Phases(Console(quiet=True), tick_s=None).phase("Exporting")
    update = phase.update_bytes

    async def export() -> None:
        shown = asyncio.Event()

        def update_bytes(done: int, total: int) -> None:
            update(done, total)
            shown.set()

        monkeypatch.setattr(phase, "update_bytes", update_bytes)
        with new_directory(tmp_path / "hf") as unfinished:
            (unfinished / "part").mkdir()
            (unfinished / "part" / "weights").write_bytes(b"x" * 3_000_000)
            async with showing_bytes(phase, tmp_path / "hf", 6_000_000):
                await shown.wait()

    with phase:
        asyncio.run(asyncio.wait_for(export(), 60))
    assert (phase.done, phase.total) == (3, 6)
    assert bytes_in(tmp_path / "hf") == 3_000_000
    assert bytes_in(tmp_path / "missing") == 0


def test_reading_all_files_of_a_directory_has_progress(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10)
    (tmp_path / "b").write_bytes(b"x" * 30)
    write_manifest(tmp_path)
    shown: list[tuple[int, int]] = []
    assert faults_of(tmp_path, on_bytes=lambda done, total: shown.append((done, total))) == []
    assert shown == [(10, 40), (40, 40)]
