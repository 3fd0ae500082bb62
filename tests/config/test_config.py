"""The checks of configuration sections at construction."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsys.config import (
    AsyncConfig,
    ClusterConfig,
    DataConfig,
    FrozenModelConfig,
    ModelConfig,
    ObserveConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
)
from rlsys.config.command_line import parse
from rlsys.config.fields import from_dict, to_dict, to_toml
from rlsys.errors import InvalidValue
from rlsys.tinker_server.server_config import BaseModelConfig
from rlsys.types import SamplingParams
from tests.errors import invalid

SENDS_ADAPTERS = RolloutConfig(engine="vllm", vllm={"enable_lora": True})


@pytest.mark.parametrize(
    ("cls", "values", "field"),
    [
        (DataConfig, {"max_prompt_tokens": 0}, "data.max_prompt_tokens"),
        (DataConfig, {"system_prompt": "Hi"}, "data.system_prompt"),
        (SamplingConfig, {"temperature": 0.0}, "sampling.temperature"),
        (SamplingConfig, {"temperature": math.nan}, "sampling.temperature"),
        (SamplingConfig, {"top_p": 0.0}, "sampling.top_p"),
        (SamplingConfig, {"top_p": 1.1}, "sampling.top_p"),
        (SamplingConfig, {"top_k": -1}, "sampling.top_k"),
        (SamplingConfig, {"max_tokens": 0}, "sampling.max_tokens"),
        (SamplingConfig, {"stop": ("a", "")}, "sampling.stop"),
        (RolloutConfig, {"num_replicas": 0}, "rollout.num_replicas"),
        (RolloutConfig, {"min_replicas": 0}, "rollout.min_replicas"),
        (RolloutConfig, {"num_replicas": 2, "min_replicas": 3}, "rollout.min_replicas"),
        (RolloutConfig, {"max_running": 0}, "rollout.max_running"),
        (RolloutConfig, {"tensor_parallel": 0}, "rollout.tensor_parallel"),
        (RolloutConfig, {"tensor_parallel": 2}, "rollout.tensor_parallel"),
        (
            RolloutConfig,
            {"engine": "vllm", "tensor_parallel": 4, "num_gpus": 2},
            "rollout.tensor_parallel",
        ),
        (RolloutConfig, {"quantization": "fp8_per_channel"}, "rollout.quantization"),
        (
            RolloutConfig,
            {"engine": "vllm", "quantization": "fp8_per_tensor"},
            "rollout.quantization",
        ),
        (
            RolloutConfig,
            {"engine": "vllm", "quantization": "fp8_per_channel", "tensor_parallel": 2},
            "rollout.quantization",
        ),
        (RolloutConfig, {"weight_transport": "nccl"}, "rollout.weight_transport"),
        (RolloutConfig, {"weight_transport": "rdma"}, "rollout.weight_transport"),
        (RolloutConfig, {"weight_transport": "cuda_ipc"}, "rollout.weight_transport"),
        (
            RolloutConfig,
            {"weight_transport": "cuda_ipc", "engine": "vllm", "urls": ("http://host:8000",)},
            "rollout.weight_transport",
        ),
        (
            RolloutConfig,
            {
                "weight_transport": "cuda_ipc",
                "engine": "vllm",
                "num_gpus": 1,
                "vllm": {"enable_lora": True},
            },
            "rollout.weight_transport",
        ),
        (RolloutConfig, {"kv_cache_gib": 0.0}, "rollout.kv_cache_gib"),
        (RolloutConfig, {"gpu_memory_frac": 1.5}, "rollout.gpu_memory_frac"),
        (RolloutConfig, {"num_cpus": 0}, "rollout.num_cpus"),
        (RolloutConfig, {"num_gpus": -1}, "rollout.num_gpus"),
        (TrainerConfig, {"layout": "dp0"}, "trainer.layout"),
        (
            TrainerConfig,
            {"layout": "dp2,dp1", "snapshot_every": 0},
            "trainer.snapshot_every",
        ),
        (TrainerConfig, {"learning_rate": -1.0}, "trainer.learning_rate"),
        (TrainerConfig, {"learning_rate": math.nan}, "trainer.learning_rate"),
        (TrainerConfig, {"warmup_steps": -1}, "trainer.warmup_steps"),
        (TrainerConfig, {"final_lr_frac": 2.0}, "trainer.final_lr_frac"),
        (TrainerConfig, {"adam_betas": (1.0, 0.95)}, "trainer.adam_betas"),
        (TrainerConfig, {"adam_betas": (0.9, -0.1)}, "trainer.adam_betas"),
        (TrainerConfig, {"adam_betas": (0.9,)}, "trainer.adam_betas"),
        (TrainerConfig, {"weight_decay": -0.1}, "trainer.weight_decay"),
        (TrainerConfig, {"max_grad_norm": 0.0}, "trainer.max_grad_norm"),
        (TrainerConfig, {"micro_batch_tokens": 0}, "trainer.micro_batch_tokens"),
        (TrainerConfig, {"num_cpus": 0}, "trainer.num_cpus"),
        (TrainerConfig, {"num_gpus": 2}, "trainer.num_gpus"),
        (RewardConfig, {"num_workers": 0}, "reward.num_workers"),
        (RewardConfig, {"concurrency": 0}, "reward.concurrency"),
        (RewardConfig, {"timeout_s": 0.0}, "reward.timeout_s"),
        (RewardConfig, {"memory_gib": 0.1}, "reward.memory_gib"),
        (RewardConfig, {"memory_gib": math.inf}, "reward.memory_gib"),
        (AsyncConfig, {"max_staleness": -1}, "asynchrony.max_staleness"),
        (ClusterConfig, {"store_gib": 0.0}, "cluster.store_gib"),
        (ClusterConfig, {"store_gib": 1e-6}, "cluster.store_gib"),
        (ClusterConfig, {"start_timeout_s": -1.0}, "cluster.start_timeout_s"),
        (ClusterConfig, {"call_timeout_s": 0.0}, "cluster.call_timeout_s"),
        (ClusterConfig, {"heartbeat_timeout_s": 0.0}, "cluster.heartbeat_timeout_s"),
        (ObserveConfig, {"print_samples": -1}, "observe.print_samples"),
        (ObserveConfig, {"print_every": 0}, "observe.print_every"),
        (ObserveConfig, {"record_groups": -1}, "observe.record_groups"),
        (RunConfig, {"name": "a/b"}, "name"),
        (RunConfig, {"name": ""}, "name"),
        (RunConfig, {"seed": -1}, "seed"),
        (RunConfig, {"num_steps": 0}, "num_steps"),
        (RunConfig, {"prompts_per_step": 0}, "prompts_per_step"),
        (RunConfig, {"group_size": 0}, "group_size"),
        (
            RunConfig,
            {"prompts_per_step": 3, "trainer": TrainerConfig(layout="dp2")},
            "prompts_per_step",
        ),
        (
            RunConfig,
            {"prompts_per_step": 8, "trainer": TrainerConfig(layout="dp4,dp3,dp2")},
            "prompts_per_step",
        ),
        (
            RunConfig,
            {
                "prompts_per_step": 9,
                "trainer": TrainerConfig(layout="dp9,dp3", num_minibatches=3),
                "asynchrony": AsyncConfig(max_staleness=2),
            },
            "prompts_per_step",
        ),
        (
            RunConfig,
            {"model": ModelConfig(lora="r8"), "trainer": TrainerConfig(layout="dp4,tp2")},
            "model.lora",
        ),
        (RunConfig, {"rollout": SENDS_ADAPTERS}, "rollout.vllm.enable_lora"),
        (
            RunConfig,
            {"model": ModelConfig(lora="r513"), "rollout": SENDS_ADAPTERS},
            "model.lora",
        ),
        (
            RunConfig,
            {
                "model": ModelConfig(lora="r8"),
                "rollout": SENDS_ADAPTERS,
                "placement": "colocated",
            },
            "rollout.vllm.enable_lora",
        ),
        (
            RunConfig,
            {"model": ModelConfig(lora="r8"), "rollout": replace(SENDS_ADAPTERS, borrow=1)},
            "rollout.vllm.enable_lora",
        ),
        (
            RunConfig,
            {"placement": "colocated", "trainer": TrainerConfig(layout="dp2,dp1")},
            "trainer.layout",
        ),
        (
            RunConfig,
            {
                "rollout": RolloutConfig(engine="vllm"),
                "sampling": SamplingConfig(temperature=0.005),
            },
            "sampling.temperature",
        ),
        (
            RunConfig,
            {"rollout": RolloutConfig(engine="vllm"), "sampling": SamplingConfig(temperature=2.1)},
            "sampling.temperature",
        ),
        (
            RunConfig,
            {
                "placement": "colocated",
                "rollout": RolloutConfig(num_replicas=3),
                "trainer": TrainerConfig(layout="dp2"),
            },
            "rollout.num_replicas",
        ),
        (
            RunConfig,
            {"placement": "colocated", "rollout": RolloutConfig(num_gpus=1)},
            "rollout.num_gpus",
        ),
        (  # a replica of four processes over two ranks
            RunConfig,
            {
                "placement": "colocated",
                "rollout": RolloutConfig(engine="vllm", tensor_parallel=4),
                "trainer": TrainerConfig(layout="dp2"),
            },
            "rollout.tensor_parallel",
        ),
        (  # three replicas of two processes over four ranks
            RunConfig,
            {
                "placement": "colocated",
                "rollout": RolloutConfig(engine="vllm", tensor_parallel=2, num_replicas=3),
                "trainer": TrainerConfig(layout="dp2tp2"),
            },
            "rollout.num_replicas",
        ),
        (  # a replica with four GPUs over two ranks with one each
            RunConfig,
            {
                "placement": "colocated",
                "rollout": RolloutConfig(engine="vllm", tensor_parallel=2, num_gpus=4),
                "trainer": TrainerConfig(layout="dp2", num_gpus=1),
            },
            "rollout.num_gpus",
        ),
        (
            RunConfig,
            {"rollout": RolloutConfig(engine="vllm", quantization="fp8_per_channel")},
            "rollout.quantization",
        ),
        (
            RunConfig,
            {"rollout": RolloutConfig(num_gpus=1, weight_transport="nccl")},
            "rollout.weight_transport",
        ),
        (
            RunConfig,
            {"rollout": RolloutConfig(num_gpus=1, weight_transport="cuda_ipc")},
            "rollout.weight_transport",
        ),
        (
            RunConfig,
            {
                "rollout": RolloutConfig(num_gpus=1, weight_transport="cuda_ipc"),
                "trainer": TrainerConfig(num_gpus=1),
                "placement": "colocated",
            },
            "rollout.weight_transport",
        ),
        (
            RunConfig,
            {
                "rollout": RolloutConfig(num_gpus=1, weight_transport="cuda_ipc", borrow=1),
                "trainer": TrainerConfig(num_gpus=1),
            },
            "rollout.weight_transport",
        ),
        (
            RunConfig,
            {"placement": "colocated", "asynchrony": AsyncConfig(weight_update="delayed")},
            "asynchrony.weight_update",
        ),
        (
            RunConfig,
            {"placement": "colocated", "rollout": RolloutConfig(borrow=1)},
            "rollout.borrow",
        ),
        (
            RunConfig,
            {"rollout": RolloutConfig(borrow=3), "trainer": TrainerConfig(layout="dp2")},
            "rollout.borrow",
        ),
        (
            RunConfig,
            {"rollout": RolloutConfig(borrow=1), "trainer": TrainerConfig(layout="dp2,dp1")},
            "rollout.borrow",
        ),
        (
            RunConfig,
            {"rollout": RolloutConfig(borrow=1, num_gpus=1)},
            "rollout.borrow",
        ),
        (
            RunConfig,
            {
                "rollout": RolloutConfig(borrow=1),
                "asynchrony": AsyncConfig(weight_update="delayed"),
            },
            "rollout.borrow",
        ),
        (RolloutConfig, {"borrow": -1}, "rollout.borrow"),
        (
            RolloutConfig,
            {"engine": "vllm", "tensor_parallel": 2, "borrow": 1},
            "rollout.borrow",
        ),
        (RunConfig, {"placement": "beside"}, "placement"),
        (RunConfig, {"checkpoint_every": -1}, "checkpoint_every"),
        (RunConfig, {"checkpoint_every": "soon"}, "checkpoint_every"),
        (RunConfig, {"checkpoint_every": "0min"}, "checkpoint_every"),
        (RunConfig, {"checkpoint_every": 2.5}, "checkpoint_every"),
        (RunConfig, {"keep_checkpoints": 0}, "keep_checkpoints"),
        (RunConfig, {"name": "a" * 201}, "name"),
        (RunConfig, {"runs_dir": ""}, "runs_dir"),
        (RunConfig, {"runs_dir": "s3://bucket/x"}, "runs_dir"),
        (RunConfig, {"runs_dir": "runs\0"}, "runs_dir"),
        (RunConfig, {"runs_dir": "runs\udcff"}, "runs_dir"),
        (RunConfig, {"seed": 2**63}, "seed"),
        (RunConfig, {"num_steps": 10**30}, "num_steps"),
        (RunConfig, {"num_steps": "5"}, "num_steps"),
        (RunConfig, {"num_steps": True}, "num_steps"),
        (RunConfig, {"num_steps": np.bool_(True)}, "num_steps"),
        (RunConfig, {"num_steps": 5.0}, "num_steps"),
        (RunConfig, {"num_steps": None}, "num_steps"),
        (RunConfig, {"name": 3}, "name"),
        (RunConfig, {"runs_dir": Path("runs")}, "runs_dir"),
        (RunConfig, {"resume": "maybe"}, "resume"),
        (RunConfig, {"resume": 1}, "resume"),
        (RunConfig, {"trainer": {"layout": "dp2"}}, "trainer"),
        (RunConfig, {"trainer": TrainerConfig}, "trainer"),
        (ModelConfig, {"dtype": "float8"}, "model.dtype"),
        (SamplingConfig, {"temperature": math.inf}, "sampling.temperature"),
        (SamplingConfig, {"temperature": -math.inf}, "sampling.temperature"),
        (SamplingConfig, {"temperature": -0.0}, "sampling.temperature"),
        (SamplingConfig, {"temperature": "1"}, "sampling.temperature"),
        (SamplingConfig, {"top_p": math.nan}, "sampling.top_p"),
        (SamplingConfig, {"stop": "END"}, "sampling.stop"),
        (TrainerConfig, {"learning_rate": math.inf}, "trainer.learning_rate"),
        (TrainerConfig, {"learning_rate": 1e30}, "trainer.learning_rate"),
        (TrainerConfig, {"weight_decay": math.nan}, "trainer.weight_decay"),
        (TrainerConfig, {"layout": "dp1000000000"}, "trainer.layout"),
        (TrainerConfig, {"num_cpus": 1e-9}, "trainer.num_cpus"),
        (RolloutConfig, {"num_replicas": 10**9}, "rollout.num_replicas"),
        (RolloutConfig, {"num_gpus": 1.5}, "rollout.num_gpus"),
        (RolloutConfig, {"num_cpus": math.inf}, "rollout.num_cpus"),
        (RewardConfig, {"num_workers": 10**9}, "reward.num_workers"),
        (RewardConfig, {"timeout_s": math.inf}, "reward.timeout_s"),
        (RewardConfig, {"timeout_s": 1e30}, "reward.timeout_s"),
        (ClusterConfig, {"store_gib": math.inf}, "cluster.store_gib"),
        (ClusterConfig, {"store_gib": math.nan}, "cluster.store_gib"),
        (ClusterConfig, {"address": 6379}, "cluster.address"),
        (ObserveConfig, {"trace": 1}, "observe.trace"),
    ],
)
def test_an_impossible_value_is_refused(cls: type[Any], values: dict[str, Any], field: str) -> None:
    with invalid(field) as refused:
        cls(**values)
    assert "\n" not in str(refused.value)
    found = refused.value.value
    assert found == values.get(field.rpartition(".")[2], found) or math.isnan(found)


def test_the_value_in_an_error_is_the_converted_one() -> None:
    with invalid("sampling.temperature", math.inf):
        SamplingConfig(temperature=10**400)
    with invalid("sampling.stop", 1):
        SamplingConfig(stop=(1,))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"prompts_per_step": 3, "trainer": TrainerConfig(layout="dp2")}, ["2", "'dp2'"]),
        ({"prompts_per_step": 8, "trainer": TrainerConfig(layout="dp4,dp3,dp2")}, ["3", "'dp3'"]),
        (
            {
                "prompts_per_step": 9,
                "trainer": TrainerConfig(layout="dp9,dp3", num_minibatches=3),
                "asynchrony": AsyncConfig(max_staleness=2),
            },
            ["27", "'dp9'", "trainer.num_minibatches=3"],
        ),
        (
            {"model": ModelConfig(lora="r8"), "trainer": TrainerConfig(layout="dp4,tp2")},
            ["trainer.layout='tp2'"],
        ),
        (
            {
                "placement": "colocated",
                "rollout": RolloutConfig(num_replicas=3),
                "trainer": TrainerConfig(layout="dp2"),
            },
            ["trainer.layout='dp2'", "rollout.num_replicas=2"],
        ),
        (
            {
                "placement": "colocated",
                "rollout": RolloutConfig(engine="vllm", tensor_parallel=2, num_replicas=3),
                "trainer": TrainerConfig(layout="dp2tp2"),
            },
            ["2 trainer ranks", "trainer.layout='dp2tp2' has 4", "rollout.num_replicas=2"],
        ),
        (
            {
                "placement": "colocated",
                "rollout": RolloutConfig(engine="vllm", tensor_parallel=2, num_gpus=4),
                "trainer": TrainerConfig(layout="dp2", num_gpus=1),
            },
            ["2 trainer ranks", "trainer.num_gpus=1", "rollout.num_gpus=2"],
        ),
    ],
)
def test_an_error_about_several_options_names_the_others(
    values: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(InvalidValue) as refused:
        RunConfig(**values)
    for part in parts:
        assert part in f"{refused.value.rule} {refused.value.fix}"


def test_values_of_other_kinds_of_number_become_the_fields_own() -> None:
    config = RunConfig(
        num_steps=np.int64(5),  # type: ignore[arg-type]
        trainer=TrainerConfig(learning_rate=np.float64(0.5), weight_decay=-0.0, num_cpus=2),
        sampling=SamplingConfig(stop=["a"]),  # type: ignore[arg-type]
        asynchrony=AsyncConfig(stream=np.bool_(False)),  # type: ignore[arg-type]
    )
    assert type(config.num_steps) is int
    assert type(config.trainer.learning_rate) is float
    assert type(config.trainer.num_cpus) is float
    assert str(config.trainer.weight_decay) == "0.0"
    assert config.sampling.stop == ("a",)
    assert config.asynchrony.stream is False
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_values_at_the_edge_are_admitted() -> None:
    RunConfig(seed=2**63 - 1, resume="auto")
    RolloutConfig(num_gpus=0.5, num_cpus=0.01)
    TrainerConfig(learning_rate=1.0)
    SamplingConfig(top_p=1.0, top_k=0, max_tokens=1)
    RolloutConfig(engine="vllm", tensor_parallel=2, gpu_memory_frac=1.0, num_cpus=0.5)
    TrainerConfig(final_lr_frac=0.0, adam_betas=(0.0, 0.0), num_gpus=1)
    RunConfig(sampling=SamplingConfig(temperature=0.005))
    RunConfig(rollout=RolloutConfig(engine="vllm"), sampling=SamplingConfig(temperature=0.01))
    RunConfig(
        placement="colocated",
        rollout=RolloutConfig(num_replicas=2, num_gpus=1, num_cpus=4),
        trainer=TrainerConfig(layout="dp2tp2", num_gpus=1),
    )
    for layout in ("tp2", "pp2", "cp2", "dp2", "dp3", "dp2tp2"):
        RunConfig(
            placement="colocated",
            prompts_per_step=6,
            rollout=RolloutConfig(engine="vllm", tensor_parallel=2, num_gpus=2),
            trainer=TrainerConfig(layout=layout, num_gpus=1),
        )
    RunConfig(name="a.b_c-1", prompts_per_step=4, trainer=TrainerConfig(layout="dp2"))


def test_sampling_parameters_are_those_configured() -> None:
    config = SamplingConfig(temperature=0.5, top_p=0.9, top_k=3, max_tokens=7, stop=("x",))
    assert config.params() == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=3, max_tokens=7, stop=("x",)
    )


def test_rollouts_per_step() -> None:
    assert RunConfig(prompts_per_step=3, group_size=5).rollouts_per_step == 15


@pytest.mark.parametrize(
    ("every", "steps", "seconds"),
    [
        ("10min", None, 600.0),
        ("90s", None, 90.0),
        ("1.5 h", None, 5400.0),
        (0, 0, None),
        (50, 50, None),
        ("50", 50, None),
    ],
)
def test_checkpoints_come_by_time_or_steps(
    every: int | str, steps: int | None, seconds: float | None
) -> None:
    config = RunConfig(checkpoint_every=every)
    assert (config.checkpoint_steps, config.checkpoint_s) == (steps, seconds)
    assert from_dict(RunConfig, to_dict(config)) == config
    assert parse(RunConfig, [f"--checkpoint-every={every}"]).config == config
    assert tomllib.loads(to_toml(config))["checkpoint_every"] == config.checkpoint_every


def test_a_run_of_many_hours_has_checkpoints_by_default() -> None:
    assert RunConfig().checkpoint_s == 600


@pytest.mark.parametrize("size", [math.inf, -math.inf, math.nan, 1e300])
@pytest.mark.parametrize(
    ("cls", "field"),
    [
        (RewardConfig, "reward.memory_gib"),
        (RolloutConfig, "rollout.kv_cache_gib"),
        (ClusterConfig, "cluster.store_gib"),
    ],
)
def test_sizes_are_finite(cls: type[Any], field: str, size: float) -> None:
    with invalid(field) as refused:
        cls(**{field.partition(".")[2]: size})
    assert ("finite" in refused.value.rule) == (not math.isfinite(size))


def test_a_run_directory_below_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunConfig(runs_dir="~/x").runs_dir == str(tmp_path / "x")


def test_a_model_below_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for kind in (ModelConfig, FrozenModelConfig, BaseModelConfig):
        assert kind(path="~/x").path == str(tmp_path / "x")
    assert ModelConfig(path="Qwen/Qwen3-0.6B").path == "Qwen/Qwen3-0.6B"
