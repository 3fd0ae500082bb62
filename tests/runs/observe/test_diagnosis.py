from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import pytest

from recipes.ppo import PPOConfig
from rlsys.config import (
    AsyncConfig,
    ClusterConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainedRoleConfig,
    TrainerConfig,
)
from rlsys.config.fields import to_dict
from rlsys.engines.training.optimizer import learning_rate
from rlsys.metrics import (
    actor_wait_s,
    actor_work_s,
    engine_kv_usage,
    engine_running,
    engine_waiting,
)
from rlsys.runs.observe.advised_settings import AdvisedSettings, advised_settings
from rlsys.runs.observe.configuration_advice import configuration_warnings
from rlsys.runs.observe.diagnosis import diagnose
from rlsys.runs.observe.speed_findings import BOTTLENECK

HEALTHY: Mapping[str, float] = {
    "reward/mean": 0.5,
    "groups/zero_advantage_frac": 0.3,
    "completion/truncated_frac": 0.05,
    "kl/sampler_trainer": 1e-4,
    "staleness/mean": 0.6,
    "time/step_s": 2.0,
    "time/trainer_idle_s": 0.2,
    "rewards/failed": 0,
}


def lines(num_steps: int = 5, *, first: int = 2, **changed: float) -> list[dict[str, float]]:
    return [{**HEALTHY, **named(changed), "step": first + i} for i in range(num_steps)]


def named(values: Mapping[str, float]) -> dict[str, float]:
    """Metric names from keywords: staleness__mean is staleness/mean."""
    return {name.replace("__", "/"): value for name, value in values.items()}


def changed_to(name: str, value: float) -> list[dict[str, float]]:
    return [{**line, name: value} for line in lines()]


def found(run: list[dict[str, float]], max_staleness: int = 1, **fields: Any) -> dict[str, str]:
    settings = AdvisedSettings(max_staleness=max_staleness, **fields)
    return {finding.kind: finding.message for finding in diagnose(run, settings=settings)}


def test_a_healthy_run_has_no_findings() -> None:
    assert found(lines()) == {}
    assert found([]) == {}


@pytest.mark.parametrize(
    ("name", "value", "kind", "number"),
    [
        ("groups/zero_advantage_frac", 0.92, "equal_rewards", "92%"),
        ("groups/zero_advantage_frac", 0.80, "equal_rewards", "80%"),
        ("completion/truncated_frac", 0.41, "truncated", "41%"),
        ("kl/sampler_trainer", 0.12, "kl_sampler_trainer", "0.12 nats"),
        ("kl/sampler_trainer", -0.12, "kl_sampler_trainer", "0.12 nats"),
        ("time/trainer_idle_s", 1.2, "trainer_idle", "60%"),
        ("staleness/mean", 0.9, "staleness_pinned", "0.90 of asynchrony.max_staleness=1"),
    ],
)
def test_each_problem_is_found_with_its_number(
    name: str, value: float, kind: str, number: str
) -> None:
    findings = found(changed_to(name, value))
    assert list(findings) == [kind]
    assert number in findings[kind]


def test_rejected_drafts_are_found_where_the_engine_keeps_drafting() -> None:
    acceptance, speedup = "engine/draft_acceptance/rollout-0", "engine/draft_speedup/rollout-0"
    wasted = [{**line, acceptance: 0.04} for line in lines()]
    findings = found(wasted)
    assert list(findings) == ["wasted_drafts"]
    assert "4%" in findings["wasted_drafts"]
    assert found([{**line, acceptance: 0.4} for line in lines()]) == {}
    assert found([{**line, speedup: 0.8} for line in wasted]) == {}  # it stops by itself


def test_only_the_bottleneck_that_was_measured_is_found() -> None:
    both = [{**line, "time/trainer_idle_s": 1.5, "staleness/mean": 1.0} for line in lines()]
    assert list(found(both)) == ["trainer_idle"]


def test_a_trainer_that_waits_is_no_bottleneck_however_stale_its_data() -> None:
    assert found(lines(time__trainer_idle_s=0.9, staleness__mean=1.0)) == {}  # 45 %
    busy = lines(time__trainer_idle_s=0.39, staleness__mean=1.0)
    assert list(found(busy)) == ["staleness_pinned"]


