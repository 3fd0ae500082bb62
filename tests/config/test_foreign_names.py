"""Names of other libraries on the command line, in files and as keyword arguments."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from recipes import dapo, dpo, ppo
from recipes.grpo import grpo
from recipes.quickstart import QuickstartConfig
from rlsys.config import DataConfig, RunConfig, SamplingConfig, TrainerConfig
from rlsys.config.command_line import parse
from rlsys.config.fields import leaves
from rlsys.config.foreign_option_names import CLIPPED, COUNTERPARTS, counterpart
from rlsys.evaluation.model_evaluation import EvaluationConfig
from tests.errors import error_about

RECIPES = Path(__file__).parents[2] / "recipes"


def error(capsys: pytest.CaptureFixture[str], cls: type, *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(cls, argv)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("foreign", "own"),
    [
        ("--num-generations", "--group-size"),
        ("--num_generations", "--group-size"),
        ("--actor_rollout_ref.rollout.n", "--group-size"),
        ("--n_samples_per_prompt", "--group-size"),
        ("--rollouts-per-example", "--group-size"),
        ("--max-num-seqs", "--rollout.max-running"),
        ("--gpu-memory-utilization", "--rollout.gpu-memory-frac"),
        ("--rollout.tensor-model-parallel-size", "--rollout.tensor-parallel"),
        ("--max-completion-length", "--sampling.max-tokens"),
        ("--data.max_response_length", "--sampling.max-tokens"),
        ("--per-device-train-batch-size", "--prompts-per-step"),
        ("--data.train_batch_size", "--prompts-per-step"),
        ("--gradient-accumulation-steps", "--trainer.micro-batch-tokens"),
        ("--beta", "--kl-coefficient"),
        ("--epsilon", "--clip"),
        ("--learning-rate", "--trainer.learning-rate"),
        ("--lr", "--trainer.learning-rate"),
        ("--max-async-level", "--asynchrony.max-staleness"),
        ("--trainer.save_freq", "--checkpoint-every"),
        ("--pretrain", "--model.path"),
        ("--model.name", "--model.path"),
        ("--trainer.model.name", "--model.path"),
        ("--actor_rollout_ref.rollout.name", "--rollout.engine"),
        ("--n", "--group-size"),
        ("--do-sample", "--evaluation.greedy"),
        ("--trainer.n_gpus_per_node", "--trainer.layout"),
        ("--actor-num-gpus-per-node", "--trainer.layout"),
        ("--ckpt.keep-last", "--keep-checkpoints"),
        ("--observe.wandb", "--trackers"),
        ("--report-to", "--trackers"),
        ("--prompt-tokens", "rlsys plan"),
        ("--completion-tokens", "rlsys plan"),
    ],
)
def test_an_option_of_another_library_names_ours(
    foreign: str, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error(capsys, ppo.Config, foreign, "8")
    assert f" {own}" in message
    assert f"{foreign.replace('_', '-')}: " in message


def test_a_foreign_name_that_a_recipe_uses_is_accepted() -> None:
    assert parse(dpo.Config, ["--beta", "0.3"]).config.beta == 0.3


def test_an_option_without_a_counterpart_in_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert "kl_coefficient" in error(capsys, dpo.Config, "--init-kl-coef", "0.1")
    assert "flow.score" in error(capsys, ppo.Config, "--reward-funcs", "mine")
    assert "flow.score" in error(capsys, ppo.Config, "--custom_reward_function.path", "mine.py")
    assert "WANDB_PROJECT" in error(capsys, ppo.Config, "--trainer.project_name", "mine")
    assert "clip-low" in error(capsys, dapo.Config, "--clip-ratio", "0.2")
    message = error(capsys, ppo.Config, "--max-num-batched-tokens", "8192")
    assert "micro" not in message
    assert "did you mean" not in message.lower()


@pytest.mark.parametrize(
    ("foreign", "loss"),
    [
        *((name, CLIPPED) for name in ("eps_clip", "clip_ratio", "epsilon-high")),
        ("entropy_coeff", f"entropy_bonus({CLIPPED}, 0.001)"),
    ],
)
def test_an_option_that_is_an_argument_of_the_loss(
    foreign: str, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    proposal = f'--loss "{loss}"'
    assert f" Use {proposal}." in error(capsys, QuickstartConfig, f"--{foreign}", "0.2")
    assert proposal in error(capsys, dpo.Config, f"--{foreign}", "0.2")
    config = parse(QuickstartConfig, ["--loss", loss]).config
    grpo(config, [lambda rollout: 1.0], rows=[{"prompt": "1"}]).check()


@pytest.mark.parametrize("foreign", ["beta", "init_kl_coef", "lam"])
def test_an_option_that_needs_another_model(
    foreign: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "recipes/ppo.py" in error(capsys, QuickstartConfig, f"--{foreign}", "0.2")


def test_the_loss_of_another_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert " --loss" in error(capsys, QuickstartConfig, "--trainer.loss.type", "mine")


def test_an_argument_of_hydra(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--group-size" in error(capsys, ppo.Config, "actor_rollout_ref.rollout.n=8")
    assert "--prompts-per-step" in error(capsys, ppo.Config, "+data.train_batch_size=8")
    assert "--num-steps" in error(capsys, ppo.Config, "nothing=8")  # the way to write options


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("num_generations = 8", "group_size"),
        ("[actor_rollout_ref.rollout]\nn = 8", "group_size"),
        ("[trainer]\nper_device_train_batch_size = 8", "prompts_per_step"),
        (json.dumps({"algorithm": {"kl_ctrl": {"kl_coef": 0.1}}}), "kl_coefficient"),
        (json.dumps({"max_completion_length": 8}), "sampling.max_tokens"),
    ],
)
def test_a_file_of_another_library(
    text: str, own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(text)
    assert own in error(capsys, ppo.Config, "--config", str(tmp_path / "run.toml"))


@pytest.mark.parametrize(
    ("cls", "foreign", "own"),
    [
        (RunConfig, "num_generations", "group_size"),
        (RunConfig, "learning_rate", "trainer.learning_rate"),
        (SamplingConfig, "max_completion_length", "sampling.max_tokens"),
        (SamplingConfig, "temprature", "temperature"),
        (TrainerConfig, "gradient_accumulation_steps", "micro_batch_tokens"),
        (DataConfig, "prompt_key", "data.prompt_column"),
        (EvaluationConfig, "gpu_memory_utilization", "rollout.gpu_memory_frac"),
        (ppo.Config, "kl_loss_coef", "kl_coefficient"),
    ],
)
def test_a_keyword_argument_of_another_library(cls: type, foreign: str, own: str) -> None:
    with error_about(TypeError, foreign, own, cls.__name__):
        cls(**{foreign: 1})


def test_configurations_are_still_copied_and_pickled() -> None:
    config = ppo.Config(num_steps=7)
    for copy in (pickle.loads(pickle.dumps(config)), deepcopy(config), replace(config)):
        assert copy == config
    with error_about(TypeError, "num_generations"):
        replace(config, num_generations=3)  # type: ignore[call-arg]


def test_every_counterpart_is_a_field_of_a_recipe() -> None:
    fields = {leaf.name for leaf in leaves(EvaluationConfig)}
    for path in RECIPES.glob("*.py"):
        module = importlib.import_module(f"recipes.{path.stem}")
        for cls in vars(module).values():
            if inspect.isclass(cls) and issubclass(cls, RunConfig):
                fields |= {leaf.name for leaf in leaves(cls)}
    for name, found in COUNTERPARTS.items():
        assert set(found.fields) <= fields, name
        assert found.fields or found.note


def test_options_of_all_recipes_are_not_foreign_names() -> None:
    for leaf in leaves(RunConfig):
        found = counterpart(leaf.name)
        assert found is None or leaf.name in found.fields, leaf.name


@pytest.mark.parametrize("text", ["\u0661\u0662", "\uff11\uff12", "1\u0968", "\uff11.5"])
@pytest.mark.parametrize("option", ["--num-steps", "--trainer.learning-rate", "--evaluation.k"])
def test_numbers_have_ascii_digits(
    text: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert repr(text) in error(capsys, ppo.Config, option, text)


def test_texts_have_any_characters() -> None:
    assert parse(ppo.Config, ["--data.source", "数据.jsonl"]).config.data.source == "数据.jsonl"


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--model.lora", "r\uff11\uff16"),
        ("--trainer.layout", "dp\uff12"),
        ("--checkpoint-every", "\uff11"),
        ("--checkpoint-every", "\uff11\uff10min"),
    ],
)
def test_numbers_inside_texts_have_ascii_digits(
    option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in error(capsys, ppo.Config, option, text)
