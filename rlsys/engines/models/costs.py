"""Compute cost of attention relative to the rest of a model."""

from __future__ import annotations

import math
from typing import Any

from rlsys.common.hf_config import largest
from rlsys.config.layout_fits_model import NUM_EXPERTS


def attention_tokens(model: Any) -> float:
    """Return the sequence length at which attention costs as many FLOPs as the rest of the model.

    Per token, each weight that the token passes through costs 2 operations. Attention costs 4 ·
    heads · head width operations in every layer for each visible token.
    """
    config = model.config.get_text_config()
    heads = largest(config, "num_attention_heads", default=0)
    if not heads:
        return math.inf  # no attention
    embeddings = model.get_input_embeddings().weight
    num_experts = largest(config, *NUM_EXPERTS, default=1)
    active = largest(config, "num_experts_per_tok", default=1) / num_experts
    num_weights = sum(
        parameter.numel() * (active if ".experts." in name else 1.0)
        for name, parameter in model.named_parameters()
        if parameter is not embeddings and parameter.dim() > 1
    )
    width = largest(config, "head_dim", default=config.hidden_size // heads)
    return max(1.0, float(num_weights / (2 * heads * width * config.num_hidden_layers)))
