"""The command: a recipe's run is planned, and the recipe accepts the plan's file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from recipes.grpo import GRPOConfig, grpo
from recipes.grpo_gsm8k import GSM8KConfig
from recipes.ppo import Config
from rlsys.commands.plan_command import main
from rlsys.commands.plan_work import parse_lengths, parse_number, parse_seconds
from rlsys.config import DataConfig, ModelConfig, SamplingConfig
from rlsys.config.command_line import parse
from rlsys.planner.hardware import parse_cluster
from rlsys.planner.lengths import MAX_TOKENS, lognormal
from rlsys.planner.plan_request import PlanRequest
from rlsys.planner.plan_settings import configured, plan_of
from rlsys.planner.planning import plan_run
from tests.errors import invalid
from tests.planner.stated_step import stated_step

ROOT = Path(__file__).parents[2]
SMALL = ["--prompts-per-step", "16", "--group-size", "4", "--sampling.max-tokens", "1024"]
WORK = ["--prompt-tokens", "100", "--completion-tokens", "mean=400,max=1024"]


def plan(recipe: str, *options: str, output: Path) -> dict[str, Any]:
    arguments = [str(ROOT / "recipes" / recipe), "--model.path", "Qwen/Qwen3-8B", *options]
    assert main([*arguments, "--output", str(output)]) == 0
    return tomllib.loads(output.read_text())


def test_a_recipe_accepts_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.toml"
    options = [*SMALL, *WORK, "--cluster", "1x8xH100", "--simulate", "2"]
    found = plan("grpo_gsm8k.py", *options, output=file)
    printed = capsys.readouterr().out
    assert "8xH100" in printed
    assert str(file) in printed
    assert file.with_suffix(".svg").read_text().startswith("<svg")
    arguments = ["--model.path", "Qwen/Qwen3-8B", *SMALL, "--config", str(file)]
    config = parse(GSM8KConfig, arguments).config
    assert config.trainer.layout == found["trainer"]["layout"]
    assert config.rollout.num_replicas == found["rollout"]["num_replicas"]
    assert config.rollout.num_gpus == found["rollout"]["tensor_parallel"]
    sides = config.trainer.parallel.num_ranks, config.rollout.num_replicas * config.rollout.num_gpus
    assert (max(sides) if config.placement == "colocated" else sum(sides)) <= 8


@pytest.mark.parametrize(
    "name",
    ["recipe.py", "plan.svg", "plan", "none/plan.toml", "folder.toml", "recipe.py/plan.toml"],
)
def test_a_plan_replaces_no_other_file(name: str, tmp_path: Path) -> None:
    """The output is refused before the recipe is called."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text("raise AssertionError")
    (tmp_path / "folder.toml").mkdir()
    with invalid("--output", str(tmp_path / name)):
        main([str(recipe), "--cluster", "1x8xH100", "--output", str(tmp_path / name)])
    assert recipe.read_text() == "raise AssertionError"


@pytest.mark.slow
def test_all_models_of_ppo_get_devices(tmp_path: Path) -> None:
    reward_model = ["--reward-model.model.path", "Qwen/Qwen3-8B"]
    options = [*SMALL, *WORK, *reward_model, "--cluster", "2x8xH100", "--simulate", "1"]
    file = tmp_path / "plan.toml"
    found = plan("ppo.py", *options, output=file)
    assert found["critic"]["trainer"]["num_gpus"] == 1.0
    assert found["reference"]["num_gpus"] == found["reward_model"]["num_gpus"] == 1.0
    arguments = ["--model.path", "Qwen/Qwen3-8B", *SMALL, *reward_model, "--config", str(file)]
    config = parse(Config, arguments).config
    assert config.critic.trainer.layout == found["critic"]["trainer"]["layout"]


def test_lengths() -> None:
    lengths = parse_lengths("mean=3000,max=8192,spread=0.5")
    assert lengths.maximum == 8192
    assert lengths.mean == pytest.approx(3000, rel=0.01)
    assert parse_lengths("512").mean == 512
    for text in ("mean=3000", "average=1,max=2", "mean=1,mean=1,max=2", "mean=1,max"):
        with invalid("completion_tokens", text):
            parse_lengths(text)


@pytest.mark.parametrize("spread", ["0.01", "0.8", "3"])
@pytest.mark.parametrize("mean", [1, 2, 300, 8000, 8192])
def test_lengths_of_every_spread_have_values_from_one_to_the_maximum(
    spread: str, mean: int
) -> None:
    lengths = parse_lengths(f"mean={mean},max=8192,spread={spread}")
    assert 1 <= min(lengths.quantiles) <= lengths.mean <= max(lengths.quantiles) <= 8192


@pytest.mark.parametrize("text", ["0", "x", "-1", "1e3", "٢", "1" * 5000, "", "1.5"])
def test_a_maximum_that_is_no_number_is_named(text: str) -> None:
    with invalid("completion_tokens.max", text):
        parse_lengths(f"mean=1,max={text}")


