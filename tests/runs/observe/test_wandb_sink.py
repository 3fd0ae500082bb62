from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsys.runs.observe.wandb_sink import WandbSink
from tests.errors import invalid


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


HEADER_BYTES, BLOCK_BYTES, RECORD_HEADER = 7, 32768, "<IHB"  # of wandb's file, in LevelDB's format
FULL, LAST = 1, 4  # kinds of records that end a message


def messages(data: bytes) -> Iterator[bytes]:
    at, message = HEADER_BYTES, b""
    header = struct.calcsize(RECORD_HEADER)
    while at + header <= len(data):
        if (left := BLOCK_BYTES - at % BLOCK_BYTES) < header:
            at += left
            continue
        _, length, kind = struct.unpack_from(RECORD_HEADER, data, at)
        message += data[at + header : at + header + length]
        at += header + length
        if kind in (FULL, LAST):
            yield message
            message = b""


def read_back(directory: Path) -> tuple[list[dict[str, float]], dict[str, str]]:
    """Return the lines of all offline runs, without wandb's own values, and the axis of each
    metric."""
    from wandb.proto import wandb_internal_pb2

    lines: list[dict[str, float]] = []
    axes: dict[str, str] = {}
    for file in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for message in messages(file.read_bytes()):
            record: Any = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            if record.WhichOneof("record_type") == "metric":
                axes[record.metric.name] = record.metric.step_metric
            elif record.WhichOneof("record_type") == "history":
                items = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                lines.append({name: x for name, x in items.items() if not name.startswith("_")})
    return lines, axes


def test_every_evaluation_arrives_whenever_it_ends(tmp_path: Path) -> None:
    """Evaluations of steps 0 and 2 end before step 3 is logged, that of 6 after the last step."""
    pytest.importorskip("wandb")

    def evaluation(step: int) -> dict[str, float]:
        return {"step": step, "eval/pass@1": step / 10, "time/evaluation_s": 1.5}

    sink = WandbSink("offline", name="demo", directory=tmp_path, config={})
    for what in ("1", "2", "e0", "e2", "3", "e3", "4", "5", "e4", "6", "e6"):
        step = int(what.removeprefix("e"))
        if what.startswith("e"):
            sink.log_evaluation(evaluation(step))
        else:
            sink.log({"step": step, "reward/mean": step / 2})
    sink.close()

    lines, axes = read_back(tmp_path)
    trained = [line for line in lines if "reward/mean" in line]
    assert trained == [{"step": step, "reward/mean": step / 2} for step in range(1, 7)]
    assert [line for line in lines if line not in trained] == [
        {"eval/step": step, "eval/pass@1": step / 10, "time/evaluation_s": 1.5}
        for step in (0, 2, 3, 4, 6)
    ]
    assert axes == {
        "step": "",
        "reward/mean": "step",
        "eval/step": "",
        "eval/pass@1": "eval/step",
        "time/evaluation_s": "eval/step",
    }


def test_off_imports_nothing(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from rlsys.runs.observe.wandb_sink import WandbSink\n"
        "sink = WandbSink('off', name='n', directory=Path(sys.argv[1]), config={})\n"
        "sink.log({'step': 1}); sink.close()\n"
        "assert 'wandb' not in sys.modules\n"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=root, check=True, timeout=300
    )
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_an_error_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what import finds where it is not installed
    with invalid("observe.wandb", "offline") as error:
        WandbSink("offline", name="n", directory=tmp_path, config={})
    assert "rlsys[wandb]" in error.value.fix
