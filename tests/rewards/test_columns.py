"""Dotted paths of columns."""

from __future__ import annotations

import pytest

from rlsys.rewards import code_tests, exact_match, example_rollout, numeric_answer
from rlsys.rewards.column_paths import (
    dead_end,
    nearest_paths,
    nested_paths,
    split_path,
    value_at,
)

ROW = {
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"a": {"b": {"c": 1}}, "split.name": "train"},
    "a.b": "its own name",
    "info": '{"answer": "5", "tests": {"inputs": ["1"]}}',
    "broken": "{",
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("reward_model.ground_truth", "72"),
        ("extra_info.a.b.c", 1),
        ("extra_info.split.name", "train"),
        ("a.b", "its own name"),
        ("info.answer", "5"),
        ("info.tests.inputs", ["1"]),
        ("reward_model", ROW["reward_model"]),
        ("reward_model.missing", None),
        ("reward_model.style.deeper", None),
        ("broken.answer", None),
        ("missing.answer", None),
    ],
)
def test_a_path_finds_its_value(path: str, value: object) -> None:
    assert value_at(ROW, path) == value


def test_the_longest_column_name_wins() -> None:
    assert split_path("a.b.c", ["a", "a.b"]) == ("a.b", ("c",))
    assert split_path("a.b", ["b"]) is None


@pytest.mark.parametrize(
    ("path", "reached"),
    [
        ("reward_model.zz", "'reward_model'"),
        ("reward_model..style", "'reward_model'"),
        ("extra_info.a.b.zz.c", "'extra_info.a.b'"),
        ("reward_model.style.deeper", "'reward_model.style'"),
        ("zz.answer", "'reward_model'"),
        ("extra_info.split.name", ""),
        ("info.answer", ""),
    ],
)
def test_a_dead_end_names_the_last_part_that_exists(path: str, reached: str) -> None:
    assert (reached in dead_end(ROW, path)) if reached else dead_end(ROW, path) == ""


def test_a_null_on_the_way_is_not_a_dead_end() -> None:
    assert dead_end({"a": {"b": None}}, "a.b") == ""
    assert dead_end({"a": None}, "a.b") == ""


def test_the_paths_of_a_row_are_suggested() -> None:
    assert "reward_model.ground_truth" in nested_paths(ROW)
    assert nearest_paths("ground_truth", ROW) == ["reward_model.ground_truth"]
    assert nearest_paths("reward_model.groundtruth", ROW) == ["reward_model.ground_truth"]
    assert nearest_paths("nothing", ROW) == []


def test_the_built_in_rewards_read_paths() -> None:
    row = {"reward_model": {"ground_truth": "72"}, "info": '{"tests": "assert f(1) == 1"}'}
    assert numeric_answer("reward_model.ground_truth")(example_rollout("72", metadata=row)) == 1.0
    assert exact_match("reward_model.ground_truth")(example_rollout("7", metadata=row)) == 0.0
    assert code_tests("info.tests").required_columns == ("info.tests",)
