"""Checks of the engine's options against the models and the losses of a run."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, Gemma3TextConfig, Qwen3Config

from recipes.ppo import PPOConfig, ppo
from rlsys.algorithms import clipped_surrogate, corrected, reinforce, tis, with_kl
from rlsys.config import (
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
)
from rlsys.config.speculation import FIELD
from rlsys.engines.generation.vllm.vllm_model_options import check_model_options
from rlsys.engines.models.eagle_head import HeadWeights
from rlsys.engines.models.model_shape import model_shape
from rlsys.errors import ErrorCollector
from rlsys.launcher.engine_checks import check_engine, sampler_warnings
from rlsys.launcher.tiny_models import build_tiny_model
from tests.errors import invalid

PROXIMAL = clipped_surrogate(0.2, 0.28, denominator="proximal")
PATH = "models/policy"
FP8_KEYS = RolloutConfig(engine="vllm", vllm={"kv_cache_dtype": "fp8"})


class Flow:
    """A graph that trains with these losses."""

    def __init__(self, *losses: Any) -> None:
        policy = SimpleNamespace(head="logits")
        self._stages = [SimpleNamespace(loss=loss, model=policy) for loss in losses]

    def all(self, kind: type[Any]) -> list[Any]:
        return self._stages


def warnings(rollout: RolloutConfig, *losses: Any) -> list[str]:
    dtype = "float32" if rollout.quantization is None else "bfloat16"
    config: Any = SimpleNamespace(rollout=rollout, model=SimpleNamespace(dtype=dtype))
    flow: Any = Flow(*losses)
    return sampler_warnings(config, flow)


@pytest.mark.parametrize("loss", [PROXIMAL, reinforce(), with_kl(PROXIMAL, "k3", coefficient=0.1)])
def test_an_engine_that_rounds_asks_for_a_correction(loss: Any) -> None:
    (warning,) = warnings(FP8_KEYS, loss)
    assert "rollout.vllm.kv_cache_dtype=fp8" in warning
    quantized = RolloutConfig(engine="vllm", quantization="fp8_per_block")
    (warning,) = warnings(quantized, loss)
    assert "rollout.quantization=fp8_per_block" in warning


@pytest.mark.parametrize(
    "loss",
    [
        clipped_surrogate(0.2, 0.28),
        corrected(PROXIMAL, tis(2.0)),
        with_kl(corrected(PROXIMAL, tis(2.0)), "k3", coefficient=0.1),
    ],
)
def test_a_loss_with_the_samplers_ratio_needs_none(loss: Any) -> None:
    assert warnings(FP8_KEYS, loss) == []


def test_a_critics_loss_needs_none() -> None:
    flow = ppo(PPOConfig(), [lambda rollout: 1.0])
    assert sampler_warnings(PPOConfig(rollout=FP8_KEYS), flow) == []


def test_a_loss_without_a_denominator_asks_for_a_correction() -> None:
    own = SimpleNamespace(__name__="own")
    assert len(warnings(FP8_KEYS, own)) == 1


def test_an_engine_that_does_not_round_needs_none() -> None:
    passed = {"max_num_batched_tokens": 512, "kv_cache_dtype": "auto"}
    assert warnings(RolloutConfig(), PROXIMAL) == []
    assert warnings(RolloutConfig(engine="vllm", vllm=passed), PROXIMAL) == []


def test_a_draft_has_the_policys_vocabulary(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "width": 32,
        "num_layers": 1,
        "mlp_width": 32,
        "num_heads": 1,
        "num_kv_heads": 1,
    }
    policy = build_tiny_model(tmp_path / "policy", **sizes)
    other = build_tiny_model(tmp_path / "other", characters="abc", **sizes)

    def check(draft: Path) -> None:
        speculation = {"method": "draft_model", "model": str(draft)}
        rollout = RolloutConfig(engine="vllm", speculation=speculation)
        mistakes = ErrorCollector()
        check_engine(RunConfig(rollout=rollout), model_shape(str(policy)), mistakes)
        mistakes.raise_found()

    check(policy)
    with invalid(f"{FIELD}.model", str(other)):
        check(other)
    with invalid(f"{FIELD}.model"):
        check(tmp_path / "missing")


def test_a_head_that_is_trained_along_needs_whole_rows_and_models(tmp_path: Path) -> None:
    policy = build_tiny_model(tmp_path / "policy", width=32, num_layers=2, mlp_width=32)
    shape = model_shape(str(policy))

    def check(layout: str = "dp1", model: str = "", lora: str = "", **engine: Any) -> None:
        speculation = {"method": "eagle3", "trained_along": True}
        speculation |= {"model": model} if model else {}
        rollout = RolloutConfig(engine="vllm", speculation=speculation, **engine)
        mistakes = ErrorCollector()
        policy = ModelConfig(lora=lora)
        config = RunConfig(rollout=rollout, trainer=TrainerConfig(layout=layout), model=policy)
        check_engine(config, shape, mistakes)
        mistakes.raise_found()

    HeadWeights.new(shape.config).save(tmp_path / "head", torch.float32)
    check(model=str(tmp_path / "head"))
    check("dp2x2")
    for layout in ("tp2", "dp2cp2", "pp2", "dp4,tp2"):
        with invalid("trainer.layout", layout):
            check(layout)
    with invalid("rollout.vllm.pipeline_parallel_size", 2):
        check(num_gpus=2, vllm={"pipeline_parallel_size": 2})
    with invalid("rollout.vllm.enable_lora"):
        check(vllm={"enable_lora": True}, lora="r2")
    with invalid(f"{FIELD}.model: architectures"):
        check(model=str(policy))


def test_a_scheme_for_experts_needs_experts() -> None:
    def check(**sizes: int) -> None:
        check_sizes(RolloutConfig(engine="vllm", quantization="int8"), **sizes)

    check(num_experts=8)
    with invalid("rollout.quantization"):
        check(hidden_size=8)


def test_adapters_of_a_mixture_of_experts_need_a_gpu() -> None:
    adapted = RolloutConfig(engine="vllm", vllm={"enable_lora": True})
    check_sizes(adapted, hidden_size=8)
    check_sizes(replace(adapted, num_gpus=1), num_experts=8)
    with invalid("rollout.vllm.enable_lora", True):
        check_sizes(adapted, num_experts=8)


def check_sizes(rollout: RolloutConfig, **sizes: int) -> None:
    """Check the options for a model of these sizes."""
    text = SimpleNamespace(**sizes)
    config: Any = SimpleNamespace(
        rollout=rollout,
        data=DataConfig(),
        sampling=SamplingConfig(),
        model=SimpleNamespace(path=PATH),
    )
    own = SimpleNamespace(get_text_config=lambda: text)
    shape: Any = SimpleNamespace(config=own, max_context=512)
    mistakes = ErrorCollector()
    check_engine(config, shape, mistakes)
    mistakes.raise_found()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_types_of_arguments_are_mistakes_of_the_configuration() -> None:
    with invalid("rollout.vllm.max_num_batched_tokens", "many"):
        RolloutConfig(engine="vllm", vllm={"max_num_batched_tokens": "many"})


@pytest.mark.parametrize(
    ("options", "enough", "too_little", "field"),
    [
        ({}, 17, 16, "num_gpu_blocks_override"),  # 16 blocks of 32 tokens and the empty one
        ({"block_size": 64}, 9, 8, "num_gpu_blocks_override"),
        ({"enable_chunked_prefill": False}, 512, 511, "max_num_batched_tokens"),
        ({"enable_chunked_prefill": True}, 256, None, "max_num_batched_tokens"),
        ({}, 512, None, "long_prefill_token_threshold"),
    ],
)
def test_limits_that_no_sequence_fits_are_refused(
    options: dict[str, Any], enough: int, too_little: int | None, field: str
) -> None:
    """Prompt and completion have at most 512 tokens."""

    def check(number: int) -> None:
        rollout = RolloutConfig(engine="vllm", vllm={**options, field: number})
        check_model_options(rollout, PATH, Qwen3Config(num_hidden_layers=2), max_context=512)

    check(enough)
    if too_little is not None:
        with invalid(f"rollout.vllm.{field}", too_little):
            check(too_little)


def test_blocks_of_other_layers_are_left_to_the_engine() -> None:
    """Layers with a window need fewer blocks, and linear layers have larger ones."""
    rollout = RolloutConfig(engine="vllm", vllm={"num_gpu_blocks_override": 2})
    check_model_options(rollout, PATH, Gemma3TextConfig(), max_context=512)
    with invalid("rollout.vllm.num_gpu_blocks_override", 1):
        check_model_options(
            replace(rollout, vllm={"num_gpu_blocks_override": 1}),
            PATH,
            Gemma3TextConfig(),
            max_context=512,
        )


def test_latent_attention_needs_a_gpu_or_another_engine() -> None:
    latent = DeepseekV3Config()
    check_model_options(RolloutConfig(engine="vllm", num_gpus=1), PATH, latent, max_context=512)
    with invalid("model.path", PATH):
        check_model_options(RolloutConfig(engine="vllm"), PATH, latent, max_context=512)


def test_drafts_of_the_models_own_layers_need_such_layers() -> None:
    rollout = RolloutConfig(engine="vllm", speculation={"method": "mtp"})
    check_model_options(rollout, PATH, Qwen3Config(num_nextn_predict_layers=1), max_context=512)
    for config in (Qwen3Config(), Qwen3Config(num_nextn_predict_layers=0)):
        with invalid("rollout.speculation.method", "mtp"):
            check_model_options(rollout, PATH, config, max_context=512)
