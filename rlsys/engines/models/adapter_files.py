"""Adapters on disk, as PEFT saves them: one pair of low-rank factors for each adapted layer.

Shape legend: I inputs and O outputs of a linear layer, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlsys.common.safe_json import parse_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"  # PEFT's names


@dataclass(frozen=True, kw_only=True)
class LayerFactors:
    """B A · scaling, which is added to the matrix of a layer."""

    a: torch.Tensor  # [R, I]
    b: torch.Tensor  # [O, R]
    scaling: float
    is_turned: bool  # the matrix of the layer is [I, O], in a Conv1D

    @property
    def shape(self) -> tuple[int, int]:
        """Shape [O, I] of the product."""
        return self.b.shape[0], self.a.shape[1]

    def to(self, device: torch.device) -> LayerFactors:
        """Return the factors in float32 on a device."""
        return replace(self, a=self.a.float().to(device), b=self.b.float().to(device))


def read_adapter(directory: Path) -> Mapping[str, LayerFactors]:
    """Return the factors of an adapter by the name of the layer, on the CPU.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = parse_json((directory / CONFIG).read_text())
    try:
        tensors = load_file(directory / WEIGHTS)
        scaling = config["lora_alpha"] / config["r"]
        return {
            name.removeprefix(PREFIX).removesuffix(A): LayerFactors(
                a=a,
                b=tensors[name.removesuffix(A) + B],
                scaling=scaling,
                is_turned=bool(config.get("fan_in_fan_out")),
            )
            for name, a in tensors.items()
            if name.endswith(A)
        }
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{directory} is not an adapter ({error!r})") from error
