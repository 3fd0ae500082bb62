"""The search: legal layouts, memory, the order of plans, and clusters that are too small."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.planner.cpu_device import cpu_cluster
from rlsys.planner.hardware import Cluster, parse_cluster
from rlsys.planner.lengths import fixed, lognormal
from rlsys.planner.model_config import named_model
from rlsys.planner.planning import predicted_step
from rlsys.planner.plans import Workload
from rlsys.planner.profiles import fitted_constants
from rlsys.planner.run_plan import Role, RunShape, step_time, training_seconds
from rlsys.planner.search import (
    TIE,
    as_layout,
    as_training_plan,
    ranked,
    search,
    training_layouts,
    training_plans,
)
from tests.errors import invalid
from tests.planner.cpu_examples import cpu_probe

QWEN = named_model("Qwen3-8B")  # 32 heads, 8 KV heads, 36 layers, width 12288


def shape(*, prompts: int = 32, longest: int = 4096, model: str = "Qwen3-8B") -> RunShape:
    policy = Role(name="policy", model=named_model(model), samples=True)
    work = Workload(
        prompts=prompts,
        group_size=8,
        prompt_tokens=200,
        completions=lognormal(longest / 4, longest),
    )
    return RunShape(roles=(policy,), workload=work)


def cluster(text: str = "1x8xH100") -> Cluster:
    return parse_cluster(text)


def test_layouts_divide_the_model_and_use_all_devices() -> None:
    found = {str(layout) for layout in training_layouts(QWEN, 8, per_node=8)}
    assert {"dp8", "dp4tp2", "tp8", "dp2pp4", "dp2tp2cp2"} <= found
    assert "pp8" not in found  # 36 layers
    assert not any("ep" in name for name in found)  # no experts


def test_experts_are_split_over_ranks_with_rows() -> None:
    moe = named_model("Qwen3-30B-A3B")  # 128 experts
    layouts = {str(one): one for one in training_layouts(moe, 16, per_node=8)}
    plan = as_training_plan(layouts["dp2ep8"])
    assert (plan.dp, plan.ep, plan.num_gpus) == (16, 8, 16)


@given(num_gpus=st.sampled_from([1, 2, 4, 6, 8, 16, 32]))
@settings(max_examples=7)
def test_a_layout_and_its_plan_are_inverse(num_gpus: int) -> None:
    for model in (QWEN, named_model("Qwen3-30B-A3B")):
        for layout in training_layouts(model, num_gpus, per_node=8):
            plan = as_training_plan(layout)
            assert plan.num_gpus == layout.num_ranks == num_gpus
            assert as_layout(plan) == layout


def test_every_plan_fits_and_the_fastest_is_first() -> None:
    found = search(shape(), cluster())
    best = found[0].estimate.seconds
    for one in found:
        assert one.plan.num_gpus <= 8
        assert all(need.fits(cluster()) for need in one.memory.values())
        assert one.estimate.seconds >= best / (1 + TIE)
        assert not one.is_tied or one.estimate.seconds <= best * (1 + TIE) ** 2
    others = [one.estimate.seconds for one in found if not one.is_tied]
    assert others == sorted(others)


def test_a_predicted_step_has_the_work_of_all_its_rollouts() -> None:
    constants = replace(fitted_constants(), controller_s=2e-3, reward_s=1e-3)
    best = search(shape(prompts=32), cluster(), constants=constants)[0]
    step = predicted_step(shape(prompts=32), cluster(), best.plan, best.estimate, constants)
    assert step.controller_s == pytest.approx(32 * 2e-3)
    assert step.reward_s == pytest.approx(32 * 8 * 1e-3)


def test_of_tied_plans_the_least_stale_is_first() -> None:
    (first, *_) = search(shape(), cluster())
    slower = replace(
        first,
        plan=replace(first.plan, max_staleness=0),
        estimate=replace(first.estimate, seconds=first.estimate.seconds * (1 + TIE / 2)),
    )
    assert ranked([first, slower])[0].plan.max_staleness == 0
    far = replace(slower, estimate=replace(slower.estimate, seconds=first.estimate.seconds * 2))
    assert not ranked([far, first])[0].is_tied


def test_of_tied_layouts_the_one_with_the_fewest_kinds_is_first() -> None:
    """Rows of 1,224 tokens on four devices: dp4 and cp4 take the same time."""
    (policy,) = shape(longest=1024).roles
    found = training_plans(policy, cluster(), 4, shape(longest=1024), fitted_constants())
    seconds = [
        training_seconds(policy, cluster(), plan, shape(longest=1024), fitted_constants())
        for plan in found
    ]
    assert seconds[0] <= min(seconds) * (1 + TIE)
    assert str(as_layout(found[0])) == "dp4"


def test_more_devices_are_never_slower() -> None:
    times = [
        search(shape(prompts=64), cluster(name))[0].estimate.seconds
        for name in ("1x8xH100", "2x8xH100", "4x8xH100")
    ]
    assert times[1] <= times[0] * (1 + TIE)
    assert times[2] <= times[1] * (1 + TIE)


def test_asynchrony_takes_as_long_as_the_slower_side() -> None:
    constants = fitted_constants()
    (plan,) = [
        one.plan for one in search(shape(), cluster(), max_staleness=(0,), placements=("separate",))
    ][:1]
    synchronous = step_time(shape(), cluster(), plan, constants=constants)
    overlapped = step_time(shape(), cluster(), replace(plan, max_staleness=1), constants=constants)
    parts = synchronous.breakdown
    slower = max(parts["generation"] + parts["weights"], parts["training"])
    assert overlapped.seconds == pytest.approx(slower * constants["rl_overlap"])
    assert synchronous.seconds == pytest.approx(sum(parts.values()))


def test_a_frozen_role_takes_a_device() -> None:
    policy = shape().policy
    reference = Role(name="reference", model=QWEN, is_trained=False, forward_passes=1)
    roles = replace(shape(), roles=(policy, reference))
    for one in search(roles, cluster())[:5]:
        assert one.plan.frozen_gpus == {"reference": 1}
        assert one.plan.num_gpus <= 8


def test_two_trained_roles_have_devices_of_their_own() -> None:
    critic = Role(name="critic", model=QWEN, forward_passes=1)
    roles = replace(shape(), roles=(shape().policy, critic))
    best = search(roles, cluster("2x8xH100"))[0].plan
    assert {*best.trainers} == {"policy", "critic"}
    assert best.trainer_gpus == 2 * best.trainers["critic"].num_gpus
    assert best.placement == "separate"


def test_shared_devices_carry_replicas_of_several_ranks() -> None:
    found = [one.plan for one in search(shape(), cluster(), placements=("colocated",))]
    assert {(2, 4), (4, 2)} <= {(plan.generation.tp, plan.replicas) for plan in found}
    for plan in found:
        assert plan.num_gpus == plan.trainer_gpus == plan.generation_gpus == 8
        assert plan.generation.memory_fraction == 0.8
    # 65.5 GB of weights do not fit into 80 % of one H100.
    large = search(shape(model="Qwen3-32B"), cluster("2x8xH100"), placements=("colocated",))
    assert all(one.plan.generation.tp >= 2 for one in large)
    # A replica of eight devices does not fit into nodes of four.
    narrow = search(shape(model="Qwen3-32B"), cluster("4x4xH100"), placements=("colocated",))
    assert all(2 <= one.plan.generation.tp <= 4 for one in narrow)


def test_a_cluster_that_is_too_small_names_one_that_fits() -> None:
    with invalid("cluster") as caught:
        search(shape(model="Qwen3-32B"), cluster("1x2xH100"))
    assert "x2xH100" in caught.value.fix


def test_lengths_beyond_the_context_are_refused() -> None:
    work = replace(shape().workload, completions=fixed(1 << 20))
    with invalid("workload.completion_tokens"):
        search(replace(shape(), workload=work), cluster())


def test_cores_without_room_are_not_advised_to_use_gpus() -> None:
    cores = cpu_cluster(cpu_probe(), "float32", 1, 2)
    with invalid("cluster", "1x2xCPU") as found:
        search(shape(model="Llama-3.1-405B"), cores)
    assert "GPU" not in str(found.value)
