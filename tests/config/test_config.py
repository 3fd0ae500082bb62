"""The checks at construction: each refuses one impossible value, and names it."""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsys.config import (
    AsyncConfig,
    ClusterConfig,
    DataConfig,
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
from rlsys.types import SamplingParams


@pytest.mark.parametrize(
    ("cls", "values", "named"),
    [
        (DataConfig, {"max_prompt_tokens": 0}, "data.max_prompt_tokens=0"),
        (DataConfig, {"system_prompt": "Hi"}, "data.chat_template=true"),
        (SamplingConfig, {"temperature": 0.0}, "sampling.temperature=0.0"),
        (SamplingConfig, {"temperature": math.nan}, "sampling.temperature=nan"),
        (SamplingConfig, {"top_p": 0.0}, "sampling.top_p=0.0"),
        (SamplingConfig, {"top_p": 1.1}, "sampling.top_p=1.1"),
        (SamplingConfig, {"top_k": -1}, "sampling.top_k=-1"),
        (SamplingConfig, {"max_tokens": 0}, "sampling.max_tokens=0"),
        (SamplingConfig, {"stop": ("a", "")}, "sampling.stop=('a', '')"),
        (RolloutConfig, {"num_replicas": 0}, "rollout.num_replicas=0"),
        (RolloutConfig, {"min_replicas": 0}, "rollout.min_replicas=0 lies outside 1 to"),
        (RolloutConfig, {"num_replicas": 2, "min_replicas": 3}, "rollout.num_replicas=2"),
        (RolloutConfig, {"max_running": 0}, "rollout.max_running=0"),
        (RolloutConfig, {"tensor_parallel": 0}, "rollout.tensor_parallel=0"),
        (RolloutConfig, {"tensor_parallel": 2}, 'rollout.engine="vllm"'),
        (
            RolloutConfig,
            {"engine": "vllm", "tensor_parallel": 4, "num_gpus": 2},
            "use rollout.num_gpus=4",
        ),
        (
            RolloutConfig,
            {"engine": "vllm", "replay_routing": True},
            "rollout.replay_routing=True with rollout.engine='vllm'",
        ),
        (RolloutConfig, {"quantization": "fp8_per_channel"}, 'use rollout.engine="vllm"'),
        (
            RolloutConfig,
            {"engine": "vllm", "quantization": "fp8_per_tensor"},
            'use "fp8_per_channel", or a GPU',
        ),
        (
            RolloutConfig,
            {"engine": "vllm", "quantization": "fp8_per_channel", "tensor_parallel": 2},
            "use tensor_parallel=1",
        ),
        (RolloutConfig, {"kv_cache_gib": 0.0}, "rollout.kv_cache_gib=0.0"),
        (RolloutConfig, {"gpu_memory_frac": 1.5}, "rollout.gpu_memory_frac=1.5"),
        (RolloutConfig, {"num_cpus": 0}, "rollout.num_cpus=0"),
        (RolloutConfig, {"num_gpus": -1}, "rollout.num_gpus=-1"),
        (TrainerConfig, {"layout": "dp0"}, "dp_shard=0 has no rank"),
        (
            TrainerConfig,
            {"layout": "dp2,dp1", "snapshot_every": 0},
            "trainer.snapshot_every=0 with trainer.layout='dp2,dp1'",
        ),
        (TrainerConfig, {"learning_rate": -1.0}, "trainer.learning_rate=-1.0"),
        (TrainerConfig, {"learning_rate": math.nan}, "trainer.learning_rate=nan"),
        (TrainerConfig, {"warmup_steps": -1}, "trainer.warmup_steps=-1"),
        (TrainerConfig, {"final_lr_frac": 2.0}, "trainer.final_lr_frac=2.0"),
        (TrainerConfig, {"adam_betas": (1.0, 0.95)}, "trainer.adam_betas=(1.0, 0.95)"),
        (TrainerConfig, {"adam_betas": (0.9, -0.1)}, "trainer.adam_betas=(0.9, -0.1)"),
        (TrainerConfig, {"adam_betas": (0.9,)}, "trainer.adam_betas=(0.9,)"),
        (TrainerConfig, {"weight_decay": -0.1}, "trainer.weight_decay=-0.1"),
        (TrainerConfig, {"max_grad_norm": 0.0}, "trainer.max_grad_norm=0.0"),
        (TrainerConfig, {"micro_batch_tokens": 0}, "trainer.micro_batch_tokens=0"),
        (TrainerConfig, {"num_cpus": 0}, "trainer.num_cpus=0"),
        (TrainerConfig, {"num_gpus": 2}, "trainer.num_gpus=2"),
        (RewardConfig, {"num_workers": 0}, "reward.num_workers=0"),
        (RewardConfig, {"concurrency": 0}, "reward.concurrency=0"),
        (RewardConfig, {"timeout_s": 0.0}, "reward.timeout_s=0.0"),
        (RewardConfig, {"memory_gib": 0.1}, "reward.memory_gib=0.1"),
        (RewardConfig, {"memory_gib": math.inf}, "reward.memory_gib=inf"),
        (AsyncConfig, {"max_staleness": -1}, "asynchrony.max_staleness=-1"),
        (ClusterConfig, {"store_gib": 0.0}, "cluster.store_gib=0.0"),
        (ClusterConfig, {"store_gib": 1e-6}, "cluster.store_gib=1e-06 holds no rollout; use 0.001"),
        (ClusterConfig, {"start_timeout_s": -1.0}, "cluster.start_timeout_s=-1.0"),
        (ClusterConfig, {"call_timeout_s": 0.0}, "cluster.call_timeout_s=0.0"),
        (ClusterConfig, {"heartbeat_timeout_s": 0.0}, "cluster.heartbeat_timeout_s=0.0"),
        (ObserveConfig, {"print_samples": -1}, "observe.print_samples=-1"),
        (ObserveConfig, {"print_every": 0}, "observe.print_every=0"),
        (ObserveConfig, {"record_groups": -1}, "observe.record_groups=-1"),
        (RunConfig, {"name": "a/b"}, "name='a/b'"),
        (RunConfig, {"name": ""}, "name=''"),
        (RunConfig, {"seed": -1}, "seed=-1"),
        (RunConfig, {"num_steps": 0}, "num_steps=0"),
        (RunConfig, {"prompts_per_step": 0}, "prompts_per_step=0"),
        (RunConfig, {"group_size": 0}, "group_size=0"),
        (
            RunConfig,
            {"prompts_per_step": 3, "trainer": TrainerConfig(layout="dp2")},
            "prompts_per_step=3 does not divide over the 2 data ranks of trainer.layout='dp2'",
        ),
        (
            RunConfig,
            {"prompts_per_step": 8, "trainer": TrainerConfig(layout="dp4,dp3,dp2")},
            "prompts_per_step=8 does not divide over the 3 data ranks of trainer.layout='dp3'",
        ),
        (
            RunConfig,
            {
                "prompts_per_step": 9,
                "trainer": TrainerConfig(layout="dp9,dp3", num_minibatches=3),
                "asynchrony": AsyncConfig(max_staleness=2),
            },
            "9 data ranks of trainer.layout='dp9' and trainer.num_minibatches=3",
        ),
        (
            RunConfig,
            {"model": ModelConfig(lora="r8"), "trainer": TrainerConfig(layout="dp4,tp2")},
            "model.lora='r8' and trainer.layout='tp2'",
        ),
        (
            RunConfig,
            {"placement": "colocated", "trainer": TrainerConfig(layout="dp2,dp1")},
            "trainer.layout='dp2,dp1' with placement=colocated",
        ),
        (
            RunConfig,
            {
                "rollout": RolloutConfig(engine="vllm"),
                "sampling": SamplingConfig(temperature=0.005),
            },
            "sampling.temperature=0.005 lies outside [0.01, 2.0], where vLLM samples; change it, "
            'or use rollout.engine="torch"',
        ),
        (
            RunConfig,
            {"rollout": RolloutConfig(engine="vllm"), "sampling": SamplingConfig(temperature=2.1)},
            "sampling.temperature=2.1 lies outside [0.01, 2.0]",
        ),
        (
            RunConfig,
            {
                "placement": "colocated",
                "rollout": RolloutConfig(num_replicas=3),
                "trainer": TrainerConfig(layout="dp2"),
            },
            "rollout.num_replicas=3 with placement=colocated: each has the place of a rank of the "
            "trainer, of which trainer.layout='dp2' has 2; use rollout.num_replicas=2",
        ),
        (
            RunConfig,
            {"placement": "colocated", "rollout": RolloutConfig(num_gpus=1)},
            "rollout.num_gpus=1 and trainer.num_gpus=0 with placement=colocated",
        ),
        (
            RunConfig,
            {"rollout": RolloutConfig(engine="vllm", quantization="fp8_per_channel")},
            "use model.dtype=bfloat16",
        ),
        (
            RunConfig,
            {"placement": "colocated", "asynchrony": AsyncConfig(weight_update="delayed")},
            "asynchrony.weight_update=delayed waits until what runs has ended",
        ),
        (RunConfig, {"placement": "beside"}, "placement='beside' does not fit; give one of"),
        (RunConfig, {"checkpoint_every": -1}, "checkpoint_every=-1"),
        (RunConfig, {"checkpoint_every": "soon"}, "checkpoint_every='soon'"),
        (RunConfig, {"checkpoint_every": "0min"}, "checkpoint_every='0min'"),
        (RunConfig, {"checkpoint_every": 2.5}, "checkpoint_every=2.5"),
        (RunConfig, {"keep_checkpoints": 0}, "keep_checkpoints=0"),
        (RunConfig, {"name": "a" * 201}, "has 201 characters"),
        (RunConfig, {"runs_dir": ""}, "runs_dir=''"),
        (RunConfig, {"runs_dir": "runs\0"}, "runs_dir='runs\\x00'"),
        (RunConfig, {"runs_dir": "runs\udcff"}, "runs_dir='runs\\udcff'"),
        (RunConfig, {"seed": 2**63}, "seed=9223372036854775808 does not fit into 64 bits"),
        (RunConfig, {"num_steps": 10**30}, "does not fit into 64 bits"),
        (RunConfig, {"num_steps": "5"}, "num_steps='5' does not fit; give a whole number"),
        (RunConfig, {"num_steps": True}, "num_steps=True does not fit; give a whole number"),
        (RunConfig, {"num_steps": np.bool_(True)}, "num_steps=True does not fit"),
        (RunConfig, {"num_steps": 5.0}, "num_steps=5.0 does not fit; give a whole number"),
        (RunConfig, {"num_steps": None}, "num_steps=None does not fit; give a whole number"),
        (RunConfig, {"name": 3}, "name=3 does not fit; give text"),
        (RunConfig, {"runs_dir": Path("runs")}, "runs_dir=PosixPath('runs') does not fit"),
        (RunConfig, {"resume": "maybe"}, "resume='maybe' does not fit; give true, false or auto"),
        (RunConfig, {"resume": 1}, "resume=1 does not fit; give true, false or auto"),
        (RunConfig, {"trainer": {"layout": "dp2"}}, "is no TrainerConfig; give trainer=Trainer"),
        (RunConfig, {"trainer": TrainerConfig}, "is no TrainerConfig"),
        (ModelConfig, {"dtype": "float8"}, "model.dtype='float8' does not fit; give one of"),
        (SamplingConfig, {"temperature": math.inf}, "sampling.temperature=inf is no finite"),
        (SamplingConfig, {"temperature": -math.inf}, "sampling.temperature=-inf is no finite"),
        (SamplingConfig, {"temperature": -0.0}, "sampling.temperature=0.0"),
        (SamplingConfig, {"temperature": "1"}, "sampling.temperature='1' does not fit"),
        (SamplingConfig, {"temperature": 10**400}, "sampling.temperature=inf is no finite"),
        (SamplingConfig, {"top_p": math.nan}, "sampling.top_p=nan is no finite number"),
        (SamplingConfig, {"stop": "END"}, "sampling.stop='END' does not fit; give a list"),
        (SamplingConfig, {"stop": (1,)}, "sampling.stop=1 does not fit; give text"),
        (TrainerConfig, {"learning_rate": math.inf}, "trainer.learning_rate=inf is no finite"),
        (TrainerConfig, {"learning_rate": 1e30}, "trainer.learning_rate=1e+30 lies outside"),
        (TrainerConfig, {"weight_decay": math.nan}, "trainer.weight_decay=nan is no finite"),
        (TrainerConfig, {"layout": "dp1000000000"}, "has 1000000000 ranks"),
        (TrainerConfig, {"num_cpus": 1e-9}, "trainer.num_cpus=1e-09"),
        (RolloutConfig, {"num_replicas": 10**9}, "rollout.num_replicas=1000000000"),
        (RolloutConfig, {"num_gpus": 1.5}, "rollout.num_gpus=1.5 is no number that Ray"),
        (RolloutConfig, {"num_cpus": math.inf}, "rollout.num_cpus=inf is no finite number"),
        (RewardConfig, {"num_workers": 10**9}, "reward.num_workers=1000000000"),
        (RewardConfig, {"timeout_s": math.inf}, "reward.timeout_s=inf is no finite number"),
        (RewardConfig, {"timeout_s": 1e30}, "reward.timeout_s=1e+30 is no time limit"),
        (ClusterConfig, {"store_gib": math.inf}, "cluster.store_gib=inf is no finite number"),
        (ClusterConfig, {"store_gib": math.nan}, "cluster.store_gib=nan is no finite number"),
        (ClusterConfig, {"address": 6379}, "cluster.address=6379 does not fit; give text, or none"),
        (ObserveConfig, {"trace": 1}, "observe.trace=1 does not fit; give true or false"),
    ],
)
def test_an_impossible_value_is_refused_and_named(
    cls: type[Any], values: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(named)) as refused:
        cls(**values)
    assert "\n" not in str(refused.value)


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
