"""Recipes of the arithmetic task: their graphs and their settings."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import rlsys
from recipes import programs, sums_in_words
from recipes.arithmetic import model_of_previous_run
from recipes.dapo import penalised_advantage
from recipes.swarm_nodes import ENDING, node_options, run_nodes
from rlsys.algorithms import grpo_advantage
from rlsys.config import DataConfig, ObserveConfig
from rlsys.config.command_line import parse
from rlsys.config.fields import to_dict
from rlsys.dataflow.graph.stages import PerGroupStage, TrainStage
from rlsys.errors import InvalidValue
from rlsys.runs.run_files import RunFiles
from tests.errors import error_about, invalid
from tests.small_recipes import SMALL_RECIPES, config_of, graph_of
from tests.test_contracts import CONFIGS
from tests.tiers import rest_slow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", SMALL_RECIPES)
def test_a_recipe_is_one_page_with_a_valid_graph(name: str) -> None:
    assert len((ROOT / "recipes" / f"{name}.py").read_text().splitlines()) <= 120
    flow = graph_of(name)
    flow.check()
    drawn = flow.to_mermaid().splitlines()
    assert drawn[0] == "flowchart LR"
    named = set(re.findall(r"^    (s\d+)\[", "\n".join(drawn), re.MULTILINE))
    assert len(named) == len(flow.stages)
    assert set(re.findall(r"\b(s\d+)\b", "\n".join(drawn))) == named
    assert any("weights, version v+1" in line for line in drawn)
    assert config_of(name)().name == name  # so that two recipes do not share a directory


class PreviousRun:
    """A run whose model another run starts with."""

    def __init__(self, runs_dir: Path) -> None:
        self.cfg = config_of("ppo")(name="a", runs_dir=str(runs_dir), resume=True)
        self.own, self.previous = RunFiles(runs_dir / "a"), RunFiles(runs_dir / "a-judge")
        self.num_trained = 0

    def train(self) -> Any:
        self.num_trained += 1
        self.previous.hf.mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(model=self.previous.hf)

    def resume(self) -> Any:
        """Return the value of `resume` of this run."""
        cfg, path = model_of_previous_run(self.cfg, "a-judge", self.train)
        assert path == str(self.previous.hf)
        return cfg.resume


def test_a_previous_run_is_not_repeated_after_the_next_one_has_started(tmp_path: Path) -> None:
    run = PreviousRun(tmp_path)
    assert run.resume() is True  # launch rejects it: there is nothing to resume
    assert run.resume() == "auto"  # killed before it started
    assert run.num_trained == 2
    (run.own.checkpoints / "step_000001").mkdir(parents=True)
    assert run.resume() is True
    assert run.num_trained == 2
    run.previous.hf.rmdir()
    assert run.resume() is True
    assert run.num_trained == 3


@pytest.mark.parametrize(
    "mistake", [ValueError("it differs in seed"), InvalidValue("seed", 1, rule="differs", fix="")]
)
def test_a_mistake_in_a_previous_run_names_that_run(tmp_path: Path, mistake: ValueError) -> None:
    def train() -> Any:
        raise mistake

    with error_about(type(mistake), "run a-judge: ", "seed"):
        model_of_previous_run(PreviousRun(tmp_path).cfg, "a-judge", train)


def test_a_recipe_of_two_proximal_policies() -> None:
    recomputed, interpolated = (
        {column.name for column in graph_of("decoupled_ppo", proximal=how).trained("policy").reads}
        for how in ("recomputed", "interpolated")
    )
    assert recomputed - interpolated == {"proximal_logprobs"}
    assert interpolated < recomputed


def test_dapo_drops_groups_by_their_rewards_and_penalizes_length() -> None:
    # At most 6 tokens, of which the last 4 cost a quarter each; the penalty is at most 1.
    advantage = partial(penalised_advantage, max_tokens=6, overlong_tokens=4)
    rewards, lengths = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([2.0, 4.0, 6.0, 9.0])
    expected = grpo_advantage(torch.tensor([1.0, 0.5, -1.0, 0.0]))
    torch.testing.assert_close(advantage(rewards, lengths), expected)

    (stage,) = graph_of("dapo").all(PerGroupStage)
    assert [column.name for column in stage.reads] == ["reward", "num_tokens", "reward"]
    assert stage.function(torch.ones(4), lengths, torch.ones(4)) is None
    assert stage.function(rewards, lengths, rewards) is not None


def test_every_small_recipe_trains_only_the_policy() -> None:
    for name in SMALL_RECIPES:
        (stage,) = graph_of(name).all(TrainStage)
        assert stage.model.name == "policy"


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("dr_grpo", "group_size", 1),
        ("swarm", "group_size", 1),
        ("rloo", "max_weight", 0.5),
        ("scalerl", "max_ratio", 0.0),
        ("gspo", "clip_high", -0.1),
        ("dapo", "overlong_tokens", 7),
        ("reinforce_pp", "kl_coefficient", -1.0),
        ("swarm", "num_nodes", 0),
        ("swarm", "warm_start_batch", 0),
        ("swarm", "warm_start_steps", -1),
    ],
)
def test_settings_of_recipes_are_validated(name: str, field: str, value: Any) -> None:
    with invalid(field, value):
        graph_of(name, **{field: value})


@pytest.mark.parametrize(
    ("name", "settings", "field", "value"),
    [
        ("decoupled_ppo", {"proximal": "guessed"}, "proximal", "guessed"),
        ("swarm", {"external_groups": 33}, "groups_per_step", 33),
        ("swarm", {"external_groups": -1}, "groups_per_step", -1),
        ("swarm", {"peers": ()}, "groups_per_step", 16),
        ("swarm", {"peers": ("swarm",)}, "peers", ["swarm"]),
        ("swarm", {"observe": ObserveConfig()}, "observe.record_groups", 1),
    ],
)
def test_settings_that_the_graph_cannot_use_are_rejected(
    name: str, settings: dict[str, Any], field: str, value: Any
) -> None:
    with invalid(field, value):
        graph_of(name, **settings)


@pytest.mark.parametrize(
    ("name", "advantage"), [("rloo", "rloo_advantage"), ("scalerl", "scale_rl_advantage")]
)
def test_a_group_of_one_has_no_advantage(name: str, advantage: str) -> None:
    with invalid("group_size", 1) as found:
        graph_of(name, group_size=1)
    assert advantage in found.value.rule


@pytest.mark.parametrize("name", SMALL_RECIPES)
def test_a_recipe_with_its_own_rows_rejects_a_dataset(name: str) -> None:
    with invalid("data.source", "mine.jsonl"):
        graph_of(name, data=DataConfig(source="mine.jsonl"))


def test_the_task_overrides_the_algorithms_settings() -> None:
    found = to_dict(config_of("scalerl")())
    assert found["asynchrony"]["max_staleness"] == 8
    assert found["sampling"]["max_tokens"] == 6
    assert to_dict(config_of("reinforce_pp")())["group_size"] == 1


def test_the_tests_of_programs_accept_only_right_ones() -> None:
    # The right program passes, one with another digit fails; the vocabulary has all characters.
    assert len((ROOT / "recipes" / "programs.py").read_text().splitlines()) <= 120
    known = set(programs.characters())
    rng = random.Random(0)
    for words, expression, _ in programs.FAMILIES.values():
        row = next(
            row for row in iter(lambda: programs.row(rng), None) if row["prompt"][:-2] == words[:-3]
        )
        assert set(row["prompt"]) <= known
        k = int(row["prompt"][-2])
        for digit, passes in ((k, True), (k % 9 + 1, False)):
            completion = programs.PROGRAM.format(expression.format(k=digit))
            assert set(completion) <= known
            names: dict[str, Any] = {}
            exec(completion, names)
            passed = []
            for test in row["tests"]:
                call, _, value = test.removeprefix("assert ").partition(" == ")
                passed.append(eval(call, names) == int(value))
            assert all(passed) == passes, (row, completion)
    examples = [programs.warm_start_example(rng) for _ in range(1000)]
    right = {
        (words.format(k=k) + "\n", programs.PROGRAM.format(expression.format(k=k)))
        for words, expression, _ in programs.FAMILIES.values()
        for k in programs.DIGITS
    }
    assert 0.25 < sum(example in right for example in examples) / 1000 < 0.35


def test_no_held_out_sum_is_trained_on() -> None:
    trained, held_out = (
        {row["prompt"][0]["content"] for row in sums_in_words.sums(held_out=which)}
        for which in (False, True)
    )
    assert (len(trained), len(held_out), len(trained | held_out)) == (360, 40, 400)


@pytest.mark.parametrize(
    ("completion", "is_right", "is_alone"),
    [
        ("55", 1, 1),
        (" 55.", 1, 1),
        ("The sum is 55.", 1, 0),
        ("47 + 8 = 55", 1, 0),
        ("55 is 47 + 8", 0, 0),
        ("54", 0, 1),
        ("fifty-five", 0, 0),
        ("", 0, 0),
    ],
)
def test_rewards_of_sums_in_words(completion: str, is_right: float, is_alone: float) -> None:
    rollout = rlsys.example_rollout(completion, metadata={"answer": 55})
    assert sums_in_words.right(rollout) == is_right
    assert sums_in_words.alone(rollout) == is_alone


def commands() -> list[str]:
    """Return the commands of recipes/README.md."""
    text = (ROOT / "recipes" / "README.md").read_text()
    return re.findall(r"`python recipes/([^`]*)`", text)


# Files that other recipes use.
HELPERS = (
    "arithmetic",
    "calculator_tasks",
    "clips",
    "grpo",
    "kuhn_oracle",
    "smollm2",
    "swarm_nodes",
)


def test_each_recipe_is_in_the_readme() -> None:
    listed = {command.split()[0].removesuffix(".py") for command in commands()}
    files = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    assert listed == files - {"__init__", *HELPERS}


@pytest.mark.parametrize("command", commands())
def test_each_command_of_the_readme_can_be_parsed(command: str) -> None:
    script, *arguments = command.split()
    parse(CONFIGS[script], arguments)


def test_a_node_of_a_swarm_has_each_option_once(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--name", "s", "--num_nodes=3", "--clip-low", "0.1", "--seed=4", "--runs-dir", "r"]
    options = node_options(arguments, "s", 2, 14)
    config: Any = parse(CONFIGS["swarm.py"], options).config
    assert (config.name, config.num_nodes, config.seed) == ("s-2", 1, 14)
    assert (config.clip_low, config.runs_dir, config.peers) == (0.1, "r", ("s-*",))
    assert "twice" not in capsys.readouterr().err
    assert options.count("--peers") == 1
    assert node_options(["--peers", "a"], "s", 0, 0)[:2] == ["--peers", "a"]
    assert node_options(["--peers", "a"], "s", 0, 0).count("--peers") == 1


def test_the_error_of_a_swarm_names_the_nodes_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "node.py"
    script.write_text(
        "import os, sys\n"
        "if 's-1' in sys.argv:\n"
        "    os.kill(os.getpid(), 9)\n"
        "sys.exit('s-0' in sys.argv)\n"
    )
    monkeypatch.setattr("sys.argv", ["swarm.py"])
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        with error_about(rlsys.RunFailed, "s-0", "s-1", "SIGKILL") as found:
            run_nodes(str(script), "s", 3, 0, str(tmp_path / "runs"))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert str(found.value).rindex("s-0") > str(found.value).index("SIGKILL")
    assert "s-2: " in capsys.readouterr().out


SWARM = """
import sys
import rlsys
from recipes.swarm_nodes import run_nodes