def test_rows_of_a_dataset_ask_for_no_replicas() -> None:
    run = lines(time__trainer_idle_s=1.5, staleness__mean=1.0)
    (finding,) = diagnose(run, settings=AdvisedSettings(), samples=False)
    assert "75%" in finding.message
    assert "num_replicas" not in finding.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("groups/zero_advantage_frac", 0.79),
        ("completion/truncated_frac", 0.29),
        ("kl/sampler_trainer", 0.049),
        ("time/trainer_idle_s", 1.0),
        ("staleness/mean", 0.89),
    ],
)
def test_below_its_threshold_nothing_is_found(name: str, value: float) -> None:
    assert found(changed_to(name, value)) == {}


def test_one_step_alone_is_no_finding() -> None:
    run = [*lines(4), *lines(1, first=6, groups__zero_advantage_frac=1.0)]
    assert found(run) == {}  # mean over five steps: 0.44
    assert found(lines(4, groups__zero_advantage_frac=1.0)) == {}


def test_only_the_last_five_steps_count() -> None:
    run = lines(20, groups__zero_advantage_frac=1.0) + lines(5, first=22)
    assert found(run) == {}


def test_the_empty_pipeline_of_the_first_step_is_no_idle_trainer() -> None:
    run = lines(5, first=1)
    run[0] |= {"time/trainer_idle_s": 60.0, "time/step_s": 61.0}
    assert found(run) == {}


def test_on_policy_training_is_advised_to_overlap() -> None:
    assert "max_staleness=1" in found(lines(time__trainer_idle_s=1.9), 0)["trainer_idle"]
    assert "max_staleness" not in found(lines(time__trainer_idle_s=1.9), 1)["trainer_idle"]


def test_advice_that_no_machine_can_follow_is_not_given() -> None:
    waiting = lines(time__trainer_idle_s=1.9)
    message = found(waiting, has_room=False)["trainer_idle"]
    assert "num_replicas" not in message
    assert "num_cpus" not in message
    assert "sampling.max_tokens" not in message  # right answers may need as many
    assert "max_staleness=1" in found(waiting, 0, has_room=False)["trainer_idle"]
    full = requests_wait(running=10.0, waiting=20.0, kv_usage=0.9)
    assert "num_replicas" in found(full)["memory_bound"]
    assert "num_replicas" not in found(full, has_room=False)["memory_bound"]


@pytest.mark.parametrize(
    ("changes", "cluster", "has_room"),
    [
        ({}, "1x2xCPU", False),  # a trainer and a replica
        ({}, "2xCPU", False),
        ({}, "1x3xCPU", True),
        ({"rollout": RolloutConfig(num_replicas=2)}, "1x3xCPU", False),
        ({"trainer": TrainerConfig(layout="dp2tp2")}, "1x5xCPU", False),
        ({"trainer": TrainerConfig(layout="dp2tp2")}, "1x6xCPU", True),
        ({"trainer": TrainerConfig(layout="dp2,dp1")}, "1x4xCPU", True),  # the first of a list
        ({"trainer": TrainerConfig(layout="pp2v3")}, "1x4xCPU", True),  # stages of two ranks
        ({}, "", True),  # unknown
        ({"cluster": ClusterConfig(address="auto")}, "1x2xCPU", True),
    ],
)
def test_the_room_for_another_replica_is_what_the_run_leaves(
    changes: dict[str, Any], cluster: str, has_room: bool
) -> None:
    config = to_dict(RunConfig(**changes))
    assert advised_settings(config, cluster).has_room == has_room


def test_roles_take_room_too() -> None:
    """Trainer 1, replica 1, critic 1, reference 0.4 and reward model 0.4 are 3.8 cores."""
    config = to_dict(PPOConfig())
    assert not advised_settings(config, "4xCPU").has_room
    assert advised_settings(config, "5xCPU").has_room


def test_gpus_are_the_room_of_replicas_with_gpus() -> None:
    config = RunConfig(
        rollout=RolloutConfig(num_replicas=4, num_gpus=1), trainer=TrainerConfig(num_gpus=1)
    )
    assert not advised_settings(to_dict(config), "1x5xH100").has_room
    assert advised_settings(to_dict(config), "2x8xH100").has_room


ENGINE = {"engine/running/rollout-0": 10.0, "engine/kv_usage/rollout-0": 0.9}
OPPOSED = {
    "asynchrony.max_staleness": ("lower", "raise|set"),
    "sampling.max_tokens": ("lower", "raise"),
    "rollout.num_replicas": ("remove replicas", "raise"),
}


