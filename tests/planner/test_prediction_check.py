"""A prediction against the steps that a run measured: seconds charged to each assumption."""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.errors import InvalidValue
from rlsys.planner.prediction_check import compared
from rlsys.planner.run_measurement import StepMedians
from rlsys.planner.run_record import (
    PredictedStep,
    RecordedRole,
    RunRecord,
    read_record,
    record_text,
)
from tests.errors import invalid
from tests.planner.cpu_examples import TINY_CONFIG, tiny_model
from tests.planner.json_damage import damaged

PREDICTED = PredictedStep(
    step_s=10.0,
    low_s=8.0,
    high_s=12.0,
    train_s=4.0,
    generation_s=6.0,
    sync_s=0.5,
    reward_s=0.1,
    controller_s=0.2,
    completion_tokens=400.0,
)
MEASURED = StepMedians(
    num_steps=20,
    step_s=10.0,
    train_s=4.0,
    generation_s=6.0,
    sync_s=0.5,
    reward_s=0.1,
    controller_s=0.2,
    other_s=0.0,
    completion_tokens=400.0,
    spread=0.0,
)


def test_a_right_prediction_has_no_worst_assumption() -> None:
    found = compared(PREDICTED, MEASURED)
    assert found.is_within
    assert all(one.effect_s == pytest.approx(0) for one in found.assumptions)
    assert len(found.rows) == 1


@pytest.mark.parametrize(
    ("measured", "worst", "effect_s"),
    [
        # one half longer, at the predicted rates: all work grows by a half
        ({"completion_tokens": 600.0, "train_s": 6.0, "generation_s": 9.0}, "completion length", 5),
        ({"generation_s": 9.0}, "generation", 3),
        ({"train_s": 7.0}, "training", 3),
        ({"reward_s": 2.1}, "rewards", 2),
        ({"sync_s": 4.5}, "loading weights", 4),
        ({"controller_s": 3.7}, "the controller's process", 3.5),
        # shorter by a half, but both slower per token
        ({"completion_tokens": 200.0, "train_s": 4.0}, "completion length", -5),
    ],
)
def test_the_worst_assumption(measured: dict[str, float], worst: str, effect_s: float) -> None:
    found = compared(PREDICTED, replace(MEASURED, step_s=15.0, **measured))  # type: ignore[arg-type]
    assert found.assumptions[0].name == worst
    assert found.assumptions[0].effect_s == pytest.approx(effect_s)
    assert not found.is_within
    assert len(found.rows) == 2
    assert worst in found.rows[1][1]


def test_a_part_that_is_predicted_again_says_for_what() -> None:
    """The user's case: a part of 0.05 s is 0.12 s for completions of 2.4 times the length."""
    predicted = replace(
        PREDICTED, step_s=0.0547, low_s=0.041, high_s=0.0729, train_s=0.05, completion_tokens=2.5
    )
    measured = replace(MEASURED, step_s=2.54, train_s=1.9, completion_tokens=6.0)
    found = compared(predicted, measured)
    step, part = (text for _, text in found.rows)
    assert step.startswith("step of 0.055 s (80 %: 0.041 to 0.073 s); measured 2.5 s, 46 x, ")
    assert part.startswith("most off: ")
    (training,) = (
        one for one in compared(predicted, measured).assumptions if one.name == "training"
    )
    assert training.text == (
        "training: 0.12 s predicted for completions of 6.0 tokens, 1.9 measured (+1.8 s)"
    )
    same = compared(predicted, replace(measured, completion_tokens=2.5))
    assert not any(one.condition for one in same.assumptions)


def test_work_that_nobody_measured_is_not_compared() -> None:
    found = compared(PREDICTED, replace(MEASURED, generation_s=0.0, controller_s=0.0))
    assert not {"generation", "the controller's process"} & {one.name for one in found.assumptions}


RECORD = RunRecord(
    cluster="1x2xCPU",
    prompt_tokens=6.5,
    roles=(RecordedRole(name="policy", model="tiny", config=TINY_CONFIG, samples=True),),
    prediction=PREDICTED,
    settings={"trainer.layout": "dp2"},
)


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    for record in (RECORD, replace(RECORD, prediction=None, settings={})):
        file.write_text(record_text(record))
        assert read_record(file) == record
    assert read_record(file).roles[0].role.model == tiny_model()


@pytest.mark.parametrize(
    "change",
    [
        {"format": 7},
        {"roles": []},
        {"roles": [{"name": "policy"}]},
        {"roles": [{"name": "policy", "model": "nobody/knows"}]},
        {"prompt_tokens": float("nan")},
        {"turns": "x"},
        {"turns": 0},
        {"cluster": 5},
        {"roles": [{"name": "policy", "model": "tiny", "config": [1]}]},
        {"roles": [{**asdict(RECORD.roles[0]), "is_trained": "no"}]},
        {"prediction": {"step_s": 1.0}},
        {"surplus": 1},
    ],
)
def test_a_damaged_record_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(dump_json({**parse_json(record_text(RECORD)), **change}))
    with invalid(str(file)):
        read_record(file)


@given(damage=damaged(parse_json(record_text(RECORD))))
def test_any_damage_gives_a_record_or_is_refused(damage: dict[str, object]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(dump_json(damage))
        file.flush()
        try:
            record = read_record(Path(file.name))
        except InvalidValue as error:
            field = error.field
        else:
            assert record.roles[0].role.model.parameters > 0
            assert 0 <= record.prompt_tokens < math.inf
            return
    assert field == file.name