sys.argv[1:], (script, runs) = [], sys.argv[1:]
rlsys.main(lambda: run_nodes(script, "s", 2, 0, runs))()
"""

NODE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit("in good order"))
print(f"node {os.getpid()}.", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "number",
    rest_slow([*ENDING, signal.SIGINT, signal.SIGKILL], only=(signal.SIGTERM, signal.SIGKILL)),
)
def test_nodes_of_a_swarm_end_with_their_launcher(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "node.py"
    script.write_text(NODE)
    launcher = subprocess.Popen([sys.executable, "-c", SWARM, str(script), str(tmp_path)], cwd=ROOT)
    logs = [tmp_path / "s-0.log", tmp_path / "s-1.log"]
    wait_until(lambda: all(log.exists() and log.read_text().endswith(".\n") for log in logs))
    launcher.send_signal(number)
    assert launcher.wait(300) == (-number if number == signal.SIGKILL else 130)
    wait_until(lambda: all(log.read_text().endswith("in good order\n") for log in logs))
    for log in logs:
        pid = int(re.findall(r"node (\d+)", log.read_text())[0])
        wait_until(partial(has_ended, pid))


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until(found: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not found():
        assert time.monotonic() < until
        time.sleep(0.05)


def run_recipe(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(path), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", HELPERS)
def test_a_helper_module_runs_or_names_the_recipe_to_run(name: str) -> None:
    done = run_recipe(ROOT / "recipes" / f"{name}.py", "--help")
    if name == "grpo":
        assert done.returncode == 0
        assert "--num-steps INT" in done.stdout
    else:
        assert done.returncode == 1
        (named,) = re.findall(r"`python recipes/(\w+)\.py`", done.stderr)
        assert (ROOT / "recipes" / f"{named}.py").is_file()
        assert named not in HELPERS


def test_every_recipe_can_be_run() -> None:
    for path in (ROOT / "recipes").glob("*.py"):
        assert path.name == "__init__.py" or 'if __name__ == "__main__":' in path.read_text()
