"""One pass over a base model for several policies, each with its own low-rank adapter.

    x [N, I] ─┬─► W, frozen ────────────────────────────────────────────► + ─► y [N, O]
              └─► segments x_k [N_k, I] ─► A_k ─► B_k ─► · scaling_k ─────┘

The inputs of a policy are one segment of the flattened input. The base model computes all segments
at once, and each segment passes through its own factors only. So ranks and adapted layers may
differ, and the gradient of a factor is a product over the rows of its own segment, as in a pass of
that policy alone.

Shape legend: N inputs of a pass, N_k of segment k, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlsys.config import ModelConfig
from rlsys.engines.models.model_roles import Policy, load_role
from rlsys.engines.training.adapters import FrozenWeights, LowRankProduct, adaptable_layers
from rlsys.engines.training.recomputation import checkpoint_layers
from rlsys.engines.training.sharding import allocate


class MixedSegments(RuntimeError):
    """A layer gets other inputs than the model, such as an expert that gets chosen tokens only."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Inputs of one policy in a pass: `size` consecutive ones, and its adapted layers by name."""

    size: int
    products: Mapping[str, LowRankProduct]


class AdapterSegments:
    """Hooks in the linear layers of a base model that add the products of the current segments."""

    def __init__(self, model: nn.Module) -> None:
        self._segments: Sequence[Segment] = ()
        for name, layer in adaptable_layers(model).items():
            layer.register_forward_hook(partial(self._add, name))

    @contextmanager
    def of(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Use these segments within the block, which includes the backward pass.

        Layers that recompute their activations call the hooks in the backward pass too.
        """
        self._segments = segments
        try:
            yield
        finally:
            self._segments = ()

    def _add(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor
    ) -> torch.Tensor | None:
        segments = self._segments
        if not any(name in one.products for one in segments):
            return None
        x = args[0].reshape(-1, args[0].shape[-1])  # [N, I]
        sizes = [one.size for one in segments] if len(segments) > 1 else [len(x)]
        if sum(sizes) != len(x):
            raise MixedSegments(f"{name} gets {len(x)} inputs, and the model {sum(sizes)}")
        added = [
            _product(one.products.get(name), own, output.shape[-1])
            for one, own in zip(segments, x.split(sizes), strict=True)
        ]
        whole = added[0] if len(added) == 1 else torch.cat(added)  # [N, O]
        return (output + whole.view(output.shape)).to(output.dtype)


def _product(product: LowRankProduct | None, x: torch.Tensor, num_outputs: int) -> torch.Tensor:
    if product is None:
        return torch.zeros(len(x), num_outputs, device=x.device)
    return product(x)


def load_base(
    path: str | Path, model: ModelConfig, frozen: FrozenWeights, device: torch.device
) -> Policy:
    """Return the base model as a policy that shares the frozen weights of engines."""
    role = load_role(
        path, head="logits", dtype=model.dtype, trained=True, temperature=1.0, device=device
    )
    assert isinstance(role, Policy)
    role.hidden_dtype = getattr(torch, model.dtype)
    frozen.put_into(role.network.model)
    role.unread = {}
    role.network.requires_grad_(False)
    checkpoint_layers(role.network, model.checkpointing(on_gpu=device.type != "cpu"))
    allocate(role.network, device.type)
    role.network.to(device)
    return role
