"""A Hugging Face causal language model, split into backbone and head.

    token ids ──► backbone ──► hidden states [..., D] ──► head ──► logits [..., V]

Sampler and trainer use the same two halves, so that they run the same arithmetic. They compute
logits only for the positions whose log-probabilities they need.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlsys.data.hub import in_short, unreadable
from rlsys.engines.devices.cpu import tune_for_cpu
from rlsys.engines.devices.float32_product import Float32Copy, float32_product, gradient_sum, mm
from rlsys.engines.models.attention import ATTENTION, register_attention
from rlsys.engines.models.lazy_tensors import LazyTensor
from rlsys.engines.models.loading_report import (
    REPORTED,
    check_kinds,
    check_report,
    no_printed_report,
)
from rlsys.engines.models.weight_files import load_lazily
from rlsys.errors import InvalidValue
from rlsys.reallocation.shards import local_part

# Configuration names of the logits' soft cap: Gemma and NanoChat, RecurrentGemma, xLSTM.
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def hide_progress_bars() -> None:
    """Hide transformers' progress bars, because many actors share one terminal."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def load_causal_lm(path: str | Path, *, dtype: str, device: str = "cpu", lazy: bool = False) -> Any:
    """Load a model for inference or training, with the attention and linear layers of both engines.

    With `lazy`, weights are lazy tensors if the files allow it (weight_files.py). Models that
    compute attention in their own code, where transformers cannot replace it, keep it.

    Raises InvalidValue if `path` holds no causal language model. It does not check the
    architecture: see architecture_probe.check_architecture.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    hide_progress_bars()
    try:
        options = {"dtype": getattr(torch, dtype), "attn_implementation": "eager", **REPORTED}
        with no_printed_report():
            loaded = None
            if lazy:
                config = AutoConfig.from_pretrained(path)
                loaded = load_lazily(config, path, lambda: class_of(config), **options)
            model, report = loaded or AutoModelForCausalLM.from_pretrained(path, **options)
    except unreadable() as error:
        raise InvalidValue(
            "model.path",
            str(path),
            rule=f"holds no causal language model ({in_short(error)})",
            fix="Give a Hugging Face model directory or hub name.",
        ) from error
    check_report(model, report, path)
    check_kinds(model, path)
    check_finite(model, path)
    use_engine_layers(model)
    return model.to(device)


def class_of(config: Any) -> tuple[Any, Any]:
    """Return the model class that transformers chooses, and its part of the configuration."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return type(model), model.config


def save_model(model: Any, directory: Path, **options: Any) -> None:
    """Call `model.save_pretrained(directory, ...)`.

    Raises OSError for an unwritable directory or a full disk.
    """
    with disk_errors_as_oserror():
        model.save_pretrained(directory, **options)


@contextmanager
def disk_errors_as_oserror() -> Iterator[None]:
    """Convert an operating system error that safetensors reports into an OSError."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error)) from error


def use_engine_layers(model: Any) -> None:
    """Replace attention and linear layers by those of both engines, in place."""
    register_attention()
    model.set_attn_implementation(ATTENTION)
    tune_for_cpu(model)


def backbone(model: Any) -> Any:
    """Return the part of a model that computes hidden states from token ids."""
    found = model.get_decoder()
    # For classes with unusual attribute names, transformers returns the model or its head.
    if found is model or found is model.get_output_embeddings():
        found = model.model
    return found


def check_finite(model: Any, path: str | Path) -> None:
    """Raise InvalidValue for weights that are NaN or infinite.

    Lazy tensors are skipped; they are checked when they are read.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, LazyTensor):
            continue
        # A sum over finite weights is finite; only a non-finite sum needs a look at each weight.
        if not torch.isfinite(parameter.detach().float().sum()):
            num_bad = int((~torch.isfinite(parameter)).sum())
            if num_bad:
                raise damaged(path, name, num_bad, parameter.numel())


def damaged(path: str | Path, name: str, num_bad: int, num_weights: int) -> InvalidValue:
    """Return the error for weights that are NaN or infinite."""
    return InvalidValue(
        "model.path",
        str(path),
        rule=f"{num_bad:,} of {num_weights:,} weights of {name} are NaN or infinite; the files are "
        "damaged, or training diverged before they were written",
        fix="Give a model with finite weights.",
    )


class Head:
    """The head of a model: logits [N, V] float32 of hidden states [N, D].

    The result equals that of the model's own forward, except that 16-bit logits are not rounded.
    """

    def __init__(self, model: Any) -> None:
        self._output_embeddings = model.get_output_embeddings()
        config = model.config.get_text_config()
        caps = (getattr(config, name, None) for name in SOFT_CAPS)
        self._cap: float | None = next((cap for cap in caps if cap is not None), None)
        self._scale = _logit_scale(config)
        self._sum: torch.Tensor | None = None
        self._copy: Float32Copy | None = None

    def for_chunks(self) -> Head:
        """Return the same head for one forward pass that calls it several times.

        The gradient of a 16-bit weight is summed over the calls in float32.
        """
        head = copy.copy(self)
        if self._is_16_bit and torch.is_grad_enabled():
            head._sum = gradient_sum(local_part(self._output_embeddings.weight))
        return head

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] float32 of hidden states [N, D]."""
        logits = self._product(hidden)
        if self._scale != 1:
            logits = logits * self._scale
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits

    def release(self) -> None:
        """Drop the float32 copy of the weight, whose memory is about to be freed."""
        self._copy = None

    @property
    def _is_16_bit(self) -> bool:
        return self._output_embeddings.weight.dtype in (torch.bfloat16, torch.float16)

    def _product(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor
        if not self._is_16_bit:
            logits = self._output_embeddings(hidden)
            return logits
        weight = local_part(self._output_embeddings.weight)
        bias = local_part(self._output_embeddings.bias)
        if torch.is_grad_enabled():
            total = gradient_sum(weight) if self._sum is None else self._sum
            logits = float32_product(hidden, weight, total)
        else:
            # A sampler multiplies few rows by the weight, thousands of times between two updates.
            self._copy = self._copy or Float32Copy(weight)
            logits = mm(hidden, self._copy.get().t())
        return logits if bias is None else logits + bias.float()


def head_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return logits [N, V] float32 of hidden states [N, D]. For many small calls, keep a Head."""
    return Head(model)(hidden)


def _logit_scale(config: Any) -> float:
    """Return the factor of a model's logits.

    Cohere and HyperCLOVA X multiply, Granite and MiniCPM divide. HyperCLOVA X uses the name by
    which the latter divide.
    """
    scale = getattr(config, "logit_scale", None)
    if scale is None and (scaling := getattr(config, "logits_scaling", None)) is not None:
        scale = scaling if config.model_type == "hyperclovax" else 1 / scaling
    return 1.0 if scale is None else float(scale)
