"""Checks of models and data before a run starts."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rlsys
from recipes import arithmetic, distill, ppo, reward_model
from recipes.dpo import DPOConfig, dpo
from recipes.quickstart import QuickstartConfig as arithmetic_grpo
from recipes.sft import SFTConfig, sft
from rlsys import DataConfig, FrozenModelConfig, HeldOutConfig, ModelConfig, RoleConfig
from rlsys.algorithms import cispo, grpo_advantage, token_mean
from rlsys.errors import NOT_GIVEN, InvalidValue, InvalidValues
from rlsys.launcher.tiny_models import OwnModel, build_tiny_model, build_tokenizer
from tests.engines.scalar_models import scalar_model
from tests.errors import invalid

CHARACTERS = arithmetic.CHARACTERS


def pairs(directory: Path) -> DataConfig:
    path = directory / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "completions": ["2", "3"]}) + "\n")
    path.write_text(path.read_text() * 4)
    return DataConfig(source=str(path))


def dry_ppo(tmp_path: Path, path: Path, **settings: Any) -> None:
    role = RoleConfig(model=FrozenModelConfig(path=str(path)), num_cpus=0.4)
    cfg = ppo.Config(reward_model=role, runs_dir=str(tmp_path), **settings)
    arithmetic.run(ppo.with_reward_model(cfg), ppo.ppo, dry_run=True)


def saved(directory: Path, *, causal: bool = False, **settings: Any) -> Path:
    scalar_model(directory, "qwen3", causal=causal, **settings)
    build_tokenizer(CHARACTERS).save_pretrained(directory)
    return directory


def test_a_reward_model_without_a_head_is_refused_by_its_option(tmp_path: Path) -> None:
    path = saved(tmp_path / "causal", causal=True)
    with invalid("reward_model.model.path", str(path)):
        dry_ppo(tmp_path, path)


@pytest.mark.slow
def test_a_head_of_several_outputs_is_refused_by_its_option(tmp_path: Path) -> None:
    path = saved(tmp_path / "three", num_labels=3)
    with pytest.raises(InvalidValues) as found:
        dry_ppo(tmp_path, path)
    for error, field in zip(found.value.errors, ("reward_model", "critic"), strict=True):
        assert f"{field}.model.path=" in str(error)
        assert "num_labels=1" in str(error)
    cfg = reward_model.Config(model=ModelConfig(path=str(path)), runs_dir=str(tmp_path))
    with invalid("model.path", str(path)):
        reward_model.train(cfg, dry_run=True)


def test_a_path_of_two_models_is_refused_once_by_the_option_that_was_set(tmp_path: Path) -> None:
    """The recipe's critic starts from the reward model."""
    with invalid("reward_model.model.path", str(tmp_path / "gone")) as found:
        dry_ppo(tmp_path, tmp_path / "gone")
    assert "critic" not in str(found.value)


def test_a_dry_run_does_not_need_models_that_the_recipe_trains_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = ppo.Config(runs_dir=str(tmp_path))
    arithmetic.run(cfg, ppo.ppo, dry_run=True)
    out = capsys.readouterr().out
    assert "warning: reward_model.model.path=''" in out
    assert "infer score" in out
    with invalid("reward_model.model.path", ""):
        arithmetic.run(cfg, ppo.ppo)


def test_top_k_is_at_most_the_size_of_the_vocabulary(tmp_path: Path) -> None:
    cfg = distill.Config(top_k=100, runs_dir=str(tmp_path))
    with invalid("flow.infer('teacher'): top_k", 100):
        arithmetic.run(cfg, distill.distill, dry_run=True)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_teacher_of_another_vocabulary_is_refused_by_its_option(
    tmp_path: Path, dry_run: bool
) -> None:
    path = saved(tmp_path / "teacher", causal=True)
    build_tokenizer(CHARACTERS[::-1]).save_pretrained(path)
    role = RoleConfig(model=FrozenModelConfig(path=str(path)))
    cfg = distill.Config(teacher=role, runs_dir=str(tmp_path / "runs"))
    with invalid("teacher.model.path", str(path)):
        arithmetic.run(cfg, distill.distill, dry_run=dry_run)
    assert not (tmp_path / "runs" / cfg.name).exists()


