"""What is told of models and data before anything starts."""

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
from rlsys.launch.tiny_models import OwnModel, build_tiny_model, build_tokenizer
from tests.engines.scalar_models import scalar_model

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


def test_a_reward_model_without_a_head_is_told_by_its_field(tmp_path: Path) -> None:
    path = saved(tmp_path / "causal", causal=True)
    with pytest.raises(ValueError, match=r"^reward_model\.model\.path=.* has no scalar head \(Qw"):
        dry_ppo(tmp_path, path)


def test_a_head_of_several_outputs_is_told_by_its_field(tmp_path: Path) -> None:
    path = saved(tmp_path / "three", num_labels=3)
    refused = re.escape("reward_model.model.path=")
    told = r" has a head of 3 outputs .*, where one is wanted; give a model with num_labels=1"
    with pytest.raises(ValueError, match=rf"{refused}.*{told}\.\n") as found:
        dry_ppo(tmp_path, path)  # the critic, which begins as it, may begin without a head
    assert "critic.model.path=" in str(found.value)
    assert "num_labels=1, or a causal language model, whose head begins" in str(found.value)
    cfg = reward_model.Config(model=ModelConfig(path=str(path)), runs_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"^model\.path=.* has a head of 3 outputs"):
        reward_model.train(cfg, dry_run=True)


def test_a_path_of_two_roles_is_told_once_by_the_one_that_was_set(tmp_path: Path) -> None:
    """The recipe's critic begins as the reward model."""
    with pytest.raises(ValueError, match=r"^reward_model\.model\.path=\S+/gone' is no dir") as told:
        dry_ppo(tmp_path, tmp_path / "gone")
    assert "critic" not in str(told.value)


def test_what_is_trained_first_is_not_asked_of_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = ppo.Config(runs_dir=str(tmp_path))
    arithmetic.run(cfg, ppo.ppo, dry_run=True)
    out = capsys.readouterr().out
    assert "warning: reward_model.model.path is empty, and the policy's weights" in out
    assert "infer score" in out
    with pytest.raises(
        ValueError, match=r"^reward_model\.model\.path is empty, .*model\.py makes\.$"
    ):
        arithmetic.run(cfg, ppo.ppo)


def test_no_more_likeliest_tokens_are_asked_for_than_there_are(tmp_path: Path) -> None:
    cfg = distill.Config(top_k=100, runs_dir=str(tmp_path))
    with pytest.raises(
        ValueError, match=r"'teacher', top_k=100\) asks for more than the 15 tokens"
    ):
        arithmetic.run(cfg, distill.distill, dry_run=True)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_teacher_of_another_vocabulary_is_told_by_its_field(
    tmp_path: Path, dry_run: bool
) -> None:
    """Before a run as in a dry one: its tokens have the numbers of others."""
    path = saved(tmp_path / "teacher", causal=True)
    build_tokenizer(CHARACTERS[::-1]).save_pretrained(path)
    role = RoleConfig(model=FrozenModelConfig(path=str(path)))
    cfg = distill.Config(teacher=role, runs_dir=str(tmp_path / "runs"))
    with pytest.raises(
        ValueError,
        match=r"^teacher\.model\.path='\S+/teacher' has another vocabulary than the policy: \d+ of",
    ):
        arithmetic.run(cfg, distill.distill, dry_run=dry_run)
    assert not (tmp_path / "runs" / cfg.name).exists()


def test_a_reference_that_nobody_reads_is_told() -> None:
    told = RoleConfig(model=FrozenModelConfig(path="other"))
    with pytest.raises(ValueError, match=r"reference\.model\.path='other' would not be read"):
        DPOConfig(own_reference=True, reference=told)


def test_a_policy_without_adapters_is_not_its_own_reference(tmp_path: Path) -> None:
    cfg = DPOConfig(
        prompts_per_step=4,
        data=pairs(tmp_path),
        own_reference=True,
        runs_dir=str(tmp_path),
    )
    with pytest.raises(ValueError, match=r"'policy', adapters=False\) .*; set model\.lora"):
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


