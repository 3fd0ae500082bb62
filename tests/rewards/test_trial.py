"""The trial call of each reward before a run starts."""

from __future__ import annotations

import asyncio
import os
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rlsys
from recipes import arithmetic
from recipes.grpo import grpo
from recipes.quickstart import QuickstartConfig
from rlsys.common.user_functions import number_of
from rlsys.config import RewardConfig
from rlsys.errors import InvalidValues
from rlsys.rewards import RewardFailure, as_rewards, example_rollout, reward
from rlsys.rewards.outcome import components_of
from rlsys.rewards.reward_trial import try_rewards
from tests.errors import invalid
from tests.tiers import rest_slow


def named(name: str, function: Any) -> Any:
    return reward(name=name)(function)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        (torch.tensor(0.25), 0.25),
        (torch.tensor(2), 2.0),
        (torch.tensor(True), 1.0),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
        (10**400, float("inf")),
        (None, None),
        ("1", None),
        ((1.0,), None),
        ([1.0], None),
        (np.array([0.25]), None),
        (torch.tensor([0.25]), None),
        (torch.tensor([]), None),
        (torch.tensor(0.5, device="meta"), None),
        (np.str_("1"), None),
        (np.array("1"), None),
        (1j, None),
        (torch.tensor(1j), None),
        (object(), None),
    ],
)
def test_numbers_of_all_libraries_are_numbers(value: object, expected: float | None) -> None:
    assert number_of(value) == expected
    (one,) = as_rewards([named("mine", lambda rollout: value)])
    outcome = components_of(one, value)
    if expected is None:
        assert isinstance(outcome, RewardFailure)
        assert (outcome.kind, outcome.reward) == ("type", "mine")
    elif expected == float("inf"):
        assert isinstance(outcome, RewardFailure)
        assert outcome.kind == "nan"
    else:
        assert outcome == {"mine": expected}
        assert components_of(one, {"part": value}) == {"mine": expected, "mine/part": expected}


@given(st.floats(allow_nan=False, width=32))
def test_a_tensor_without_dimensions_is_its_number(number: float) -> None:
    assert number_of(torch.tensor(number)) == number == number_of(np.float32(number))


def tried(*functions: Any, metadata: dict[str, Any] | None = None, **limits: Any) -> list[str]:
    rollout = example_rollout("42", metadata=metadata or {})
    rewards = as_rewards(functions)
    return asyncio.run(try_rewards(rewards, rollout, RewardConfig(**limits), start_timeout_s=60))


def test_rewards_that_return_numbers_give_no_warning() -> None:
    assert tried(lambda rollout: float(rollout.completion_text == "42")) == []

    async def slow_but_fine(rollout: Any) -> Any:
        await asyncio.sleep(0)
        return np.float32(1)

    assert tried(slow_but_fine) == []


@pytest.mark.parametrize(
    "value",
    rest_slow(
        [None, pytest.param((1.0, 2.0)), np.array([1.0]), "0.5", Decimal, {"part": None}, {}]
    ),
)
def test_a_value_that_is_not_a_number_is_refused_with_the_rewards_name(value: object) -> None:
    bad = named("mine", lambda rollout: value)
    good = reward(name="other")(lambda rollout: 1.0)
    with invalid("reward 'mine'"):
        tried(good, bad)


def test_all_mistakes_are_raised_and_exceptions_are_warnings() -> None:
    def raises(rollout: Any) -> float:
        raise KeyError("answer")

    none, text = named("none", lambda _: None), named("text", lambda _: "1")
    with pytest.raises(InvalidValues) as found:
        tried(raises, none, text)
    assert [getattr(one, "field", "") for one in found.value.errors] == [
        "reward 'none'",
        "reward 'text'",
    ]
    (warning,) = tried(raises, lambda _: 1.0)
    assert "raises" in warning
    assert "KeyError" in warning


def test_a_function_that_ends_its_process_is_a_warning() -> None:
    def crash(rollout: Any) -> float:
        import os

        os._exit(3)

    (warning,) = tried(crash, reward(name="good")(lambda _: 1.0))
    assert "'crash'" in warning


def test_the_trial_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsys.rewards.reward_trial.TRIAL_S", 0.5)

    def hangs(rollout: Any) -> float:
        while True:
            time.sleep(0.01)

    (warning,) = tried(hangs)
    assert "'hangs'" in warning


def test_a_reward_that_is_declared_slow_is_loaded_and_not_called(tmp_path: Path) -> None:
    """Its timeout_s is above reward.timeout_s, like that of a reward that asks a judge."""

    def asks(rollout: Any) -> None:
        (tmp_path / "called").touch()

    judge = reward(name="judge", timeout_s=120)(asks)  # type: ignore[arg-type]
    assert tried(judge) == []
    assert not (tmp_path / "called").exists()
    with invalid("reward 'judge'"):
        tried(judge, timeout_s=120.0)
    assert (tmp_path / "called").exists()


def test_functions_that_cannot_be_loaded_are_refused(tmp_path: Path) -> None:
    class Unloadable:
        def __reduce__(self) -> Any:
            return (exec, ("raise ImportError('no such library')",))

    broken = Unloadable()
    slow = reward(name="slow", timeout_s=120)(lambda _, one=broken: 1.0)
    with invalid("rewards", ["slow"]) as found:
        tried(slow)
    assert "no such library" in found.value.rule


@pytest.mark.parametrize("memory_gib", [1e10, 1e30])
def test_memory_beyond_the_kernels_limit_is_refused(memory_gib: float) -> None:
    with invalid("reward.memory_gib", memory_gib):
        tried(lambda _: 1.0, memory_gib=memory_gib)


def test_functions_that_are_not_loaded_in_time_are_refused() -> None:
    rewards = as_rewards([named("mine", lambda _: 1.0)])
    with invalid("cluster.start_timeout_s", 1e-9) as found:
        asyncio.run(try_rewards(rewards, example_rollout(), RewardConfig(), start_timeout_s=1e-9))
    assert str(found.value).count("1e-09") == 1
    assert "['mine']" in found.value.rule


def test_functions_that_end_their_process_while_it_loads_them_are_refused() -> None:
    class Ends:
        def __reduce__(self) -> Any:
            return os._exit, (5,)

    ends = Ends()
    with invalid("rewards", ["mine"]) as found:
        tried(named("mine", lambda _, one=ends: 1.0))
    assert "exit code 5" in found.value.rule


def test_a_dry_run_and_a_start_refuse_a_wrong_reward_before_ray_starts(tmp_path: Path) -> None:
    def nothing(config: QuickstartConfig, rewards: Any, *, rows: Any) -> rlsys.Dataflow:
        bad = named("nothing", lambda rollout: None)
        flow: rlsys.Dataflow = grpo(config, [bad], rows=rows)
        return flow

    config = QuickstartConfig(runs_dir=str(tmp_path / "runs"))
    for dry_run in (True, False):
        with invalid("reward 'nothing'"):
            arithmetic.run(config, nothing, dry_run=dry_run)
    assert not (tmp_path / "runs" / "quickstart").exists()
