"""Tutorials that are notebooks: their form, and their cells run as a reader runs them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.run_notebook import MAX_LINES, run, with_outputs
from tests.e2e.job import ROOT, start_command

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_plain_python_and_shows_its_output(path: Path) -> None:
    assert path.stat().st_size < 50_000
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    for cell in code:
        ast.parse("".join(cell["source"]))  # no magics and shell commands
        for output in cell["outputs"]:
            assert output["output_type"] == "stream"  # no traceback, no picture
            assert len(output["text"]) <= MAX_LINES + 1
    shown = "".join(text for cell in code for one in cell["outputs"] for text in one["text"])
    assert "reward of the first 10 steps" in shown
    assert str(ROOT) not in shown


def notebook(*sources: str) -> dict[str, Any]:
    return {"cells": [{"cell_type": "code", "source": [one], "outputs": []} for one in sources]}


def test_cells_share_their_names_and_are_the_main_program() -> None:
    before = sys.modules["__main__"]
    try:
        printed = run(notebook("x = 20\nprint(__name__)", "print(x + 1)", "x = 0"), "test")
    finally:
        sys.modules["__main__"] = before
    assert printed == ["__main__\n", "21\n", ""]


def test_a_long_output_loses_its_middle() -> None:
    long = "".join(f"{number}\n" for number in range(100))
    first, second = with_outputs(notebook("a", "b"), [long, ""])["cells"]
    assert first["outputs"][0]["text"] == [
        *(f"{number}\n" for number in range(MAX_LINES // 2)),
        "...\n",
        *(f"{number}\n" for number in range(100 - MAX_LINES // 2, 100)),
    ]
    assert second["outputs"] == []


def test_a_cell_that_raises_ends_the_program(tmp_path: Path) -> None:
    path = tmp_path / "bad.ipynb"
    path.write_text(json.dumps(notebook("print(1)", "1 / 0")))
    command = [sys.executable, str(ROOT / "scripts" / "run_notebook.py"), str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "bad.ipynb, cell 2" in ended.stderr
    assert "ZeroDivisionError" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    """Its cells assert that the reward rises."""
    script = str(ROOT / "scripts" / "run_notebook.py")
    job = start_command([sys.executable, script, str(path)], tmp_path, tmp_path)
    try:
        assert job.wait(1800) == 0, job.output
        assert job.left_behind() == {}, job.output
    finally:
        job.end()
