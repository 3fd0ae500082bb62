import functools
import math
import pickle
from typing import Any

import pytest
import torch

from rlsys.algorithms.advantages import (
    grpo_advantage,
    pass_at_k_advantage,
    remax_advantage,
    scale_rl_advantage,
)
from rlsys.algorithms.batch_functions import run_batch_function
from rlsys.algorithms.composed import with_kl
from rlsys.algorithms.group_functions import (
    check_group_size,
    dynamic_sampling,
    min_group_size,
    run_group_function,
)
from rlsys.common.user_functions import FunctionFailed, name_of
from tests.errors import invalid

EQUAL, MIXED = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])


def test_an_advantage_says_how_large_a_group_it_needs() -> None:
    assert min_group_size(grpo_advantage) == 2
    assert min_group_size(functools.partial(grpo_advantage, epsilon=1.0)) == 2
    assert min_group_size(scale_rl_advantage) == 2
    assert min_group_size(remax_advantage) == 2
    assert min_group_size(lambda rewards: rewards) == 1
    assert min_group_size(dynamic_sampling(remax_advantage)) == 2
    assert min_group_size(dynamic_sampling(pass_at_k_advantage(4))) == 5


def test_a_group_that_is_too_small_is_refused() -> None:
    check_group_size(grpo_advantage, 2)
    with invalid("group_size", 1):
        check_group_size(functools.partial(grpo_advantage, epsilon=1.0), 1)
    with invalid("group_size", 4):
        check_group_size(pass_at_k_advantage(4), 4)


def test_dynamic_sampling_refuses_groups_of_equal_rewards() -> None:
    sampled = dynamic_sampling(grpo_advantage)
    assert sampled(EQUAL) is None
    found = sampled(MIXED)
    assert found is not None
    assert found.tolist() == grpo_advantage(MIXED).tolist()
    assert pickle.loads(pickle.dumps(sampled)) == sampled


def test_dynamic_sampling_may_judge_by_the_accuracy() -> None:
    sampled = dynamic_sampling(grpo_advantage, by_last_column=True)
    assert sampled(MIXED, EQUAL) is None
    assert sampled(EQUAL, MIXED) is not None


def broken(rewards: torch.Tensor) -> torch.Tensor:
    table: dict[str, torch.Tensor] = {}
    return table["advantages"] - rewards


def returning(values: Any) -> Any:
    def mine(rewards: torch.Tensor) -> Any:
        return values

    return mine


ONE = torch.tensor([True])


def over_group(function: Any) -> Any:
    return run_group_function(function, [MIXED], stage="centred")


def over_batch(function: Any, **options: Any) -> Any:
    arguments: dict[str, Any] = {"loss_masks": None, "writes": ["a"], "per_token": False}
    return run_batch_function(
        function, [MIXED], stage="centred", group_ids=[4, 4], **{**arguments, **options}
    )


@pytest.mark.parametrize("run", [over_group, over_batch])
def test_a_function_that_raises_is_reported_with_its_stage_and_line(run: Any) -> None:
    with pytest.raises(FunctionFailed) as failed:
        run(broken)
    message = str(failed.value)
    assert message.startswith("stage 'centred': broken raised KeyError: ")
    assert 'return table["advantages"] - rewards' in message
    assert "in called" not in message


@pytest.mark.parametrize("run", [over_group, over_batch])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_reported_with_its_stage(run: Any, number: float) -> None:
    with pytest.raises(FunctionFailed, match=rf"^stage 'centred': mine .*{number}\]"):
        run(returning(torch.tensor([1.0, number])))


def test_a_tokens_value_may_be_the_logarithm_of_zero() -> None:
    per_token: dict[str, Any] = {"loss_masks": [ONE, ONE], "per_token": True}
    assert over_batch(returning(torch.tensor([0.0, -math.inf])), **per_token)
    with pytest.raises(FunctionFailed, match=r"'a', .*1 of 2 tokens"):
        over_batch(returning(torch.tensor([0.0, math.nan])), **per_token)


@pytest.mark.parametrize("run", [over_group, over_batch])
@pytest.mark.parametrize(
    ("values", "quoted"),
    [
        (torch.zeros(1), "(1,)"),
        (torch.zeros(2, 1), "(2, 1)"),
        ("text", "'text' (str)"),
        ({"advantages": MIXED}, "(dict)"),
    ],
)
def test_a_result_of_another_shape_is_refused(run: Any, values: Any, quoted: str) -> None:
    with invalid("stage 'centred': mine") as error:
        run(returning(values))
    assert quoted in error.value.rule


def test_names_of_functions_in_messages() -> None:
    function: Any = broken
    assert name_of(functools.partial(function, rewards=1)) == "broken"
    sampled: Any = dynamic_sampling(broken)
    assert name_of(sampled) == "dynamic_sampling(advantage=broken, by_last_column=False)"
    assert name_of(with_kl(function, "k3", 0.1)).startswith("with_kl(loss=broken, estimator='k3'")

    class unnamed:
        pass

    assert name_of(unnamed()) == "unnamed"
