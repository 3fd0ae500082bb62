"""A configuration class as data."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import (
    DataConfig,
    JudgeConfig,
    RunConfig,
    SamplingConfig,
    TrainedRoleConfig,
    TrainerConfig,
)
from rlsys.config.fields import build, from_dict, leaves, num_leaf_fields, to_dict
from rlsys.errors import NOT_GIVEN
from tests.errors import error_about, invalid

ROOT = Path(__file__).parents[2]


def test_a_run_has_few_leaf_fields() -> None:
    names = [leaf.name for leaf in leaves(RunConfig)]
    limit = re.search(r"Fewer than (\d+) fields", (ROOT / "README.md").read_text())
    assert limit is not None
    assert num_leaf_fields(RunConfig) == len(set(names)) < int(limit[1]) <= 100
    assert {"name", "trainer.learning_rate", "asynchrony.max_staleness"} <= set(names)


def test_a_configuration_survives_json() -> None:
    config = RunConfig(
        data=DataConfig(subset="main", chat_template=True, system_prompt="none"),
        sampling=SamplingConfig(stop=("\n", "é")),
        trainer=TrainerConfig(learning_rate=1e-5),
    )
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_keys_that_are_left_out_take_their_defaults() -> None:
    assert from_dict(RunConfig, {"trainer": {"layout": "dp2"}}).trainer == TrainerConfig(
        layout="dp2"
    )


@pytest.mark.parametrize(
    ("values", "field", "value"),
    [
        ({"trainer": {"rank": 2}}, "trainer.rank", NOT_GIVEN),
        ({"trainer": 2}, "trainer", 2),
        ({"num_steps": "3"}, "num_steps", "3"),
        ({"num_steps": 0}, "num_steps", 0),
        ({"cluster": {"address": 3}}, "cluster.address", 3),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], field: str, value: Any) -> None:
    with invalid(field, value):
        from_dict(RunConfig, values)


@dataclass(frozen=True, kw_only=True)
class WithRoles(RunConfig):
    rival: TrainedRoleConfig = field(default_factory=TrainedRoleConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)


@pytest.mark.parametrize(
    ("values", "field", "value", "other"),
    [
        ({"rival": {"trainer": {"layout": "x2"}}}, "rival.trainer.layout", "x2", ""),
        (
            {"rival": {"trainer": {"layout": "dp2,dp1", "snapshot_every": 0}}},
            "rival.trainer.snapshot_every",
            0,
            "rival.trainer.layout='dp2,dp1'",
        ),
        (
            {"rival": {"model": {"lora": "r4"}, "trainer": {"layout": "tp2"}}},
            "rival.model.lora",
            "r4",
            "rival.trainer.layout='tp2'",
        ),
        ({"rival": {"model": {"lora": "q4"}}}, "rival.model.lora", "q4", ""),
        ({"judge": {"num_workers": 0}}, "judge.num_workers", 0, ""),
        ({"judge": {"model": {"dtype": "int8"}}}, "judge.model.dtype", "int8", ""),
        ({"trainer": {"layout": "x2"}}, "trainer.layout", "x2", ""),
    ],
)
def test_an_error_of_a_section_has_full_option_names(
    values: dict[str, Any], field: str, value: Any, other: str
) -> None:
    with invalid(field, value) as refused:
        from_dict(WithRoles, values)
    assert re.search(rf"(?<![\w.]){re.escape(other)}", refused.value.rule)


@dataclass(frozen=True, kw_only=True)
class Required:
    size: int


@dataclass(frozen=True, kw_only=True)
class Nested:
    inner: Required


@dataclass(frozen=True, kw_only=True)
class Unsupported:
    path: Path


def test_a_field_without_a_default_must_be_given() -> None:
    assert build(Nested, {"inner.size": 2}) == Nested(inner=Required(size=2))
    with invalid("inner.size"):
        build(Nested, {})


def test_an_unsupported_type_of_a_field_is_a_type_error() -> None:
    with error_about(TypeError, "Path"):
        leaves(Unsupported)
