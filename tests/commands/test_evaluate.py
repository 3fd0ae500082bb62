from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rlsys.commands.evaluate_command import full_options
from rlsys.commands.evaluate_command import main as run
from rlsys.config.command_line import parse
from rlsys.errors import NOT_GIVEN
from rlsys.evaluation.model_evaluation import EvaluationConfig
from rlsys.launcher.tiny_models import build_tiny_model
from tests.errors import invalid

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("evaluate")
    build_tiny_model(
        directory / "model", characters="0123456789+=", width=16, num_layers=1, max_context=64
    )
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        str(directory / "model"),
        *("--data", str(directory / "data.jsonl"), "--data.max-prompt-tokens", "32"),
        *("--sampling.max-tokens", "4", "--rollout.kv-cache-gib", "0.01"),
    ]


def test_short_options() -> None:
    given = ["m", "--data", "d", "--reward=r", "--samples", "2", "--reward.timeout-s", "3"]
    assert full_options(given) == [
        *("--model.path", "m", "--data.source", "d", "--rewards=r"),
        *("--num-samples", "2", "--reward.timeout-s", "3"),
    ]
    assert full_options(["--help"]) == ["--help"]


def test_the_documented_commands_are_accepted() -> None:
    text = (ROOT / "docs" / "evaluation.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^rlsys evaluate ([^`\n]*)", text, re.MULTILINE)
    scored, played, *_ = (
        parse(EvaluationConfig, full_options(shlex.split(arguments))).config
        for arguments in commands
        if "--tasks" not in arguments  # published benchmarks have options of their own
    )
    assert (scored.num_samples, scored.k, scored.data.split) == (8, (1, 4), "test")
    assert (played.environment, played.rewards) == ("my_game.py:game", ())


