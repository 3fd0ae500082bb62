"""Choice of the generation engine by configuration, importing only torch or only vLLM."""

from __future__ import annotations

from collections.abc import Mapping

from rlsys.config import AnyModelConfig, ModelConfig, RolloutConfig, SamplingConfig
from rlsys.config.lora import Lora
from rlsys.data.prompts import load_tokenizer
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.engines.generation.interruption import InterruptingEngine, interruption_of
from rlsys.engines.generation.shared_engine import PolicyEngines, views_of


def build_engine(
    model: AnyModelConfig,
    rollout: RolloutConfig,
    sampling: SamplingConfig,
    *,
    max_context: int,
    shares_device: bool = False,
    url: str = "",
) -> GenerationEngine:
    """Return an engine that is not started yet; with a `url`, that of a vLLM server there.

    `max_context` is the largest number of tokens of a prompt and its completion. `shares_device`
    means that a trainer uses the same device and the engine will `release` its memory.
    """
    engine = _engine(model, rollout, max_context, shares_device, url)
    return _interrupted(engine, model, sampling)


def build_policy_engines(
    model: ModelConfig,
    others: Mapping[str, Lora],
    rollout: RolloutConfig,
    sampling: SamplingConfig,
    *,
    max_context: int,
) -> PolicyEngines:
    """Return the engines of a policy and of others with the same base model, not started yet.

    All are one engine of vLLM, which gets unmerged adapters. `others` are those of the other
    policies, by name.
    """
    from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine

    engine = VLLMEngine(
        model.path,
        rollout,
        dtype=model.dtype,
        max_context=max_context,
        lora=model.adapters,
        others=others,
    )
    views = views_of(engine, 1 + len(others))
    own, *rest = (_interrupted(view, model, sampling) for view in views)
    return PolicyEngines(own=own, others=dict(zip(others, rest, strict=True)))


def _interrupted(
    engine: GenerationEngine, model: AnyModelConfig, sampling: SamplingConfig
) -> GenerationEngine:
    """Return the engine with the configured interruption of its completions, if there is one."""
    if sampling.interrupt_after is None:
        return engine
    interruption = interruption_of(sampling, load_tokenizer(model.path))
    assert interruption is not None
    return InterruptingEngine(engine, interruption)


def _engine(
    model: AnyModelConfig, rollout: RolloutConfig, max_context: int, shares_device: bool, url: str
) -> GenerationEngine:
    if url:
        from rlsys.engines.generation.vllm.vllm_server_engine import ServerEngine

        return ServerEngine(
            model.path, rollout, url=url, dtype=model.dtype, max_context=max_context
        )
    if rollout.engine == "vllm":
        from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine

        return VLLMEngine(
            model.path,
            rollout,
            dtype=model.dtype,
            max_context=max_context,
            shares_device=shares_device,
            lora=model.adapters if isinstance(model, ModelConfig) else None,
        )
    from rlsys.engines.generation.torch.torch_engine import TorchEngine

    return TorchEngine(
        model.path,
        rollout,
        dtype=model.dtype,
        device="cuda" if rollout.num_gpus else "cpu",
    )
