"""A Hugging Face causal language model, split where sampler and trainer need it split.

    token ids ──► backbone ──► hidden states [..., D] ──► head ──► logits [..., V]

Both engines use these two halves, so that they run the same arithmetic, and compute logits only for
the positions whose log-probabilities they need.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load_causal_lm(path: str | Path, *, dtype: str, device: str = "cpu") -> Any:
    """Load a model for inference or training.

    Raises ValueError where `path` holds no causal language model.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"model.path={str(path)!r} holds no causal language model ({error}); give a Hugging "
            "Face model directory or hub name."
        ) from error
    return model.to(device)


def head_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] of hidden states [N, D], as the model's own forward computes them."""
    logits: torch.Tensor = model.get_output_embeddings()(hidden)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


def check_head(model: Any) -> None:
    """Raise ValueError if head_logits(backbone) differs from the model's own logits."""
    device = next(model.parameters()).device
    token_ids = torch.arange(4, device=device)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        expected = model(input_ids=token_ids, use_cache=False).logits
        hidden = model.get_decoder()(input_ids=token_ids, use_cache=False).last_hidden_state
        found = head_logits(model, hidden)
    if not torch.allclose(expected, found, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output embedding in a way that "
            "rlsys does not know; use an architecture whose head is a linear layer, with or "
            "without a soft cap."
        )