def test_a_reference_without_effect_is_refused() -> None:
    reference = RoleConfig(model=FrozenModelConfig(path="other"))
    with invalid("reference.model.path", "other"):
        DPOConfig(own_reference=True, reference=reference)


def test_a_policy_needs_adapters_to_be_its_own_reference(tmp_path: Path) -> None:
    cfg = DPOConfig(
        prompts_per_step=4,
        data=pairs(tmp_path),
        own_reference=True,
        runs_dir=str(tmp_path),
    )
    with invalid("flow.infer('policy'): adapters", False):
        rlsys.launch(cfg, dpo(cfg), own_model=arithmetic.MODEL, dry_run=True)


def dry_judge(
    tmp_path: Path, path: Path, *, ask: Any = lambda rollout: "?", max_tokens: int = 8
) -> None:
    cfg = arithmetic_grpo(runs_dir=str(tmp_path))
    flow = rlsys.Dataflow()
    prompts = rlsys.Prompts(config=cfg.data, rows=arithmetic.problems(cfg))
    rollouts = flow.generate(flow.model("policy"), prompts, group_size=cfg.group_size)
    role = RoleConfig(model=FrozenModelConfig(path=str(path)))
    judge = flow.model("judge", role)
    reward = flow.judge(
        judge, rollouts, ask=ask, parse=float_of, max_tokens=max_tokens, writes="reward"
    )
    advantages = flow.per_group(grpo_advantage, reward)
    flow.train(flow.main, rollouts, advantages, loss=cispo(), aggregation=token_mean)
    rlsys.launch(cfg, flow, own_model=arithmetic.MODEL, dry_run=True)


def float_of(reply: str) -> float:
    return float(reply)


def test_a_judge_may_have_any_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry_judge(tmp_path, build_tiny_model(tmp_path / "judge", width=32, num_layers=1))
    out = capsys.readouterr().out
    assert "judge reward" in out
    assert "float32 weights of each worker" in out


def test_an_unusable_judge_is_refused_before_the_run(tmp_path: Path) -> None:
    path = build_tiny_model(tmp_path / "without", width=32, num_layers=1)
    for file in path.glob("tokenizer*"):
        file.unlink()
    with invalid("judge.model.path", str(path)) as found:
        dry_judge(tmp_path, path)
    assert "tokenizer" in found.value.rule
    with invalid("judge.model.path", str(tmp_path / "gone")):
        dry_judge(tmp_path, tmp_path / "gone")
    small = build_tiny_model(tmp_path / "small", width=32, num_layers=1, max_context=64)
    with invalid("flow.judge('judge'): max_tokens", 64):
        dry_judge(tmp_path, small, max_tokens=64)
    lock = threading.Lock()
    with invalid("flow.judge('judge'): ask <lambda>"):
        dry_judge(tmp_path, small, ask=lambda rollout: str(lock))


def test_a_usable_reward_model_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry_ppo(tmp_path, saved(tmp_path / "judge"))
    assert capsys.readouterr().out.count(f'path = "{tmp_path}/judge"') == 2  # the critic's too


def test_a_reward_model_is_trained_on_pairs_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = reward_model.Config(prompts_per_step=4, data=pairs(tmp_path), runs_dir=str(tmp_path))
    reward_model.train(cfg, dry_run=True)
    assert re.search("data: 4 prompts.*'completions'", capsys.readouterr().out)
    with invalid("data.source", "/no/pairs.jsonl"):
        reward_model.train(replace(cfg, data=DataConfig(source="/no/pairs.jsonl")), dry_run=True)


@pytest.mark.parametrize(("name", "value"), [("source", "mine.jsonl"), ("split", "dev")])
def test_held_out_rows_have_one_source(tmp_path: Path, name: str, value: str) -> None:
    cfg = DPOConfig(
        prompts_per_step=4,
        data=pairs(tmp_path),
        evaluation=HeldOutConfig(every=5, **{name: value}),  # type: ignore[arg-type]
        runs_dir=str(tmp_path),
    )
    with invalid(f"evaluation.{name}", value):
        rlsys.launch(
            cfg,
            dpo(cfg),
            own_model=OwnModel(name="own", characters=CHARACTERS),
            held_out=arithmetic.held_out(),
            dry_run=True,
        )