@pytest.mark.parametrize("text", ["0", "0.5", "1.2.3", ".", "nan", "inf", "9" * 400, "1e-300", "٢"])
def test_a_mean_that_is_no_number_is_named(text: str) -> None:
    with invalid("completion_tokens.mean", text):
        parse_lengths(f"mean={text},max=8")
    with invalid("--prompt-tokens", text):
        parse_number("--prompt-tokens", text, 1, MAX_TOKENS)


@pytest.mark.parametrize(("text", "value"), [("0", 0.0), ("100", 100.0), ("x", "x")])
def test_a_spread_out_of_range_is_named(text: str, value: float | str) -> None:
    with invalid("completion_tokens.spread", value):
        parse_lengths(f"mean=4,max=8,spread={text}")


def test_seconds_of_a_tool() -> None:
    assert [parse_seconds(text) for text in ("mean=2", "2.5", ".5", "0")] == [2.0, 2.5, 0.5, 0.0]
    for text in ("1.2.3", "9" * 400, "86401", "-1", "٢"):
        with invalid("--tool-seconds", text):
            parse_seconds(text)
    for text in ("max=2", "mean=2,mean=2"):
        with invalid("--tool-seconds", text):
            parse_seconds(text)


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", "٢", "1_000", "9" * 5000])
@pytest.mark.parametrize("name", ["--turns", "--shown"])
def test_a_count_that_is_no_number_is_named(name: str, text: str) -> None:
    with invalid(name, text):
        main(["recipe.py", "--cluster", "1x8xH100", f"{name}={text}"])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--cluster", "8 big ones"], "cluster"),
        (["--cluster", "1x1xL40S"], "cluster"),
        (["--cluster", "1x8xH100", "--model.path", "nobody/knows"], "model.path"),
        (
            ["--cluster", "1x8xH100", "--completion-tokens", "mean=9e9,max=8"],
            "completion_tokens.mean",
        ),
    ],
)
def test_bad_input(options: list[str], field: str, tmp_path: Path) -> None:
    recipe = str(ROOT / "recipes" / "grpo.py")
    arguments = [recipe, "--model.path", "Qwen/Qwen3-8B", *SMALL, *options]
    with pytest.raises((ValueError, SystemExit)) as caught:
        main([*arguments, "--output", str(tmp_path / "plan.toml")])
    if isinstance(caught.value, ValueError):
        assert getattr(caught.value, "field", "") == field
    assert not (tmp_path / "plan.toml").exists()


def test_a_file_that_launches_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("x = 1\n")
    with invalid("RECIPE"):
        main([str(tmp_path / "empty.py"), "--cluster", "1x8xH100"])


def test_the_settings_of_a_plan_state_this_plan() -> None:
    config = GRPOConfig(
        model=ModelConfig(path="Qwen/Qwen3-8B", dtype="bfloat16"),
        prompts_per_step=16,
        group_size=4,
        data=DataConfig(max_prompt_tokens=512),
        sampling=SamplingConfig(max_tokens=1024),
    )
    flow = grpo(config, [lambda rollout: 0.0])
    request = PlanRequest(
        cluster=parse_cluster("1x8xH100"), num_simulated=0, completions=lognormal(400, 1024)
    )
    best = plan_run(config, flow, request).plans[0]
    stated = configured(config, best.settings)
    assert plan_of(stated, flow) == best.ranked.plan
    estimate, assumptions = stated_step(stated, flow, request)
    assert estimate == best.ranked.estimate
    assert len(assumptions) == 1  # of prompts


@pytest.mark.parametrize("output", ["/proc/plan.toml", f"{'a' * 250}.toml", "nul\0.toml"])
def test_an_output_that_cannot_be_written_is_refused_first(output: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("raise AssertionError")
    path = str(tmp_path / output)
    with invalid("--output", path):
        main([str(recipe), "--cluster", "1x8xH100", "--output", path])
    profile = path.replace(".toml", ".json")
    with invalid("--profile", profile):
        main(["--calibrate", str(tmp_path), "--profile", profile])


def test_a_picture_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "plan.svg").mkdir()
    output = str(tmp_path / "plan.toml")
    with invalid("--output", output):
        main([str(ROOT / "recipes" / "grpo.py"), "--cluster", "1x8xH100", "--output", output])
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.svg"]


@pytest.mark.parametrize("arguments", [["--probe"], ["--calibrate", "runs/none"]])
def test_a_cache_that_cannot_be_written_is_refused_first(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")
    with invalid("XDG_CACHE_HOME", "/proc/cache"):
        main(arguments)


@pytest.mark.parametrize(
    "text",
    [
        "placement = 1",
        "placement = 'nowhere'",
        "surplus = 1",
        "[trainer]\nlayout = 3",
        "[trainer]\nlayout = 'x9'",
        "[trainer]\nmicro_batch_tokens = nan",
        "[rollout]\nnum_replicas = 'many'",
        "[rollout]\nnum_replicas = 0",
        "[rollout]\nmax_running = [1]",
        "trainer = 1",
        "[[trainer]]",
        "[asynchrony]\nmax_staleness = -1",
    ],
)
def test_an_edited_plan_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(SystemExit) as caught:
        parse(GSM8KConfig, ["--model.path", "Qwen/Qwen3-8B", "--config", str(file)])
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert shown.count("error:") == len(shown.splitlines()) > 0
