"""`rlsys new`: the project that it writes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlsys.commands.new_command import main, write_project
from tests.commands.rlsys_process import ROOT
from tests.commands.rlsys_process import rlsys as run
from tests.commands.test_documented_commands import command_lines
from tests.errors import invalid

FILES = ["README.md", "config.toml", "recipe.py", "reward.py", "test_reward.py"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_project(tmp_path / "demo")
    return tmp_path / "demo"


def test_the_files(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(path.name for path in project.iterdir()) == FILES
    empty = project.parent / "empty"
    empty.mkdir()
    main([str(empty)])
    assert f"cd {empty} && rlsys run recipe.py" in capsys.readouterr().out
    assert [(empty / name).read_bytes() for name in FILES] == [
        (project / name).read_bytes() for name in FILES
    ]


def command_of_an_own_file(project: Path) -> list[str]:
    """Return the arguments of rlsys in the README's command for a file of one's own."""
    calls = [
        [name, *arguments]
        for name, arguments in command_lines(project / "README.md")
        if "--data.source" in arguments
    ]
    (call,) = calls
    return call


def without_model(call: list[str]) -> list[str]:
    """Return the command without --model.path and its value: it trains the small model."""
    place = call.index("--model.path")
    return call[:place] + call[place + 2 :]


@pytest.fixture
def differences(project: Path) -> Path:
    """Write 20 differences to rows.jsonl and teach the small model their characters."""
    rows = [{"prompt": f"{20 + n}-{n}=", "answer": "20"} for n in range(20)]
    (project / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = project / "recipe.py"
    text = recipe.read_text()
    assert text.count('"0123456789+="') == 1
    recipe.write_text(text.replace('"0123456789+="', '"0123456789-="'))
    return project


SMALL = (
    *("--sampling.max-tokens", "4", "--prompts-per-step", "4"),
    *("--num-steps", "2", "--trainer.warmup-steps", "0"),
)


def test_a_file_replaces_all_sums_of_the_project(differences: Path) -> None:
    """Sums would be refused: the model has no character +."""
    call = without_model(command_of_an_own_file(differences))
    shown = run(*call, *SMALL, "--dry-run", directory=differences)
    assert shown.returncode == 0, shown.stderr
    assert "warning" not in shown.stderr
    assert re.search(r"^# data: 16 prompts .*\n#   \d+-\d+=$", shown.stdout, re.MULTILINE)
    (held_out,) = re.findall(r"^# held-out data: (.*)$", shown.stdout, re.MULTILINE)
    assert held_out.startswith("4 rows of evaluation.source='rows.jsonl'")


@pytest.mark.slow
def test_the_command_for_an_own_file_evaluates_on_that_file(differences: Path) -> None:
    call = without_model(command_of_an_own_file(differences))
    ended = run(*call, *SMALL, "--evaluation.every", "1", directory=differences)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = (differences / "runs" / "own" / "evaluations.jsonl").read_text().splitlines()
    assert {json.loads(line)["eval/prompts"] for line in lines} == {4}


def test_a_wrong_character_of_the_small_model_is_reported_as_a_message(project: Path) -> None:
    recipe = project / "recipe.py"
    recipe.write_text(recipe.read_text().replace('"0123456789+="', '"0123456789+=0"'))
    shown = run("run", "recipe.py", "--dry-run", directory=project)
    assert shown.returncode == 1
    assert shown.stderr.startswith("error: OwnModel.characters=")
    assert "Traceback" not in shown.stderr


def test_a_directory_with_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text("mine")
    (tmp_path / ".hidden").touch()
    for directory in (tmp_path, tmp_path / "recipe.py"):
        with invalid("DIR", str(directory)):
            write_project(directory)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "recipe.py"]
    assert (tmp_path / "recipe.py").read_text() == "mine"


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file" / "demo", Path("/proc/demo")):
        with invalid("DIR", str(directory)):
            write_project(directory)


def python(*arguments: str, directory: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_test_of_the_reward_passes_and_can_fail(project: Path) -> None:
    pytest_command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".")
    python(*pytest_command, directory=project)
    reward = project / "reward.py"
    reward.write_text(reward.read_text().replace("==", "!="))
    with pytest.raises(AssertionError):
        python(*pytest_command, directory=project)


def test_the_code_has_the_projects_style(project: Path) -> None:
    code = [str(project / name) for name in FILES if name.endswith(".py")]
    python("-m", "ruff", "check", "--no-cache", "--ignore", "D103", *code, directory=ROOT)
    python("-m", "ruff", "format", "--no-cache", "--check", *code, directory=ROOT)


@pytest.mark.skipif(shutil.which("mypy") is None, reason="mypy is not installed")
@pytest.mark.slow
def test_the_code_has_types(project: Path) -> None:
    cache = str(project.parent / "mypy")
    options = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", cache)
    python("-m", "mypy", *options, "recipe.py", "test_reward.py", directory=project)


@pytest.mark.slow
def test_the_options_of_the_recipe_and_its_configuration(project: Path) -> None:
    shown = run("run", "recipe.py", "--help", directory=project)
    assert "--clip FLOAT" in shown.stdout
    assert tomllib.loads((project / "config.toml").read_text())["name"] == "longer"
    shown = run("run", "recipe.py", "--config", "config.toml", "--dry-run", directory=project)
    assert shown.returncode == 0, shown.stderr
    plan = tomllib.loads(shown.stdout)
    assert (plan["num_steps"], plan["evaluation"]["k"]) == (300, [1, 4])
    assert not (project / "runs").exists()