@rlsys.environment(plain_text=True, required_columns=("number",))
async def ask(chat: Any, task: Any) -> float:
    return float(await chat("1") == task["number"])


def dry_play(tmp_path: Path, held_out: rlsys.HeldOut | None, **settings: Any) -> None:
    cfg = rlsys.RunConfig(
        prompts_per_step=2,
        sampling=rlsys.SamplingConfig(max_tokens=8),
        runs_dir=str(tmp_path),
        **{"evaluation": HeldOutConfig(every=5), **settings},
    )
    flow = rlsys.Dataflow()
    policy = flow.model("policy")
    tasks = rlsys.Prompts(config=cfg.data, rows=[{"number": "1"}, {"number": "2"}])
    episodes = flow.play(policy, ask, tasks, group_size=8)
    advantages = flow.per_group(grpo_advantage, episodes.reward)
    flow.train(policy, episodes.rollouts, advantages, loss=cispo(4.0), aggregation=token_mean)
    own_model = OwnModel(name="own", characters="12", width=16, num_layers=1)
    rlsys.launch(cfg, flow, own_model=own_model, held_out=held_out, dry_run=True)


def test_a_run_of_episodes_is_evaluated_on_held_out_tasks(tmp_path: Path) -> None:
    dry_play(tmp_path, rlsys.HeldOut(rows=[{"number": "1"}, {"number": "2"}]))


@pytest.mark.parametrize(
    ("held_out", "settings", "field", "value"),
    [
        (None, {}, "evaluation.every", 5),
        ({"rows": [{"number": "1"}]}, {}, "evaluation.num_prompts", 1),
        ({"rows": [{"n": "1"}] * 2}, {}, "environment 'ask': column", "number"),
        (
            {"rows": [{"number": "1"}] * 2, "rewards": [arithmetic.correct]},
            {},
            "HeldOut.rewards",
            ["correct"],
        ),
        (
            {"rows": [{"number": "1"}] * 2},
            {"data": DataConfig(prompt_column="question")},
            "data.prompt_column",
            "question",
        ),
    ],
)
def test_an_impossible_evaluation_of_episodes_is_refused(
    tmp_path: Path, held_out: Any, settings: Any, field: str, value: Any
) -> None:
    with invalid(field, value):
        dry_play(tmp_path, rlsys.HeldOut(**held_out) if held_out else None, **settings)


def test_episodes_do_not_record_experts(tmp_path: Path) -> None:
    held_out = rlsys.HeldOut(rows=[{"number": "1"}] * 2)
    with pytest.raises(InvalidValues) as found:
        dry_play(tmp_path, held_out, rollout=rlsys.RolloutConfig(replay_routing=True))
    for error, value in zip(found.value.errors, (NOT_GIVEN, True), strict=True):
        assert isinstance(error, InvalidValue)
        assert (error.field, error.value) == ("rollout.replay_routing", value)


def test_servers_are_asked_before_anything_starts(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9"  # nothing listens there
    held_out = rlsys.HeldOut(rows=[{"number": "1"}] * 2)
    with invalid("rollout.urls", url):
        dry_play(tmp_path, held_out, rollout=rlsys.RolloutConfig(engine="vllm", urls=(url,)))


def test_a_file_is_divided_into_training_and_evaluation(tmp_path: Path) -> None:
    """An evaluation on all rows of a file that is trained on is refused."""
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(10)]
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = OwnModel(name="own", characters=CHARACTERS)

    def launch(split: str) -> None:
        cfg = SFTConfig(
            prompts_per_step=8,
            data=DataConfig(source=str(file), split="train[:80%]"),
            evaluation=HeldOutConfig(every=5, split=split),
            runs_dir=str(tmp_path),
        )
        rlsys.launch(cfg, sft(cfg), own_model=own, dry_run=True)

    launch("train[80%:]")
    with invalid("evaluation.every", 5):
        launch("test")
    with invalid("evaluation.split", "dev[80%:]"):
        launch("dev[80%:]")
