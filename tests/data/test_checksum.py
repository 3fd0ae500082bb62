"""The checksum of rows finds every change."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes import arithmetic
from recipes.dpo import DPOConfig, dpo
from rlsys import DataConfig, ModelConfig, SamplingConfig, launch
from rlsys.config.fields import to_dict
from rlsys.data.prompts import TaskSource
from rlsys.data.row_checksum import rows_checksum
from rlsys.runs.run_directory import RunDirectory
from tests.errors import invalid
from tests.histories import made_up_run, write_run

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "answer": "2", "level": 1},
    {"prompt": "2+2=", "answer": "4", "level": 2},
]
PINNED = 4731270418219674258
PROGRAM = """
import json, sys
from rlsys.data.row_checksum import rows_checksum
print(rows_checksum(json.loads(sys.argv[1])))
"""


def test_it_is_pinned_and_the_same_in_any_process() -> None:
    """Later versions resume checkpoints of this one."""
    found = rows_checksum(ROWS)
    assert found == PINNED
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(ROWS)]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(other.stdout) == found


def test_a_table_and_a_list_of_the_same_rows_are_the_same() -> None:
    assert rows_checksum(datasets.Dataset.from_list(ROWS)) == rows_checksum(ROWS)


@pytest.mark.parametrize(
    "changed",
    [
        [ROWS[0], {**ROWS[1], "answer": "5"}],
        [ROWS[0], {**ROWS[1], "prompt": "2+3="}],
        [ROWS[1], ROWS[0]],
        [ROWS[0], {**ROWS[1], "level": "2"}],
        [ROWS[0], {**ROWS[1], "more": None}],
        [ROWS[0]],
        [ROWS[0], {**ROWS[1], "level": None}],
    ],
)
def test_any_change_is_found(changed: list[dict[str, Any]]) -> None:
    assert rows_checksum(changed) != rows_checksum(ROWS)


@given(
    st.lists(
        st.dictionaries(st.text(max_size=2), st.text(max_size=3), max_size=2),
        min_size=1,
        max_size=3,
    ),
    st.lists(
        st.dictionaries(st.text(max_size=2), st.text(max_size=3), max_size=2),
        min_size=1,
        max_size=3,
    ),
)
def test_equal_rows_and_only_these_are_equal(
    one: list[dict[str, str]], other: list[dict[str, str]]
) -> None:
    def whole(rows: list[dict[str, str]]) -> list[dict[str, str | None]]:
        names = {name for row in rows for name in row}
        return [{name: row.get(name) for name in names} for row in rows]

    assert (rows_checksum(one) == rows_checksum(other)) == (whole(one) == whole(other))


def test_values_that_json_lacks_count_by_what_they_hold() -> None:
    def of(value: object) -> int:
        return rows_checksum([{"value": value}])

    day = datetime.date(2026, 1, 1)
    assert of(day) == of(datetime.date(2026, 1, 1)) != of(datetime.date(2026, 1, 2))
    assert of(np.array([1, 2])) == of(np.array([1, 2])) != of(np.array([1, 3]))
    assert of(b"a") != of(b"b")
    assert of(object()) == of(object())  # its text contains an address


def tasks(path: Path) -> TaskSource:
    return TaskSource(DataConfig(source=str(path)), seed=0)


def test_a_file_whose_answers_changed_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    order = tasks(path).order
    tasks(path).check_order(order)
    tasks(path).check_order({"seed": 0, "num_prompts": 2})  # from a version without checksums
    path.write_text(path.read_text().replace('"4"', '"5"'))
    with invalid("checkpoint: checksum", order["checksum"]):
        tasks(path).check_order(order)


def test_a_resume_with_other_rows_is_refused_before_ray_starts(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    lines = [json.dumps({"prompt": f"{k}+1=", "completions": ["2", "3"]}) for k in range(9)]
    path.write_text("\n".join(lines))
    model = arithmetic.MODEL.build(tmp_path / "model", seed=0)
    cfg = DPOConfig(
        name="node",
        runs_dir=str(tmp_path),
        prompts_per_step=2,
        group_size=2,
        num_steps=99,
        data=DataConfig(source=str(path)),
        model=ModelConfig(path=str(model)),
        sampling=SamplingConfig(max_tokens=8),
    )
    order = {**tasks(path).order, "seed": cfg.seed}
    files = write_run(replace(made_up_run(4), prompt_order=order), tmp_path / "node")
    (files.hf / "exported.json").unlink(missing_ok=True)
    with RunDirectory(files.path) as directory:
        directory.write_config(to_dict(cfg))
    again = replace(cfg, resume=True)
    launch(again, dpo(again), dry_run=True)
    path.write_text("\n".join(lines).replace("8+1=", "8+2="))
    with invalid("checkpoint: checksum", order["checksum"]):
        launch(again, dpo(again), dry_run=True)
    with invalid("checkpoint: checksum", order["checksum"]):
        launch(again, dpo(again))
