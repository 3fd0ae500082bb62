"""A Hugging Face causal language model, split where sampler and trainer need it split.

    token ids ──► backbone ──► hidden states [..., D] ──► head ──► logits [..., V]

Both engines use these two halves, so that they run the same arithmetic, and compute logits only for
the positions whose log-probabilities they need.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlsys.engines import onednn_linear
from rlsys.engines.attention import ATTENTION, register_attention

# Names of the soft cap of logits: Gemma's and NanoChat's, RecurrentGemma's, xLSTM's.
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def hide_progress_bars() -> None:
    """Those of transformers: small models are read in no time, and actors share one terminal."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def load_causal_lm(path: str | Path, *, dtype: str, device: str = "cpu") -> Any:
    """Load a model for inference or training, with the attention and linear layers of both engines.

    Models that compute attention in code of their own, where transformers cannot replace it, keep
    it. Raises ValueError where `path` holds no causal language model; whether rlsys computes its
    architecture right, rlsys.engines.architecture.check_architecture says.
    """
    from transformers import AutoModelForCausalLM

    hide_progress_bars()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(
            f"model.path={str(path)!r} holds no causal language model ({error}); give a Hugging "
            "Face model directory or hub name."
        ) from error
    use_engine_layers(model)
    return model.to(device)


def use_engine_layers(model: Any) -> None:
    """Attention and linear layers of both engines, in place."""
    register_attention()
    model.set_attn_implementation(ATTENTION)
    if onednn_linear.is_faster():
        onednn_linear.use_onednn(model)


def backbone(model: Any) -> Any:
    """The part of a model that makes hidden states of token ids."""
    found = model.get_decoder()
    # Where a class calls its parts otherwise than most, transformers finds itself or the head.
    if found is model or found is model.get_output_embeddings():
        found = model.model
    return found


class Head:
    """Logits [N, V] of hidden states [N, D], as the model's own forward computes them."""

    def __init__(self, model: Any) -> None:
        self._output_embeddings = model.get_output_embeddings()
        config = model.config.get_text_config()
        caps = (getattr(config, name, None) for name in SOFT_CAPS)
        self._cap: float | None = next((cap for cap in caps if cap is not None), None)
        self._scale = _logit_scale(config)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._output_embeddings(hidden)
        if self._scale != 1:
            logits = logits * self._scale
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits


def head_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] of hidden states [N, D]. For many small calls, keep a Head instead."""
    return Head(model)(hidden)


def _logit_scale(config: Any) -> float:
    """What a model multiplies its logits by: Cohere; Granite and MiniCPM divide, by the name by
    which HyperCLOVA X multiplies."""
    scale = getattr(config, "logit_scale", None)
    if scale is None and (scaling := getattr(config, "logits_scaling", None)) is not None:
        scale = scaling if config.model_type == "hyperclovax" else 1 / scaling
    return 1.0 if scale is None else float(scale)
