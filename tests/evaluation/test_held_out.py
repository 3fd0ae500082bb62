from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlsys
from rlsys.config import DataConfig, HeldOutConfig, RolloutConfig
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import Prompts
from rlsys.evaluation.held_out import (
    evaluation_config,
    export_path,
    is_due,
    pending_exports,
    rewards_of,
)
from rlsys.evaluation.model_evaluation import Evaluation
from rlsys.evaluation.pass_at_k import Estimate
from rlsys.runs.evaluation_log import EvaluationLog, best_of, read_evaluations
from rlsys.runs.run_files import RunFiles
from tests.errors import invalid
from tests.histories import files_of_a_run


def found(mean: float) -> Evaluation:
    return Evaluation(
        estimates={
            "eval/pass@1": Estimate(value=0.5, low=0.4, high=0.6),
            "eval/mean@4": Estimate(value=mean, low=mean - 0.1, high=mean + 0.1),
        },
        num_prompts=8,
        num_left_out=0,
        failed={},
        first_failure=None,
        tokens_mean=3.0,
        truncated_frac=0.0,
        seconds=1.0,
    )


def exported(files: RunFiles, step: int) -> Path:
    path = export_path(files.evaluating, step)
    path.mkdir(parents=True)
    (path / "model.safetensors").write_text(f"of step {step}")
    return path


def evaluate(files: RunFiles, board: EvaluationLog, step: int, mean: float) -> dict[str, float]:
    return board.add(step, found(mean).as_metrics(), exported(files, step))


def weights(directory: Path) -> str:
    return (directory / "model.safetensors").read_text()


def test_only_the_best_model_is_kept(tmp_path: Path) -> None:
    files = files_of_a_run(tmp_path)
    board = EvaluationLog(files, after_step=0)
    is_best = [
        evaluate(files, board, step, mean)["eval/is_best"]
        for step, mean in ((0, 0.2), (10, 0.6), (20, 0.6), (30, 0.5))
    ]
    board.close()
    assert is_best == [1, 1, 0, 0]  # of two equal ones the earlier
    assert weights(files.best) == "of step 10"
    assert best_of(files) == json.loads((files.best / "evaluation.json").read_text())
    assert pending_exports(files.evaluating) == {}
    assert [line["step"] for line in read_evaluations(files.evaluations)] == [0, 10, 20, 30]
    assert read_evaluations(files.evaluations)[1]["eval/mean@4/high"] == pytest.approx(0.7)


def test_a_discarded_history_is_evaluated_again_and_the_best_model_stays(
    tmp_path: Path,
) -> None:
    files = files_of_a_run(tmp_path)
    board = EvaluationLog(files, after_step=0)
    for step, mean in ((0, 0.2), (10, 0.6), (20, 0.9)):
        evaluate(files, board, step, mean)
    board.go_back(10)
    assert [board.has(step) for step in (0, 10, 20)] == [True, True, False]
    assert evaluate(files, board, 20, 0.8)["eval/is_best"] == 0  # the one of before was better
    board.close()
    resumed = EvaluationLog(files, after_step=10)
    assert [resumed.has(step) for step in (0, 10, 20)] == [True, True, False]
    resumed.close()
    assert weights(files.best) == "of step 20"
    assert [line["step"] for line in read_evaluations(files.evaluations)] == [0, 10]


def test_evaluations_come_before_the_first_step_at_the_interval_and_at_the_end() -> None:
    run = rlsys.RunConfig(num_steps=25, evaluation=HeldOutConfig(every=10))
    assert [step for step in range(26) if is_due(run, step)] == [0, 10, 20, 25]
    assert not any(is_due(rlsys.RunConfig(num_steps=25), step) for step in range(26))


def test_an_evaluation_samples_like_the_run_from_its_own_data() -> None:
    run = rlsys.RunConfig(
        seed=7,
        data=DataConfig(source="train.jsonl", prompt_column="question", shuffle=True),
        rollout=RolloutConfig(num_cpus=4, num_gpus=1),
        evaluation=HeldOutConfig(every=1, source="test.jsonl", num_samples=4, k=(1, 4)),
    )
    config = evaluation_config(run, "exported")
    assert (config.model.path, config.seed, config.k) == ("exported", 7, (1, 4))
    assert config.sampling == run.sampling
    assert (config.data.source, config.data.prompt_column) == ("test.jsonl", "question")
    assert (config.data.shuffle, config.rollout.num_gpus) == (False, 0)
    for source, subset in (("test.jsonl", None), ("", "main"), ("org/held-out", "main")):
        data = DataConfig(source="org/name", subset="main")
        evaluation = HeldOutConfig(every=1, source=source)
        of_run = rlsys.RunConfig(data=data, evaluation=evaluation)
        assert evaluation_config(of_run, "exported").data.subset == subset
    same = evaluation_config(rlsys.RunConfig(data=DataConfig(source="org/name")), "exported")
    assert (same.data.source, same.data.split) == ("org/name", "test")


def test_an_evaluation_gets_the_merged_model() -> None:
    run = rlsys.RunConfig(
        model=rlsys.ModelConfig(lora="r4"),
        rollout=RolloutConfig(engine="vllm", vllm={"enable_lora": True, "watermark": 0.1}),
    )
    assert evaluation_config(run, "exported").rollout.vllm == {"watermark": 0.1}


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({"every": -1}, "every", -1),
        ({"num_samples": 2, "k": (4,)}, "k", 4),
        ({"num_samples": 0}, "num_samples", 0),
        ({"num_samples": 2, "greedy": True}, "num_samples", 2),
        ({"num_prompts": 1}, "num_prompts", 1),
        ({"k": ()}, "k", ()),
        ({"num_gpus": -1}, "num_gpus", -1),
    ],
)
def test_an_impossible_evaluation_is_refused(
    settings: dict[str, Any], field: str, value: object
) -> None:
    with invalid(f"evaluation.{field}", value):
        HeldOutConfig(**settings)


def test_without_rewards_the_best_model_is_that_of_the_lowest_loss(tmp_path: Path) -> None:
    files = files_of_a_run(tmp_path)
    board = EvaluationLog(files, after_step=0)
    is_best = [
        board.add(step, {"eval/loss": loss}, exported(files, step))["eval/is_best"]
        for step, loss in ((0, 2.0), (10, 1.5), (20, 1.5), (30, 1.6))
    ]
    board.close()
    assert is_best == [1, 1, 0, 0]
    assert weights(files.best) == "of step 10"


def test_held_out_rewards_replace_those_of_the_graph() -> None:
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=DataConfig()), group_size=2)
    assert rewards_of(flow, rlsys.HeldOut()) == []
    flow.score(rollouts, [len])
    (own,) = rewards_of(flow, rlsys.HeldOut())
    assert isinstance(own, rlsys.Reward)
    assert own.name == "len"
    assert rewards_of(flow, rlsys.HeldOut(rewards=[max])) == [max]
