from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsys.commands.fit_command import main as run
from rlsys.commands.fit_command import options
from rlsys.launcher.tiny_models import build_tiny_model
from tests.errors import invalid
from tests.evaluation.scaling.synthetic_curves import power, steps
from tests.evaluation.scaling.test_prediction import REAL_RUN

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "quickstart"
    directory.mkdir()
    (directory / "metrics.jsonl").write_bytes(REAL_RUN.read_bytes())
    return directory


def test_the_documented_command_is_accepted() -> None:
    text = (ROOT / "docs" / "scaling.md").read_text()
    (arguments,) = re.findall(r"^rlsys fit ([^`\n]*)", text, re.MULTILINE)
    given = options().parse_args(shlex.split(arguments))
    assert (given.held_out, given.until, given.law) == (0.33, 4.0, "sigmoid")


def test_a_run_is_fitted_printed_and_drawn(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run([str(run_dir), "--held-out", "0.33", "--until", "4"])
    printed = capsys.readouterr().out
    assert "held out: 82 points" in printed
    report = json.loads(printed.splitlines()[-1])
    (of_run,) = report["runs"]
    assert of_run["law"] == "sigmoid"
    assert of_run["limits"] == [0, 1]
    assert of_run["predicted"]["at"] == 1000
    assert 0.9 < of_run["parameters"]["A"]["value"] <= 1
    assert report["picture"] == str(run_dir / "fit.svg")
    assert (run_dir / "fit.svg").read_bytes().startswith(b"<?xml")


def test_runs_of_several_sizes_give_k_of_n(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    directories = []
    for width, k in ((16, 0.1), (32, 0.2)):
        directory = tmp_path / f"width-{width}"
        build_tiny_model(directory / "hf", width=width, num_layers=1, num_heads=1, num_kv_heads=1)
        reward = power(steps(100), k=k, E=-0.3) + 0.005 * rng.standard_normal(100)
        lines = [{"step": i + 1, "reward/mean": value} for i, value in enumerate(reward)]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        directories.append(str(directory))
    run([*directories, "--law", "power", "--out", str(tmp_path / "both.png")])
    printed = capsys.readouterr().out
    assert "k(N) = K_max / (1 + N_0/N)" in printed
    report = json.loads(printed.splitlines()[-1])
    assert set(report["sizes"]) == {"k_max", "n_0"}
    assert [one["parameters"]["k"]["low"] for one in report["runs"]] < [0.1, 0.2]
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["nowhere"], "RUN", "nowhere"),
        (["RUN", "--out", "a.bmp"], "--out", "a.bmp"),
        (["RUN", "--metric", "reward/men"], "--metric", "reward/men"),
        (["RUN", "--limits", "one"], "--limits", "one"),
        (["RUN", "--limits", "\u0660,\u0661"], "--limits", "\u0660,\u0661"),
        (["RUN", "--held-out", "0.94"], "quickstart, reward/mean: points", 3),
    ],
)
def test_mistakes_name_the_option(
    run_dir: Path, arguments: list[str], field: str, value: Any
) -> None:
    with invalid(field, value):
        run([str(run_dir) if argument == "RUN" else argument for argument in arguments])


def test_without_matplotlib_the_command_to_install_it_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what import finds without it
    with invalid("--out") as error:
        run([str(run_dir)])
    assert "pip install 'rlsys[plot]'" in error.value.fix


def test_the_command_reports_a_mistake_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": NaN}\n')
    command = [sys.executable, "-m", "rlsys", "fit", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: reward/mean=nan: ")
    assert ended.stderr.count("\n") == 1
