"""Whether a model was exported to its end."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import pytest

from rlsys.common.atomic_files import DiskError
from rlsys.common.manifest import write_manifest
from rlsys.runs.export_seal import (
    EarlyEnd,
    early_end,
    export_faults,
    exported_step,
    is_exported,
    seal_export,
)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_an_early_end_is_final_until_its_conditions_change(hf: Path) -> None:
    end = EarlyEnd(reason="solved", num_steps=100, stop_when=("reward/mean > 0.9",))
    seal_export(hf, 12, run_id="own", early_end=end)
    assert early_end(hf) == end
    assert exported_step(hf) == 12
    assert export_faults(hf, run_id="own") == []
    assert is_exported(hf, 100, ["reward/mean > 0.9"])
    assert not is_exported(hf, 100)
    assert not is_exported(hf, 12, ["reward/mean > 0.9"])
    assert not is_exported(hf, 200, ["reward/mean > 0.9"])
    sealed = (hf / "exported.json").read_text()
    (hf / "exported.json").write_text(sealed.replace("solved", "edited"))
    assert exported_step(hf) is None


def test_a_usual_end_does_not_depend_on_conditions(hf: Path) -> None:
    seal_export(hf, 12, run_id="own")
    assert early_end(hf) is None
    assert is_exported(hf, 12)
    assert is_exported(hf, 12, ["reward/mean > 0.9"])
    assert not is_exported(hf, 13)


def test_only_a_sealed_export_counts(hf: Path) -> None:
    assert exported_step(hf) is None
    assert export_faults(hf, run_id="own") == ["exported.json is missing or damaged"]
    seal_export(hf, 12, run_id="own")
    assert exported_step(hf) == 12
    assert export_faults(hf, run_id="own") == []


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "model.safetensors is missing"),
        (b"weight", "model.safetensors has 6 bytes instead of 7"),
        (b"weighty", "model.safetensors has another checksum than when it was written"),
    ],
)
def test_damage_is_found_by_name(hf: Path, content: bytes | None, fault: str) -> None:
    seal_export(hf, 12, run_id="own")
    (hf / "model.safetensors").unlink()
    if content is not None:
        (hf / "model.safetensors").write_bytes(content)
    assert export_faults(hf, run_id="own") == [fault]


def test_the_model_of_another_run_is_refused(hf: Path) -> None:
    seal_export(hf, 12, run_id="other")
    assert export_faults(hf, run_id="other") == []
    (fault,) = export_faults(hf, run_id="own")
    assert '"other"' in fault
    assert '"own"' in fault
    sealed = (hf / "exported.json").read_text()
    (hf / "exported.json").write_text(sealed.replace("other", "own"))
    assert export_faults(hf, run_id="own") == ["exported.json is missing or damaged"]
    seal = '{"step": 12, "crc32": ' + str(zlib.crc32(b"12")) + "}"
    (hf / "exported.json").write_text(seal)  # of before it had a run
    assert export_faults(hf, run_id="own") == ["exported.json is missing or damaged"]


def test_other_files_with_their_manifest_are_found(hf: Path) -> None:
    seal_export(hf, 12, run_id="own")
    (hf / "model.safetensors").write_bytes(b"another")
    write_manifest(hf)
    (fault,) = export_faults(hf, run_id="own")
    assert "manifest.json" in fault


@pytest.mark.parametrize("name", ["manifest.json", "exported.json"])
def test_a_seal_that_does_not_end_leaves_none(
    hf: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = os.fsync

    def full(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.startswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError) as refused:
        seal_export(hf, 12, run_id="own")
    assert refused.value.errno == errno.ENOSPC
    assert exported_step(hf) is None
    assert not (hf / name).exists()
    monkeypatch.setattr(os, "fsync", real)
    seal_export(hf, 12, run_id="own")
    assert export_faults(hf, run_id="own") == []
    assert not list(hf.glob("*.tmp"))


def test_added_files_do_no_harm(hf: Path) -> None:
    seal_export(hf, 12, run_id="own")
    (hf / "README.md").write_text("a model card")
    assert export_faults(hf, run_id="own") == []
