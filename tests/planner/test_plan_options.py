"""Options of the user restrict a plan, and the printed command runs the printed plan."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.grpo import GRPOConfig, grpo
from recipes.grpo_gsm8k import GSM8KConfig
from recipes.ppo import Config, PPOConfig, ppo
from rlsys.commands import plan_command
from rlsys.commands.plan_command import main, without_options
from rlsys.config import (
    AsyncConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)
from rlsys.config.command_line import parse
from rlsys.config.plan_session import plan_session
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.planner.hardware import GB, parse_cluster
from rlsys.planner.lengths import lognormal
from rlsys.planner.memory import rank_memory
from rlsys.planner.plan_file import plan_toml
from rlsys.planner.plan_report import staleness_line
from rlsys.planner.plan_request import PlanRequest
from rlsys.planner.plan_settings import plan_of
from rlsys.planner.planning import RunPlanning, plan_run
from rlsys.planner.run_plan import RunShape, step_time, training_seconds
from tests.errors import invalid
from tests.planner.stated_step import stated_step

ROOT = Path(__file__).parents[2]
WORK = ["--prompt-tokens", "100", "--completion-tokens", "mean=400,max=1024"]
SMALL = ["--prompts-per-step", "16", "--group-size", "4", "--sampling.max-tokens", "1024"]
MODEL = ["--model.path", "Qwen/Qwen3-0.6B", "--model.dtype", "bfloat16"]


def planned(
    config: GRPOConfig, cluster: str = "1x2xH100", **changes: Any
) -> tuple[RunPlanning, Dataflow]:
    flow = grpo(config, [lambda rollout: 0.0])
    request = PlanRequest(
        cluster=parse_cluster(cluster),
        prompt_tokens=100,
        completions=lognormal(400, 1024),
        **{"num_simulated": 0, **changes},
    )
    return plan_run(config, flow, request), flow


def configuration(model: Mapping[str, Any] | None = None, **changes: Any) -> GRPOConfig:
    given = {"path": "Qwen/Qwen3-0.6B", "dtype": "bfloat16", **(model or {})}
    return GRPOConfig(
        model=ModelConfig(**given),
        data=DataConfig(max_prompt_tokens=512),
        sampling=SamplingConfig(max_tokens=1024),
        **{"prompts_per_step": 16, "group_size": 4, **changes},
    )


BOUND = "asynchrony.max-staleness"
FILE = """
group_size = 8
[trainer]
optimizer_state = "bfloat16"
layout = "dp1"
[rollout]
engine = "vllm"
[rollout.vllm]
max_num_batched_tokens = 4096
"""


@pytest.fixture
def plannings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RunPlanning]:
    """Work in an empty directory, and return what `rlsys plan` finds in it."""
    found: list[RunPlanning] = []

    def kept(*arguments: Any, **named: Any) -> RunPlanning:
        found.append(plan_run(*arguments, **named))
        return found[-1]

    monkeypatch.setattr(plan_command, "plan_run", kept)
    monkeypatch.chdir(tmp_path)
    return found


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--rollout.num-replicas", "1", "--trainer.layout", "dp2", "--asynchrony.max-staleness=0"],
        ["--rollout.engine", "torch", "--rollout.kv-cache-gib", "4"],
        ["--model.lora", "r16a32:q_proj", "--trainer.layout", "dp2,dp1"],
        ["--rollout.max-running", "64", "--rollout.gpu-memory-frac", "0.7"],
        ["--model.gradient-checkpointing", "auto", "--trainer.micro-batch-tokens", "10000"],
        ["--trainer.optimizer-state", "cpu_bfloat16", "--placement", "colocated"],
        ["--config", "run.toml"],
        ["--rollout.num-gpus", "1", "--trainer.num-gpus", "1", "--rollout.engine", "vllm"],
    ],
    ids=" ".join,
)
def test_the_printed_command_runs_the_printed_plan(
    options: list[str], plannings: list[RunPlanning], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.toml").write_text(FILE)
    num_gpus = 3 if "dp2" in " ".join(options) else 2
    own = ["--cluster", f"1x{num_gpus}xH100", "--simulate", "0"]
    assert main([str(ROOT / "recipes/grpo_gsm8k.py"), *own, *WORK, *MODEL, *SMALL, *options]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    config = parse(GSM8KConfig, command[2:]).config
    flow = grpo(config, [lambda rollout: 0.0])
    assert plan_of(config, flow) == plannings[0].plans[0].ranked.plan
    asked = parse(GSM8KConfig, [*MODEL, *SMALL, *options]).config
    assert config.group_size == asked.group_size
    assert config.model.lora == asked.model.lora
    assert config.trainer.optimizer_state == asked.trainer.optimizer_state
    assert config.rollout.max_running == asked.rollout.max_running
    assert config.rollout.vllm == asked.rollout.vllm


def test_the_command_of_a_run_with_several_models_runs_its_plan(
    plannings: list[RunPlanning], capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--cluster", "1x8xH100", "--simulate", "0"]
    critic = ["--critic.model.lora", "r8", "--critic.trainer.layout", "dp2"]
    others = ["--reward-model.model.path", "Qwen/Qwen3-0.6B", "--reference.num-workers", "2"]
    options = [*MODEL, *SMALL, *critic, *others]
    assert main([str(ROOT / "recipes/ppo.py"), *own, *WORK, *options]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    config = parse(Config, command[2:]).config
    plan = plan_of(config, ppo(config, [lambda rollout: 0.0]))
    assert plan == plannings[0].plans[0].ranked.plan
    assert plan.trainers["critic"].lora_rank == 8
    assert {role.name for role in plannings[0].shape.roles if role.model.has_scalar_head} == {
        "critic",
        "reward_model",
    }
    assert plan.num_gpus <= 8


def test_a_row_longer_than_a_micro_batch_has_its_memory() -> None:
    """A row of 1,124 tokens forms its own micro-batch among micro-batches of 100 tokens."""
    small, _ = planned(configuration(), chosen={"trainer.micro_batch_tokens": 100})
    trainer = small.plans[0].ranked.plan.trainers["policy"]
    assert trainer.row_tokens == 100
    whole = replace(trainer, row_tokens=1124.0)
    need = rank_memory(small.shape.policy.model, small.cluster, whole, small.constants)
    assert small.plans[0].ranked.memory["policy"] == need


def test_options_that_no_plan_has_are_named() -> None:
    chosen = {"trainer.layout": "dp2", "placement": "separate", "model.dtype": "bfloat16"}
    with invalid("trainer.layout", "dp2"):
        planned(configuration(), chosen=chosen)
    with invalid("rollout.num_replicas", 9):
        planned(configuration(), chosen={"rollout.num_replicas": 9})
    with invalid("options"):
        planned(configuration(), chosen={"trainer.layout": "dp8", "rollout.num_replicas": 9})


def test_a_configuration_that_allows_no_plan_is_named() -> None:
    """One prompt of a step on three shared devices, and replicas that no cluster has."""
    rollout = RolloutConfig(min_replicas=7, num_replicas=7)
    with invalid("rollout.min_replicas"):
        planned(configuration(rollout=rollout))
    vllm = {"pipeline_parallel_size": 2}
    staged = RolloutConfig(engine="vllm", num_gpus=2, vllm=vllm)
    with invalid("rollout.vllm.pipeline_parallel_size", 2):
        planned(configuration(rollout=staged))


def test_roles_of_their_own_layout() -> None:
    """A critic may have more ranks than the policy."""
    config = PPOConfig(
        model=ModelConfig(path="Qwen/Qwen3-0.6B", dtype="bfloat16"),
        sampling=SamplingConfig(max_tokens=1024),
    )
    flow = ppo(config, [lambda rollout: 0.0])
    chosen = {"trainer.layout": "dp1", "critic.trainer.layout": "dp2", "reference.num_workers": 2}
    request = PlanRequest(
        cluster=parse_cluster("1x8xH100"), num_simulated=0, chosen=chosen, prompt_tokens=100
    )
    plan = plan_run(config, flow, request).plans[0].ranked.plan
    assert {name: one.num_gpus for name, one in plan.trainers.items()} == {"policy": 1, "critic": 2}
    assert plan.frozen_gpus == {"reward_model": 1, "reference": 2}


def test_adapters_fit_where_all_weights_do_not() -> None:
    """Adapters have 16.4 GB of base and 0.7 GB of states, all weights 131 GB of states."""
    with invalid("cluster"):
        planned(configuration({"path": "Qwen/Qwen3-8B"}), "1x1xH100")
    found, _ = planned(configuration({"path": "Qwen/Qwen3-8B", "lora": "r16"}))
    assert {one.ranked.plan.placement for one in found.plans} == {"separate", "colocated"}
    for one in found.plans:
        trainer = one.ranked.plan.trainers["policy"]
        assert trainer.lora_rank == 16
        assert trainer.tp == trainer.cp == trainer.pp == 1
        ranks = trainer.num_gpus
        adapters = one.ranked.memory["policy"].breakdown["adapters"]
        assert adapters == 16 * 43_646_976 / ranks
    assert found.plans[0].settings["model.lora"] == "r16"
    assert 'lora = "r16"' in plan_toml(found)


@pytest.mark.parametrize(
    ("state", "bytes_per_parameter"), [("float32", 16), ("bfloat16", 12), ("cpu_float32", 8)]
)
def test_the_state_of_the_optimizer_is_planned(state: str, bytes_per_parameter: int) -> None:
    trainer = TrainerConfig(optimizer_state=state)  # type: ignore[arg-type]
    found, _ = planned(configuration(trainer=trainer))
    best = found.plans[0]
    parts = best.ranked.memory["policy"].breakdown
    ranks = best.ranked.plan.trainers["policy"].num_gpus
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    parameters = found.shape.policy.model.parameters
    assert states == pytest.approx(bytes_per_parameter * parameters / ranks)
    assert best.settings["trainer.optimizer_state"] == state


def test_moments_on_the_host_take_time() -> None:
    """8 bytes per parameter cross PCIe (63 GB/s, of which 70 %) twice in an update."""
    found, _ = planned(configuration())
    shape, constants = found.shape, found.constants
    plan = found.plans[0].ranked.plan.trainers["policy"]
    arguments = shape.policy, found.cluster
    offloaded = replace(plan, offload_optimizer=True)
    added = training_seconds(*arguments, offloaded, shape, constants)
    added -= training_seconds(*arguments, plan, shape, constants)
    local = shape.policy.model.parameters / plan.num_gpus
    factor = constants.profile("rlsys").factor * constants["rl_training"]
    assert added == pytest.approx(factor * 2 * 8 * local / (63 * GB * 0.7), rel=1e-6)


def test_float32_is_planned_as_float32() -> None:
    slow, _ = planned(configuration({"dtype": "float32"}))
    fast, _ = planned(configuration())
    assert (slow.cluster.gpu.value_bytes, fast.cluster.gpu.value_bytes) == (4.0, 2.0)
    assert slow.plans[0].ranked.estimate.seconds > fast.plans[0].ranked.estimate.seconds
    assert len(slow.assumptions) == len(fast.assumptions) + 1


def test_rows_at_once_reach_the_prediction() -> None:
    few, _ = planned(configuration(rollout=RolloutConfig(max_running=4)))
    many, _ = planned(configuration(rollout=RolloutConfig(max_running=256)))
    assert few.plans[0].settings["rollout.max_running"] == 4
    assert few.plans[0].ranked.estimate.seconds > 1.5 * many.plans[0].ranked.estimate.seconds


def test_passes_and_updates_of_a_step() -> None:
    """Two epochs train all rows twice, two mini-batches train them once."""

    def seconds(epochs: int, updates: int) -> float:
        shape = replace(found.shape, epochs=epochs, updates=updates)
        return training_seconds(shape.policy, found.cluster, plan, shape, constants)

    found, _ = planned(configuration(prompts_per_step=256))
    constants, plan = found.constants, found.plans[0].ranked.plan.trainers["policy"]
    assert seconds(2, 2) == pytest.approx(2 * seconds(1, 1))
    assert seconds(1, 2) < 1.2 * seconds(1, 1)


def test_a_bound_below_a_step_has_a_share_of_the_overlap() -> None:
    found, _ = planned(configuration(), max_staleness=(1,), chosen={"placement": "separate"})
    plan = found.plans[0].ranked.plan

    def seconds(bound: int, updates: int) -> float:
        shape: RunShape = replace(found.shape, epochs=updates, updates=updates)
        bounded = replace(plan, max_staleness=bound)
        return step_time(shape, found.cluster, bounded, constants=found.constants).seconds

    # the fourth update of a step trains on tokens that are three updates old
    apart, together = seconds(3, 4), seconds(7, 4)
    assert seconds(4, 4) == pytest.approx(0.75 * apart + 0.25 * together)
    assert seconds(11, 4) == together < apart


def test_all_plans_have_a_bound_that_was_asked() -> None:
    found, _ = planned(configuration(), max_staleness=(2, 3))
    bounds = {(one.ranked.plan.placement, one.ranked.plan.max_staleness) for one in found.plans}
    assert bounds == {("separate", 2), ("separate", 3), ("colocated", 2), ("colocated", 3)}
    assert f"max_staleness={found.plans[0].ranked.plan.max_staleness}" in staleness_line(found)
    four = TrainerConfig(num_minibatches=4)
    steps, _ = planned(configuration(trainer=four, asynchrony=AsyncConfig(max_staleness=3)))
    assert steps.bounds == (3, 7, 11)
    chosen = {"asynchrony.max_staleness": 5, "placement": "colocated"}
    fixed, _ = planned(configuration(), chosen=chosen)
    assert {one.ranked.plan.max_staleness for one in fixed.plans} == {5}
    with invalid("--staleness"):
        planned(configuration(), chosen=chosen, max_staleness=(0, 1))


def test_each_placement_and_bound_is_simulated() -> None:
    """The closed form does not separate these bounds. The simulation does, on shared devices."""
    small = configuration(prompts_per_step=4)
    found, _ = planned(small, max_staleness=(0, 2), num_simulated=4)
    played = {
        (one.ranked.plan.placement, one.ranked.plan.max_staleness): one.ranked.estimate.seconds
        for one in found.plans
        if one.result is not None
    }
    assert len(played) == 4
    assert played["colocated", 2] < played["colocated", 0]


def test_the_prediction_of_a_run_has_its_options() -> None:
    """The record at the start of a run predicts from `plan_of`, as --dry-run does."""
    changes = {"num_gpus": 1, "optimizer_state": "cpu_bfloat16"}
    config = configuration(
        {"lora": "r16"},
        trainer=TrainerConfig(**changes),  # type: ignore[arg-type]
        rollout=RolloutConfig(num_gpus=1, engine="vllm", max_running=4),
    )
    flow = grpo(config, [lambda rollout: 0.0])
    plan = plan_of(config, flow)
    trainer = plan.trainers["policy"]
    assert (trainer.lora_rank, trainer.moment_bytes, trainer.offload_optimizer) == (16, 4.0, True)
    assert (plan.generation.max_running, plan.generation.cache_gib) == (4, 0.0)
    request = PlanRequest(cluster=parse_cluster("1x2xH100"), prompt_tokens=100)
    few, _ = stated_step(config, flow, request)
    more = replace(config, rollout=replace(config.rollout, max_running=256))
    many, _ = stated_step(more, flow, request)
    assert few.seconds > many.seconds
    need = rank_memory(
        planned(config, "1x2xH100")[0].shape.policy.model,
        request.cluster,
        trainer,
        request.constants,
    )
    assert "adapters" in need.breakdown


def test_options_of_planning_are_left_out_of_arguments() -> None:
    given = ["--a", "1", "--config", "x.toml", "--config=y.toml", "--b"]
    assert without_options(given) == ["--a", "1", "--b"]
    given = ["--plan", "auto", "--dry_run", "--a", "1", "--dry-run", "8xH100", "--resume", "--b=2"]
    assert without_options([*given, "--resume=auto", "--plan=again"]) == ["--a", "1", "--b=2"]


@pytest.mark.parametrize("name", ["num-minibatches", "num-epochs"])
def test_a_recipe_with_many_updates_is_planned_with_bounds_that_allow_them(
    name: str, plannings: list[RunPlanning], capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--cluster", "1x2xH100", "--simulate", "0"]
    options = [*MODEL, *SMALL, f"--trainer.{name}", "4"]
    assert main([str(ROOT / "recipes/grpo_gsm8k.py"), *own, *WORK, *options]) == 0
    assert plannings[0].bounds == (3, 7, 11)
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    config = parse(GSM8KConfig, command[2:]).config
    assert config.asynchrony.max_staleness in (3, 7, 11)
    # a value of the user is checked
    with pytest.raises(SystemExit):
        main([str(ROOT / "recipes/grpo_gsm8k.py"), *own, *options, f"--{BOUND}", "1"])
    assert BOUND.replace("-", "_") in capsys.readouterr().err
    ahead = configuration(
        trainer=TrainerConfig(num_minibatches=4), asynchrony=AsyncConfig(max_staleness=7)
    )
    with invalid("asynchrony.max_staleness", 1):
        planned(ahead, max_staleness=[1])


def test_a_run_without_a_plan_needs_a_bound_that_allows_its_updates() -> None:
    options = [*MODEL, *SMALL, "--trainer.num-minibatches", "4"]
    with pytest.raises(SystemExit):
        parse(GSM8KConfig, options)
    with plan_session() as session:
        found = parse(GSM8KConfig, [*options, "--plan", "auto"]).config
        assert found.asynchrony.max_staleness == 3
        assert session.must_plan


def test_a_bound_beyond_the_steps_of_the_run_is_refused() -> None:
    config = configuration(num_steps=10)
    assert planned(config, max_staleness=[10])[0].bounds == (10,)
    with invalid("--staleness", 11):
        planned(config, max_staleness=[0, 11])


@pytest.mark.parametrize(
    ("name", "changes", "value"),
    [("--turns", {"turns": 2}, 2), ("--tool-seconds", {"tool_s": 2.0, "turns": 1}, 2.0)],
)
def test_an_option_of_environments_is_named_where_there_is_none(
    name: str, changes: dict[str, Any], value: float
) -> None:
    with invalid(name, value):
        planned(configuration(), **changes)
