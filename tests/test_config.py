"""The checks at construction: each refuses one impossible value, and names it."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from rlsys.config import (
    AsyncConfig,
    ClusterConfig,
    DataConfig,
    ObserveConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
)
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
        (RolloutConfig, {"max_running": 0}, "rollout.max_running=0"),
        (RolloutConfig, {"tensor_parallel": 0}, "rollout.tensor_parallel=0"),
        (RolloutConfig, {"tensor_parallel": 2}, 'rollout.engine="vllm"'),
        (RolloutConfig, {"kv_cache_gib": 0.0}, "rollout.kv_cache_gib=0.0"),
        (RolloutConfig, {"gpu_memory_frac": 1.5}, "rollout.gpu_memory_frac=1.5"),
        (RolloutConfig, {"num_cpus": 0}, "rollout.num_cpus=0"),
        (RolloutConfig, {"num_gpus": -1}, "rollout.num_gpus=-1"),
        (TrainerConfig, {"num_ranks": 0}, "trainer.num_ranks=0"),
        (TrainerConfig, {"learning_rate": -1.0}, "trainer.learning_rate=-1.0"),
        (TrainerConfig, {"learning_rate": math.nan}, "trainer.learning_rate=nan"),
        (TrainerConfig, {"warmup_steps": -1}, "trainer.warmup_steps=-1"),
        (TrainerConfig, {"final_lr_frac": 2.0}, "trainer.final_lr_frac=2.0"),
        (TrainerConfig, {"adam_beta1": 1.0}, "trainer.adam_beta1=1.0"),
        (TrainerConfig, {"adam_beta2": -0.1}, "trainer.adam_beta2=-0.1"),
        (TrainerConfig, {"weight_decay": -0.1}, "trainer.weight_decay=-0.1"),
        (TrainerConfig, {"max_grad_norm": 0.0}, "trainer.max_grad_norm=0.0"),
        (TrainerConfig, {"micro_batch_tokens": 0}, "trainer.micro_batch_tokens=0"),
        (TrainerConfig, {"num_cpus": 0}, "trainer.num_cpus=0"),
        (TrainerConfig, {"num_gpus": 2}, "trainer.num_gpus=2"),
        (RewardConfig, {"num_workers": 0}, "reward.num_workers=0"),
        (RewardConfig, {"concurrency": 0}, "reward.concurrency=0"),
        (RewardConfig, {"timeout_s": 0.0}, "reward.timeout_s=0.0"),
        (AsyncConfig, {"max_staleness": -1}, "asynchrony.max_staleness=-1"),
        (ClusterConfig, {"store_gib": 0.0}, "cluster.store_gib=0.0"),
        (ClusterConfig, {"start_timeout_s": -1.0}, "cluster.start_timeout_s=-1.0"),
        (ClusterConfig, {"call_timeout_s": 0.0}, "cluster.call_timeout_s=0.0"),
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
            {"prompts_per_step": 3, "trainer": TrainerConfig(num_ranks=2)},
            "prompts_per_step=3 does not divide over trainer.num_ranks=2",
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
        (RunConfig, {"checkpoint_every": -1}, "checkpoint_every=-1"),
        (RunConfig, {"keep_checkpoints": 0}, "keep_checkpoints=0"),
    ],
)
def test_an_impossible_value_is_refused_and_named(
    cls: type[Any], values: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(named)) as refused:
        cls(**values)
    assert "\n" not in str(refused.value)


def test_values_at_the_edge_are_admitted() -> None:
    SamplingConfig(top_p=1.0, top_k=0, max_tokens=1)
    RolloutConfig(engine="vllm", tensor_parallel=2, gpu_memory_frac=1.0, num_cpus=0.5)
    TrainerConfig(final_lr_frac=0.0, adam_beta1=0.0, num_gpus=1)
    RunConfig(sampling=SamplingConfig(temperature=0.005))
    RunConfig(rollout=RolloutConfig(engine="vllm"), sampling=SamplingConfig(temperature=0.01))
    RunConfig(name="a.b_c-1", prompts_per_step=4, trainer=TrainerConfig(num_ranks=2))


def test_sampling_parameters_are_those_configured() -> None:
    config = SamplingConfig(temperature=0.5, top_p=0.9, top_k=3, max_tokens=7, stop=("x",))
    assert config.params() == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=3, max_tokens=7, stop=("x",)
    )


def test_rollouts_per_step() -> None:
    assert RunConfig(prompts_per_step=3, group_size=5).rollouts_per_step == 15