def test_a_table_json_last_and_the_samples(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "mine.py"
    own.write_text("def always(rollout):\n    return 1.0\n")
    out = tmp_path / "samples.jsonl"
    options = ["--reward", f"exact_match,{own}:always", "--samples", "3", "--k", "1,3"]
    run([*command, *options, "--right-at", "1.0", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "4 prompts, 3 samples each" in printed
    report = json.loads(printed.splitlines()[-1])
    assert report["eval/pass@1"] == report["eval/pass@3"] == 1.0
    assert report["eval/pass@3/low"] < 1.0
    assert report["engine"] == "torch"
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 12
    assert all(line["components"]["always"] == 1.0 for line in lines)
    assert all(line["score"] == 1.0 + line["components"]["exact_match"] for line in lines)
    assert {line["prompt_index"] for line in lines} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("score", "options", "hinted"),
    [
        (0.9, [], ["0.9"]),
        (0.123456789, [], ["0.123456789"]),  # fewer digits would be a higher threshold
        (0.9, ["--right-at", "0.9"], []),
        (0.0, [], []),
    ],
)
def test_a_threshold_above_all_scores_gives_a_hint(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    score: float,
    options: list[str],
    hinted: list[str],
) -> None:
    own = tmp_path / "mine.py"
    own.write_text(f"def costly(rollout):\n    return {score}\n")
    run([*command, "--reward", f"{own}:costly", *options])
    printed = capsys.readouterr().out
    assert re.findall(r"--right-at ([0-9.]+)", printed) == hinted


GAME = """
import rlsys

@rlsys.environment(turn_tokens=2, plain_text=True)
def game(chat, task):
    chat(task["prompt"])
    chat("+")
    return {"first": 1.0, "answer": float(task["answer"])}

async def bare(chat, task):
    return float(len(await chat(task["prompt"])) > 9)
"""


def test_an_environment_is_played(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "mine.py"
    own.write_text(GAME)
    out = tmp_path / "samples.jsonl"
    options = ["--environment", f"{own}:game", "--samples", "2", "--sampling.max-tokens", "8"]
    run([*command, *options, "--out", str(out)])
    printed = capsys.readouterr().out
    assert "4 tasks, 2 samples each" in printed
    report = json.loads(printed.splitlines()[-1])
    assert report["eval/mean@2"] == 3.5
    assert report["eval/answer/mean"] == 2.5
    assert report["eval/answer/mean/low"] < 2.5 < report["eval/answer/mean/high"]
    assert report["environment"] == f"{own}:game"
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 8
    assert all([turn["sampled"] for turn in line["turns"]] == [False, True] * 2 for line in lines)
    run([*command, "--environment", f"{own}:bare"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["eval/mean@1"] == 0.0


def test_a_dry_run_prints_the_configuration_and_a_prompt(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "samples.jsonl"
    run([*command, "--reward", "exact_match", "--out", str(out), "--dry-run"])
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["rewards"] == ["exact_match"]
    assert "# 4 prompts" in printed
    assert "# 0+1=" in printed
    assert not out.exists()
    own = tmp_path / "mine.py"
    own.write_text(f"{GAME}\nprint('loaded')\n")
    run([*command, "--environment", f"{own}:game", "--dry-run"])
    captured = capsys.readouterr()
    assert '# {"prompt": "0+1=", "answer": "1"}' in captured.out
    assert tomllib.loads(captured.out)["environment"] == f"{own}:game"
    assert "loaded" in captured.err


def test_the_help_describes_this_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["--help"])
    text = capsys.readouterr().out
    assert "--dry-run [true|false]" in text
    assert "No weights" in text
    assert "placement" not in text


@pytest.mark.slow
def test_the_exit_code_of_a_dry_run(command: list[str], tmp_path: Path) -> None:
    """The real program: 1 for a mistake, 0 without one."""

    def exit_code(*arguments: str) -> int:
        program = [sys.executable, "-m", "rlsys", "evaluate"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        options = ["--reward", "exact_match", "--dry-run"]
        return subprocess.run([*program, *arguments, *options], env=environment).returncode

    assert exit_code(*command) == 0
    assert exit_code(str(tmp_path / "nomodel"), "--data", "nope.jsonl") == 1


def test_a_dry_run_checks_like_a_start(command: list[str], tmp_path: Path) -> None:
    reward = ["--reward", "exact_match"]
    for arguments, name in (
        ([str(tmp_path / "nomodel"), *command[1:], *reward], "nomodel"),
        ([command[0], "--data", str(tmp_path / "nope.jsonl"), *reward], r"nope\.jsonl"),
        ([*command, "--reward", "exact_match:solution"], "solution"),
        ([*command, *reward, "--out", str(tmp_path / "nowhere" / "a.jsonl")], "--out"),
        ([*command, *reward, "--sampling.max-tokens", "9999"], "9999"),
        ([*command, *reward, "--num-prompts", "5"], "num_prompts=5"),
    ):
        with pytest.raises(ValueError, match=name):
            run([*arguments, "--dry-run"])


def test_k_beyond_the_samples_is_refused_at_once(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run([*command, "--reward", "exact_match", "--samples", "2", "--k", "4"])
    assert "k=4: must be at most num_samples=2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ([], "--reward", NOT_GIVEN),
        (["--dry-run"], "--reward", NOT_GIVEN),
        (["--reward", "exact_match", "--out", "/nowhere/a"], "--out", "/nowhere/a"),
        (["--environment", "a:b", "--reward", "c"], "--reward", "c"),
    ],
)
def test_impossible_options_are_refused(
    command: list[str], options: list[str], field: str, value: Any
) -> None:
    with invalid(field, value):
        run([*command, *options])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--reward", "exact"], "'exact'"),
        (["--reward", "exact_match:solution"], "'solution'"),
        (["--environment", "game"], "'game'"),
        (["--environment", "x.py:game"], "x.py"),
    ],
)
def test_wrong_names_of_functions_and_columns_are_quoted(
    command: list[str], options: list[str], name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        run([*command, *options])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seats", "second=m"], "seats=('second=m',):"),
        (["--environment", "a:b", "--seats", "m"], "seats='m':"),
        (
            ["--environment", "a:b", "--seats", "x=m", "--frozen-seats", "x=n"],
            "frozen_seats='x=n':",
        ),
    ],
)
def test_mistakes_in_seats_name_the_option(
    command: list[str], options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run([*command, *options])
    assert words in capsys.readouterr().err