MEASURED = {
    "completion/truncated_frac": [0.0, 0.5],
    "kl/sampler_trainer": [0.0, 0.2],
    "staleness/mean": [0.0, 1.0],
    "time/trainer_idle_s": [0.1, 0.6, 1.9],
    "engine/waiting/rollout-0": [0.0, 90.0],
    "time/work_s/rollout-0": [0.1, 1.9],
    "time/work_s/rollout-1": [0.1, 1.9],
}


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("growth", [1.0, 20.0])
def test_the_findings_of_a_run_do_not_contradict_each_other(
    max_staleness: int, has_room: bool, growth: float
) -> None:
    settings = AdvisedSettings(max_staleness=max_staleness, num_replicas=2, has_room=has_room)
    kinds: set[str] = set()
    for values in itertools.product(*MEASURED.values()):
        line = {**dict(zip(MEASURED, values, strict=True)), **ENGINE}
        waits = {n.replace("work", "wait"): 2.0 - s for n, s in line.items() if "work_s" in n}
        run = [
            {**one, **line, **waits, "grad_norm": growth if at >= 15 else 1.0}
            for at, one in enumerate(lines(20))
        ]
        findings = diagnose(run, settings=settings)
        kinds |= {one.kind for one in findings}
        assert sum(one.topic == BOTTLENECK for one in findings) <= 1
        text = " ".join(one.fix.lower() for one in findings)
        for setting, sides in OPPOSED.items():
            advised = [re.search(rf"({side})[^.,]*?{re.escape(setting)}", text) for side in sides]
            assert not all(advised), text
        assert has_room or "raise rollout.num_replicas" not in text
        assert all(len(one.fix) > 1 for one in findings)
    assert {"trainer_idle", "stages_slow", "replicas_idle", "memory_bound", "truncated"} <= kinds


def idle_replicas(*, count: int) -> list[dict[str, float]]:
    work = {actor_work_s(f"rollout-{number}"): 0.1 for number in range(count)}
    waits = {actor_wait_s(f"rollout-{number}"): 4.9 for number in range(count)}
    return [{**line, **work, **waits} for line in lines()]


def test_one_replica_cannot_be_removed() -> None:
    assert "num_replicas" in found(idle_replicas(count=2), num_replicas=2)["replicas_idle"]
    message = found(idle_replicas(count=1))["replicas_idle"]
    assert "num_replicas" not in message
    assert "max_staleness" in message
    pinned = lines(staleness__mean=1.0)
    assert "num_replicas" not in found(pinned)["staleness_pinned"]
    assert "num_replicas" in found(pinned, num_replicas=3)["staleness_pinned"]


@pytest.mark.parametrize(
    ("fields", "named", "absent"),
    [
        ({"dtype": "float32"}, ["max_staleness", "learning_rate"], ["dtype", "round"]),
        ({"dtype": "bfloat16"}, ["float32", "float16"], []),
        ({"dtype": "float16"}, ["float32"], ["bfloat16"]),
        ({"dtype": "bfloat16", "quantization": "int8"}, ["quantization"], ["dtype"]),
        ({"max_staleness": 0}, ["learning_rate"], ["max_staleness", "stale"]),
        ({"max_staleness": 3, "updates": 4}, ["learning_rate"], ["max_staleness"]),
    ],
)
def test_a_difference_of_sampler_and_trainer_has_a_fix_that_changes_something(
    fields: dict[str, Any], named: list[str], absent: list[str]
) -> None:
    message = found(lines(kl__sampler_trainer=0.33), **fields)["kl_sampler_trainer"]
    assert all(part in message for part in named)
    assert not any(part in message for part in absent)


def requests_wait(*, running: float, waiting: float, kv_usage: float) -> list[dict[str, float]]:
    """Return the lines of a run whose trainer waits for an engine with this load."""
    load = {
        engine_running("rollout-0"): running,
        engine_waiting("rollout-0"): waiting,
        engine_kv_usage("rollout-0"): kv_usage,
    }
    return [{**line, **load} for line in lines(time__trainer_idle_s=1.5)]


@pytest.mark.parametrize(
    ("running", "waiting", "kv_usage", "is_bound"),
    [
        (10.0, 20.0, 0.9, True),
        (10.0, 5.0, 0.9, False),  # most of them run
        (4.0, 35.0, 0.01, False),  # they have just arrived
        (200.0, 400.0, 0.01, True),  # rollout.max_running=256
    ],
)
def test_requests_wait_for_memory_or_places_only_in_a_full_engine(
    running: float, waiting: float, kv_usage: float, is_bound: bool
) -> None:
    run = requests_wait(running=running, waiting=waiting, kv_usage=kv_usage)
    assert ("memory_bound" in found(run)) == is_bound


