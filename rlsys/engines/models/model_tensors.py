"""What a model is, by name: its parameters and its persistent buffers.

Whatever copies a model, takes all of it from here: published weights, checkpoints, exports, engines
that load. A buffer belongs to the model as its parameters do: DeepSeek-V3 chooses experts by one
(e_score_correction_bias), Gemma 4 scales its layers by another (layer_scalar).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def model_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters, then persistent buffers, by Hugging Face name; tied ones once. Views, not copies.

    Buffers that are not persistent follow from the configuration: every instance makes its own.
    """
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in persistent}
    return dict(model.named_parameters()) | buffers


def hollow_tensors(path: str) -> dict[str, torch.Tensor]:
    """The `model_tensors` of the model at `path`, without numbers, from its configuration alone.

    Raises ValueError where `path` holds no causal language model.
    """
    return model_tensors(_hollow_model(path))


def as_saved(path: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The `model_tensors` of the model at `path` by the names, and in the pieces, that its
    checkpoint has: many have experts one by one. Views and copies, made by transformers.

    Raises ValueError where `path` holds no causal language model.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(_hollow_model(path), dict(tensors)))


def _hollow_model(path: str) -> Any:
    """Without numbers, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"model.path={path!r} holds no causal language model ({error}); give a Hugging Face "
            "model directory or hub name."
        ) from error
