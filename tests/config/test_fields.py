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
    ("values", "message"),
    [
        ({"trainer": {"rank": 2}}, r"trainer\.rank is no field"),
        ({"trainer": 2}, r"trainer=2 is a section; set its fields"),
        ({"num_steps": "3"}, r"num_steps='3' does not fit; give a whole number"),
        ({"num_steps": 0}, r"num_steps=0 trains nothing"),
        ({"cluster": {"address": 3}}, r"cluster\.address=3 does not fit; give text, or none"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_dict(RunConfig, values)


@dataclass(frozen=True, kw_only=True)
class WithRoles(RunConfig):
    rival: TrainedRoleConfig = field(default_factory=TrainedRoleConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rival": {"trainer": {"layout": "x2"}}}, r"^rival\.trainer\.layout: layout 'x2'"),
        (
            {"rival": {"trainer": {"layout": "dp2,dp1", "snapshot_every": 0}}},
            r"^rival\.trainer\.snapshot_every=0 with rival\.trainer\.layout='dp2,dp1'",
        ),
        (
            {"rival": {"model": {"lora": "r4"}, "trainer": {"layout": "tp2"}}},
            r"^rival\.model\.lora='r4' and rival\.trainer\.layout='tp2'",
        ),
        ({"judge": {"num_workers": 0}}, r"^judge\.num_workers=0 of a role"),
        ({"trainer": {"layout": "x2"}}, r"^trainer\.layout: layout 'x2'"),
    ],
)
def test_what_a_class_refuses_is_called_as_it_is_given(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        from_dict(WithRoles, values)


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
    with pytest.raises(ValueError, match=r"inner\.size is missing .* give a whole number"):
        build(Nested, {})


def test_a_type_that_no_option_can_give_is_the_recipe_authors_error() -> None:
    with pytest.raises(TypeError, match="Path"):
        leaves(Unsupported)
