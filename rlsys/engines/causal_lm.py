"""A Hugging Face causal language model, split where sampler and trainer need it split.

    token ids ──► backbone ──► hidden states [..., D] ──► head ──► logits [..., V]

Both engines use these two halves, so that they run the same arithmetic, and compute logits only for
the positions whose log-probabilities they need.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from rlsys.data.hub import in_short, unreadable
from rlsys.engines import onednn_linear
from rlsys.engines.attention import ATTENTION, register_attention
from rlsys.engines.float32_product import Float32Copy, float32_product, gradient_sum, mm


def hide_progress_bars() -> None:
    """Those of transformers: small models are read in no time, and actors share one terminal."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def load_causal_lm(path: str | Path, *, dtype: str, device: str = "cpu") -> Any:
    """Load a model for inference or training, with the attention and linear layers of both engines.

    Its backbone takes right-padded rows without a mask. Raises ValueError where `path` holds no
    causal language model.
    """
    from transformers import AutoModelForCausalLM

    register_attention()
    hide_progress_bars()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation=ATTENTION
        )
    except unreadable() as error:
        raise ValueError(
            f"model.path={str(path)!r} holds no causal language model ({in_short(error)}); give a "
            "Hugging Face model directory or hub name."
        ) from error
    _check_finite(model, path)
    if onednn_linear.is_faster():
        onednn_linear.use_onednn(model)
    return model.to(device)


def _check_finite(model: Any, path: str | Path) -> None:
    """Raise ValueError for weights that are no numbers."""
    for name, parameter in model.named_parameters():
        # The sum of finite weights is finite; only for one that is not, each has to be looked at.
        if not torch.isfinite(parameter.detach().float().sum()):
            num_bad = int((~torch.isfinite(parameter)).sum())
            if num_bad:
                raise ValueError(
                    f"model.path={str(path)!r}: {num_bad:,} of {parameter.numel():,} weights of "
                    f"{name} are NaN or infinite; the files are damaged, or training diverged "
                    "before they were written: give a model that is whole."
                )


class Head:
    """Logits [N, V] float32 of hidden states [N, D], as the model's own forward computes them but
    for the rounding of 16-bit logits, which is left out."""

    def __init__(self, model: Any) -> None:
        self._output_embeddings = model.get_output_embeddings()
        config = model.config.get_text_config()
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)
        self._sum: torch.Tensor | None = None
        self._copy: Float32Copy | None = None

    def for_chunks(self) -> Head:
        """The same head for one pass that calls it several times: the gradient of a 16-bit weight
        is summed over the calls in float32."""
        head = copy.copy(self)
        if self._is_16_bit and torch.is_grad_enabled():
            head._sum = gradient_sum(self._output_embeddings.weight)
        return head

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._product(hidden)
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits

    @property
    def _is_16_bit(self) -> bool:
        return self._output_embeddings.weight.dtype in (torch.bfloat16, torch.float16)

    def _product(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor
        if not self._is_16_bit:
            logits = self._output_embeddings(hidden)
            return logits
        weight, bias = self._output_embeddings.weight, self._output_embeddings.bias
        if torch.is_grad_enabled():
            total = gradient_sum(weight) if self._sum is None else self._sum
            logits = float32_product(hidden, weight, total)
        else:
            # A sampler multiplies few rows by it, thousands of times between two changes.
            self._copy = self._copy or Float32Copy(weight)
            logits = mm(hidden, self._copy.get().t())
        return logits if bias is None else logits + bias.float()


def head_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] float32 of hidden states [N, D]. For many small calls, keep a Head instead."""
    return Head(model)(hidden)


def check_head(model: Any) -> None:
    """Raise ValueError if backbone and head together differ from the model's own forward pass with
    transformers' reference attention."""
    device = next(model.parameters()).device
    token_ids = torch.arange(8, device=device)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=token_ids, use_cache=False).last_hidden_state
        found = head_logits(model, hidden)
        model.set_attn_implementation("eager")
        expected = model(input_ids=token_ids, use_cache=False).logits.float()
        model.set_attn_implementation(ATTENTION)
    tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2 * float(expected.abs().max())
    if not torch.allclose(expected, found, rtol=tolerance, atol=tolerance):
        raise ValueError(
            f"{type(model).__name__} computes its attention or its logits in a way that rlsys does "
            "not know; use an architecture with causal attention (sliding windows and soft caps "
            "included) whose head is a linear layer, with or without a soft cap."
        )
