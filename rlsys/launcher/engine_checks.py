"""Checks of the options that go to the generation engine, before any engine starts.

In: rollout.vllm, rollout.speculation, the policy's shape; the losses of the graph. Out: mistakes;
warnings about engines that sample from another distribution than the trainer computes.
"""

from __future__ import annotations

from typing import Any

from rlsys.algorithms import corrected
from rlsys.algorithms.loss_inputs import uses_advantages
from rlsys.common.user_functions import attribute_of, name_of
from rlsys.config import RolloutConfig, RunConfig
from rlsys.config.layout_fits_model import NUM_EXPERTS
from rlsys.config.speculation import FIELD as SPECULATION
from rlsys.config.vllm_arguments import marked_arguments
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import TrainStage
from rlsys.engines.generation.vllm.vllm_model_options import check_model_options
from rlsys.engines.models.eagle_head import read_sizes
from rlsys.engines.models.model_shape import ModelShape, model_shape
from rlsys.errors import NOT_GIVEN, ErrorCollector, require


def check_engine(config: RunConfig, shape: ModelShape, mistakes: ErrorCollector) -> None:
    """Check the engine's options; `shape` is the policy's."""
    with mistakes.collect():
        _check_model_options(config, shape)
    with mistakes.collect():
        _check_draft(config.rollout, shape)
    with mistakes.collect():
        _check_trained_head(config, shape)
    with mistakes.collect():
        _check_experts(config.rollout, shape)


def _check_model_options(config: RunConfig, shape: ModelShape) -> None:
    """Check an engine of vLLM and its options against the model and the longest sequence.

    Raises:
        InvalidValue: They do not fit.
    """
    if config.rollout.engine == "vllm":
        num_tokens = config.data.max_prompt_tokens + config.sampling.max_tokens
        longest = min(num_tokens, shape.max_context)
        check_model_options(config.rollout, config.model.path, shape.config, max_context=longest)


def _check_draft(rollout: RolloutConfig, shape: ModelShape) -> None:
    """Check that a draft model has the policy's vocabulary.

    Raises:
        InvalidValue: It has another one, or its path holds no model.
    """
    draft = rollout.draft
    if draft is None or draft.method != "draft_model":
        return
    setting = f"{SPECULATION}.model"
    theirs = model_shape(draft.model, setting=setting).config.get_text_config().vocab_size
    own = shape.config.get_text_config().vocab_size
    require(
        theirs == own,
        setting,
        draft.model,
        rule=f"has a vocabulary of {theirs} tokens, and the policy one of {own}",
        fix="Use a model with the policy's tokenizer.",
    )


def _check_trained_head(config: RunConfig, shape: ModelShape) -> None:
    """Check that a head that is trained along fits the policy, and that trainer and engine can.

    Raises:
        InvalidValue: They do not fit.
    """
    draft = config.rollout.draft
    if draft is None or not draft.trained_along:
        return
    if draft.model:
        read_sizes(draft.model, shape.config)
    for layout in config.trainer.layouts:
        require(
            layout.size("tp", "cp", "pp", "ep") == 1,
            "trainer.layout",
            config.trainer.layout,
            rule=f"{SPECULATION}.trained_along needs a rank with whole rows and a whole model, and "
            f"{layout} divides them",
            fix=f"Use dp alone, or leave {SPECULATION}.trained_along out.",
        )
    require(
        not config.rollout.sends_adapters,
        "rollout.vllm.enable_lora",
        True,
        rule=f"{SPECULATION}.trained_along has not run with adapters that vLLM gets apart",
        fix="Leave it out: the adapters of model.lora are then merged into the weights.",
    )
    require(
        config.rollout.pipeline_parallel == 1,
        "rollout.vllm.pipeline_parallel_size",
        config.rollout.pipeline_parallel,
        rule=f"{SPECULATION}.trained_along works with whole models in each worker",
        fix=f"Use 1, or leave {SPECULATION}.trained_along out.",
    )


def _check_experts(rollout: RolloutConfig, shape: ModelShape) -> None:
    """Check that a scheme for experts finds some, and that vLLM can adapt a mixture of experts.

    Raises:
        InvalidValue: vLLM would quantise nothing, or has no kernels for the adapters.
    """
    if rollout.quantization != "int8" and not rollout.sends_adapters:
        return
    config = shape.config.get_text_config()
    has_experts = any(getattr(config, name, None) for name in NUM_EXPERTS)
    require(
        not (has_experts and rollout.sends_adapters and not rollout.num_gpus),
        "rollout.vllm.enable_lora",
        True,
        rule="vLLM computes a mixture of experts with adapters on GPUs only",
        fix="Leave it out: the adapters of model.lora are then merged into the weights.",
    )
    require(
        has_experts or rollout.quantization != "int8",
        "rollout.quantization",
        rollout.quantization,
        rule="quantizes experts only, and this model has none",
        fix="Use fp8_per_block, or leave it out.",
    )


def sampler_warnings(config: RunConfig, flow: StageGraph) -> list[str]:
    """Return a warning if the engine rounds what the trainer does not, and no loss corrects it."""
    rounded = marked_arguments(config.rollout.vllm)
    if config.rollout.quantization is not None:
        rounded[f"rollout.quantization={config.rollout.quantization}"] = "weights are rounded"
    sampled = [stage for stage in flow.all(TrainStage) if stage.model.head == "logits"]
    losses = [stage.loss for stage in sampled if uses_advantages(stage.loss)]
    lacking = [loss for loss in losses if not _corrects(loss)]
    if not rounded or not lacking:
        return []
    causes = "; ".join(f"{option}: {effect}" for option, effect in rounded.items())
    return [
        f"{causes}. So completions come from another distribution than the trainer computes, and "
        f"{name_of(lacking[0])} does not weigh them. kl/sampler_trainer is the difference. Use a "
        "correction, such as corrected(loss, tis(2.0)), or a loss whose ratio has the sampler's "
        'log-probabilities (denominator="sampler").'
    ]


def _corrects(loss: Any) -> bool:
    """Return whether a loss contains the ratio of the trainer's probability to the sampler's."""
    if isinstance(loss, corrected):
        return True
    inner = getattr(loss, "loss", None)
    if inner is not None:
        return _corrects(inner)
    return attribute_of(loss, "denominator", NOT_GIVEN) in ("sampler", "interpolated")
