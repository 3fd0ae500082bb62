from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.observe.wandb_sink import WandbSink


def test_offline_writes_into_the_run_directory_and_continues_its_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    ids = []
    for first_step in (1, 4):
        sink = WandbSink("offline", name="demo", directory=tmp_path, config={"seed": 0})
        for step in range(first_step, first_step + 3):
            sink.log({"step": step, "reward/mean": 0.123456789})
        sink.close()
        sink.close()
        ids.append((tmp_path / "wandb" / "run_id").read_text())
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) >= 1
    assert ids[0] == ids[1]
    assert all(file.stem == f"run-{ids[0]}" for file in files)
    written = b"".join(file.read_bytes() for file in files)
    assert b"reward/mean" in written
    assert b"0.123456789" in written


def test_off_imports_nothing(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from rlsys.observe.wandb_sink import WandbSink\n"
        "sink = WandbSink('off', name='n', directory=Path(sys.argv[1]), config={})\n"
        "sink.log({'step': 1}); sink.close()\n"
        "assert 'wandb' not in sys.modules\n"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=root, check=True, timeout=300
    )
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_an_error_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what import finds where it is not installed
    with pytest.raises(ValueError, match=r'observe.wandb="offline" needs .*rlsys\[wandb\]'):
        WandbSink("offline", name="n", directory=tmp_path, config={})