def test_a_judge_that_could_not_answer_is_told_before_the_run(tmp_path: Path) -> None:
    mute = build_tiny_model(tmp_path / "mute", width=32, num_layers=1)
    for file in mute.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"^judge\.model\.path=.* holds no tokenizer"):
        dry_judge(tmp_path, mute)
    with pytest.raises(ValueError, match=r"^judge\.model\.path=\S+/gone' is no dir"):
        dry_judge(tmp_path, tmp_path / "gone")
    small = build_tiny_model(tmp_path / "small", width=32, num_layers=1, max_context=64)
    with pytest.raises(ValueError, match=r"'judge'\): max_tokens=64 leaves no room .* of 64 tok"):
        dry_judge(tmp_path, small, max_tokens=64)
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"'judge'\): ask <lambda> runs in .*cannot be pickled"):
        dry_judge(tmp_path, small, ask=lambda rollout: str(lock))


def test_a_reward_model_that_fits_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry_ppo(tmp_path, saved(tmp_path / "judge"))
    assert capsys.readouterr().out.count(f'path = "{tmp_path}/judge"') == 2  # the critic's too


def test_pairs_of_ones_own_are_what_a_reward_model_learns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = reward_model.Config(prompts_per_step=4, data=pairs(tmp_path), runs_dir=str(tmp_path))
    reward_model.train(cfg, dry_run=True)
    assert "data: 4 prompts, each with completions beside it" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"data\.source='/no/pairs\.jsonl' is no file"):
        reward_model.train(replace(cfg, data=DataConfig(source="/no/pairs.jsonl")), dry_run=True)


@pytest.mark.parametrize(("name", "given"), [("source", "mine.jsonl"), ("split", "dev")])
def test_held_out_rows_have_one_source(tmp_path: Path, name: str, given: str) -> None:
    cfg = DPOConfig(
        prompts_per_step=4,
        data=pairs(tmp_path),
        evaluation=HeldOutConfig(every=5, **{name: given}),  # type: ignore[arg-type]
        runs_dir=str(tmp_path),
    )
    with pytest.raises(ValueError, match=rf"^evaluation\.{name}='{given}'"):
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


def test_held_out_tasks_are_what_a_run_of_episodes_is_evaluated_on(tmp_path: Path) -> None:
    dry_play(tmp_path, rlsys.HeldOut(rows=[{"number": "1"}, {"number": "2"}]))


@pytest.mark.parametrize(
    ("held_out", "settings", "words"),
    [
        (None, {}, r"evaluation\.every=5, and nothing is held out"),
        ({"rows": [{"number": "1"}]}, {}, r"evaluation\.num_prompts=1, but .* has 1 tasks"),
        ({"rows": [{"n": "1"}] * 2}, {}, r"'ask' reads column 'number', which .*held-out data"),
        (
            {"rows": [{"number": "1"}] * 2, "rewards": [arithmetic.correct]},
            {},
            r"HeldOut\(rewards=\['correct'\]\) scores completions .* Leave the rewards",
        ),
        (
            {"rows": [{"number": "1"}] * 2},
            {"data": DataConfig(prompt_column="question")},
            r"data\.prompt_column='question' is of prompts, and flow\.play has tasks",
        ),
        (
            {"rows": [{"number": "1"}] * 2},
            {"rollout": rlsys.RolloutConfig(replay_routing=True)},
            r"rollout\.replay_routing=True with flow\.play: episodes do not keep",
        ),
    ],
)
def test_an_evaluation_of_episodes_that_could_not_be_done_is_told(
    tmp_path: Path, held_out: Any, settings: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        dry_play(tmp_path, rlsys.HeldOut(**held_out) if held_out else None, **settings)


def test_a_file_is_divided_into_training_and_evaluation(tmp_path: Path) -> None:
    """Without a part of its own, an evaluation of a file that is trained on is refused."""
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
    with pytest.raises(ValueError, match=r"evaluation\.every=5"):
        launch("test")
    with pytest.raises(ValueError, match=r"evaluation\.split='dev\[80%:\]'"):
        launch("dev[80%:]")
