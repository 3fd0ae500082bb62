"""Checks of held-out data in a dry run: errors, a warning, and what is printed about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlsys
from rlsys.launcher.tiny_models import OwnModel
from tests.errors import invalid
from tests.launch.small_run import ROWS, small_flow


def dry_run(
    tmp_path: Path, rows: Any, data: rlsys.DataConfig, held_out: rlsys.HeldOut | None, source: str
) -> None:
    config = rlsys.RunConfig(
        prompts_per_step=4,
        group_size=2,
        runs_dir=str(tmp_path / "runs"),
        data=data,
        evaluation=rlsys.HeldOutConfig(every=5, source=source),
    )
    flow = small_flow(config, rows)
    rlsys.launch(config, flow, own_model=OwnModel(name="own"), held_out=held_out, dry_run=True)


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_column_that_only_held_out_rows_lack_is_to_be_renamed_there(tmp_path: Path) -> None:
    """Another data.prompt_column would not fit the training rows."""
    data = rlsys.DataConfig(prompt_column="task")
    training = [{"task": row["prompt"], "answer": row["answer"]} for row in ROWS]
    with invalid("data.prompt_column", "task") as found:
        dry_run(tmp_path, training, data, rlsys.HeldOut(rows=ROWS), "")
    assert "HeldOut.rows" in found.value.fix
    file = written(tmp_path / "held_out.jsonl", ROWS)
    with invalid("data.prompt_column", "task") as found:
        dry_run(tmp_path, training, data, None, file)
    assert "evaluation.source" in found.value.fix
    with invalid("data.prompt_column", "task") as found:  # here the option is wrong
        dry_run(tmp_path, ROWS, data, None, file)
    assert "evaluation.source" not in found.value.fix


@pytest.mark.parametrize("is_file", [True, False])
def test_held_out_rows_of_the_recipe_next_to_a_training_file_cause_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_file: bool
) -> None:
    file = written(tmp_path / "rows.jsonl", ROWS) if is_file else ""
    data = rlsys.DataConfig(source=file)
    dry_run(tmp_path, None if is_file else ROWS, data, rlsys.HeldOut(rows=ROWS[:2]), "")
    printed = capsys.readouterr()
    assert ("HeldOut" in printed.err) == is_file
    assert "# held-out data: 2 rows of the recipe" in printed.out


def test_a_dry_run_names_the_file_of_the_held_out_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "held_out.jsonl", ROWS[:3])
    dry_run(tmp_path, ROWS, rlsys.DataConfig(), None, file)
    assert f"# held-out data: 3 rows of evaluation.source={file!r}\n" in capsys.readouterr().out