def test_memory_and_cores_are_those_of_the_engine() -> None:
    run = requests_wait(running=10.0, waiting=20.0, kv_usage=0.9)
    on_cpus = found(run)
    assert "kv_cache_gib" in on_cpus["memory_bound"]
    assert "num_cpus" in on_cpus["trainer_idle"]
    on_gpus = found(run, on_gpus=True, engine="vllm")
    assert "gpu_memory_frac" in on_gpus["memory_bound"]
    assert "kv_cache_gib" not in on_gpus["memory_bound"]
    assert "num_cpus" not in on_gpus["trainer_idle"]


def test_advice_reads_the_configuration_of_a_run() -> None:
    config = RunConfig(
        model=ModelConfig(dtype="bfloat16"),
        rollout=RolloutConfig(num_replicas=3, num_gpus=1, engine="vllm", quantization="int8"),
        trainer=TrainerConfig(num_minibatches=2, num_gpus=1),
        asynchrony=AsyncConfig(max_staleness=4, order="complete"),
    )
    assert advised_settings(to_dict(config)) == AdvisedSettings(
        max_staleness=4,
        updates=2,
        order="complete",
        dtype="bfloat16",
        quantization="int8",
        num_replicas=3,
        on_gpus=True,
        engine="vllm",
    )
    assert advised_settings(to_dict(RunConfig())) == AdvisedSettings()
    assert advised_settings({"rollout": "damaged"}) == AdvisedSettings()


def test_a_bound_of_zero_is_never_pinned() -> None:
    assert found(lines(staleness__mean=0.0), max_staleness=0) == {}


def test_failed_rewards_are_found_at_once_with_their_reasons() -> None:
    run = lines(1, first=1) + lines(1, first=2)
    run[0] |= {"rewards/failed": 3, "rewards/failed/timeout": 2, "rewards/failed/exception": 1}
    run[1] |= {"rewards/failed": 4, "rewards/failed/timeout": 4}
    (message,) = found(run).values()
    assert "7 rollouts" in message
    assert "(timeout 6, exception 1)" in message
    assert "2 steps" in message
    (message,) = found([{**run[0], "rewards/failed": 1}]).values()
    assert "1 rollout " in message


def test_missing_metrics_are_no_finding() -> None:
    assert found([{"step": i} for i in range(1, 9)]) == {}


@pytest.mark.parametrize(
    ("sampling", "parts"),
    [
        (SamplingConfig(top_p=0.9), ["sampling.top_p=0.9:", "up to 0.1 of", "up to 1.11 "]),
        (SamplingConfig(top_k=50), ["sampling.top_k=50:", "1.25", "80%"]),
        (SamplingConfig(top_p=0.9, top_k=50), ["top_p=0.9 and sampling.top_k=50:", "1/Z"]),
    ],
)
def test_a_cut_distribution_is_warned_of_before_the_start(
    sampling: SamplingConfig, parts: list[str]
) -> None:
    (warning,) = configuration_warnings(RunConfig(sampling=sampling))
    assert all(part in warning for part in parts)


def test_the_whole_distribution_needs_no_warning() -> None:
    assert configuration_warnings(RunConfig()) == []


def test_a_row_beyond_the_budget_of_a_pass_is_warned_of() -> None:
    data, sampling = DataConfig(max_prompt_tokens=500), SamplingConfig(max_tokens=100)
    exact, less = (TrainerConfig(micro_batch_tokens=budget) for budget in (600, 599))
    assert configuration_warnings(RunConfig(data=data, sampling=sampling, trainer=exact)) == []
    (warning,) = configuration_warnings(RunConfig(data=data, sampling=sampling, trainer=less))
    assert "trainer.micro_batch_tokens=599" in warning
    assert "= 600" in warning


def test_a_warm_up_longer_than_the_run_is_warned_of() -> None:
    trainer = TrainerConfig(warmup_steps=199)
    (warning,) = configuration_warnings(RunConfig(num_steps=50, trainer=trainer))
    assert "trainer.warmup_steps=199" in warning
    assert "num_steps=50" in warning
    assert "25%" in warning
    assert learning_rate(trainer, 49, 50) == pytest.approx(trainer.learning_rate / 4)
    assert configuration_warnings(RunConfig(num_steps=200, trainer=trainer)) == []
    (warning,) = configuration_warnings(
        PPOConfig(num_steps=50, critic=TrainedRoleConfig(trainer=trainer))
    )
    assert warning.startswith("critic.trainer.warmup_steps=199")
