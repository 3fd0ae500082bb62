"""Parameters and persistent buffers of a model, by name.

Everything that copies a model uses this list: published weights, checkpoints, exports, engines that
load weights. Persistent buffers are part of it: DeepSeek-V3 chooses experts by one
(e_score_correction_bias), Gemma 4 scales its layers by another (layer_scalar).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlsys.errors import InvalidValue


def model_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return parameters, then persistent buffers, by Hugging Face name; tied tensors once.

    The tensors are views, not copies. Buffers that are not persistent follow from the configuration
    and are left out.
    """
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in persistent}
    return dict(model.named_parameters()) | buffers


def meta_tensors(path: str) -> dict[str, torch.Tensor]:
    """Return the `model_tensors` of the model at `path` on the meta device, from its config.json.

    Raises InvalidValue if `path` holds no causal language model.
    """
    return model_tensors(meta_model(path))


def as_saved(path: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors under the names, and in the pieces, of the checkpoint of the model at `path`.

    `tensors` are `model_tensors`. Many checkpoints have each expert separately. The results are
    views and copies made by transformers.

    Raises InvalidValue if `path` holds no causal language model.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(meta_model(path), dict(tensors)))


def meta_model(path: str) -> Any:
    """Return the model at `path` on the meta device, from its config.json.

    Raises InvalidValue if `path` holds no causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidValue(
            "model.path",
            path,
            rule=f"holds no causal language model ({error})",
            fix="Give a Hugging Face model directory or hub name.",
        ) from error
