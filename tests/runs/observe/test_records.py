from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.runs.observe.records import RolloutRecord, RolloutWriter, read_rollouts

RECORD = RolloutRecord(
    step=3,
    group_id=17,
    index=2,
    prompt="12+30=",
    completion="42\n\x1b[31m é \ud800",  # what a model may well sample
    token_ids=[4, 2, 1],
    policy_versions=[1, 1, 2],
    staleness=1,
    reward=1.5,
    rewards={"exact": 1.0, "format": 0.5},
    advantage=-0.25,
    finish_reason="stop",
    row={"answer": "42", "level": 3},
)


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    writer = RolloutWriter(path)
    writer.write([RECORD, replace(RECORD, index=3)])
    writer.close()
    assert list(read_rollouts(path)) == [RECORD, replace(RECORD, index=3)]
    first = json.loads(path.read_text().splitlines()[0])
    assert first["token_ids"] == [4, 2, 1]
    assert first["rewards"] == {"exact": 1.0, "format": 0.5}


def test_training_that_goes_back_records_its_steps_again(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    writer = RolloutWriter(path)
    writer.write(replace(RECORD, step=step) for step in (1, 2, 2, 3))
    writer.go_back(1)
    writer.write([replace(RECORD, step=2, completion="again")])
    writer.close()
    assert [(record.step, record.completion) for record in read_rollouts(path)] == [
        (1, RECORD.completion),
        (2, "again"),
    ]


def test_a_resumed_run_records_its_lost_steps_again(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    crashed = RolloutWriter(path)
    crashed.write(replace(RECORD, step=step) for step in (1, 1, 2, 2, 3, 3))
    resumed = RolloutWriter(path, after_step=2)
    resumed.write([replace(RECORD, step=3, completion="again")])
    resumed.close()
    found = [(record.step, record.completion) for record in read_rollouts(path)]
    assert found == [*[(step, RECORD.completion) for step in (1, 1, 2, 2)], (3, "again")]


def test_a_row_of_anything_is_recorded(tmp_path: Path) -> None:
    row: Any = {
        "nan": math.nan,
        "day": date(2026, 1, 2),
        "image": bytes(100),
        "array": np.array([1.5, 2.5]),
        "messages": [{"role": "user", "content": None}],
        3: (True, 1),
    }
    writer = RolloutWriter(tmp_path / "rollouts.jsonl")
    writer.write([replace(RECORD, row=row)])
    writer.close()
    (found,) = read_rollouts(tmp_path / "rollouts.jsonl")
    assert str(found.row.pop("image")).endswith("...")  # type: ignore[attr-defined]
    assert found.row == {
        "nan": "nan",
        "day": "2026-01-02",
        "array": [1.5, 2.5],
        "messages": [{"role": "user", "content": None}],
        "3": [True, 1],
    }
