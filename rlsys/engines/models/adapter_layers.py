"""The layers of a model that can have low-rank adapters, and the names of their factors.

    model ─► adaptable_layers ─► Lora.adapts ─► factor_tensors: LAYER.lora_A.weight and lora_B

Shape legend: I inputs and O outputs of a linear layer, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rlsys.config.lora import Lora
from rlsys.engines.models.scalar_lm import SCALAR_HEAD

PARTS = ("lora_A", "lora_B")  # PEFT's names of the factors


def factor_name(layer: str, part: str) -> str:
    """Return the name of a factor in published weights; `part` is one of PARTS."""
    return f"{layer}.{part}.weight"


def layer_of(factor: str) -> str:
    """Return the layer of a factor, by its published name."""
    return factor.removesuffix(".weight").rpartition(".")[0]


def factor_tensors(model: Any, lora: Lora) -> dict[str, torch.Tensor]:
    """Return the factors of the adapters of a model, on the meta device, by published name."""
    from transformers.pytorch_utils import Conv1D

    found: dict[str, torch.Tensor] = {}
    for name, layer in adaptable_layers(model).items():
        if lora.adapts(name):
            rows, columns = layer.weight.shape
            outputs, inputs = (columns, rows) if isinstance(layer, Conv1D) else (rows, columns)
            shapes = ((lora.rank, inputs), (outputs, lora.rank))
            for part, shape in zip(PARTS, shapes, strict=True):
                found[factor_name(name, part)] = torch.empty(shape, device="meta")
    return found


def adaptable_layers(model: Any) -> dict[str, Any]:
    """Return the linear layers that can have adapters, by Hugging Face name.

    These are all but the head and the layers that PEFT treats as experts. PEFT converts adapters of
    mixtures from a format in which each expert was a layer: in such a model it replaces names like
    `gate_proj` by the tensor of all experts, also those of dense and shared layers. PEFT could not
    load an adapter of one of these.
    """
    from transformers.pytorch_utils import Conv1D

    heads = (model.get_output_embeddings(), getattr(model, SCALAR_HEAD, None))
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not any(module is head for head in heads)
    }
    if all(one.dim() < 3 for one in model.parameters()):  # no tensor of several experts
        return linear
    kept = _kept_by_peft(model, linear)
    return {name: module for name, module in linear.items() if name in kept}


def _kept_by_peft(model: Any, names: Iterable[str]) -> set[str]:
    """Return the names that PEFT does not replace; all of them if PEFT is not installed."""
    try:
        from peft import LoraConfig
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:
        return set(names)
    config = LoraConfig(target_modules=list(names))
    convert_peft_config_for_transformers(config, model=model, conversions=None)
    return set(config.target_modules or ())
