"""Activation checkpointing (1604.06174): recomputing activations in the backward pass.

    none        kept: all that autograd saves
    selective   kept: each decoder layer's input, outputs of its matrix products and attention;
                recomputed: norms, activation functions, rotary embeddings, collectives
    full        kept: each decoder layer's input; recomputed: the layer

Results are identical: the same operations run on the same inputs.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from rlsys.config import Checkpointing
from rlsys.engines.training.sharding import decoder_layers

# Results that cost more to recompute than to keep. Not bmm: scores of eager attention are quadratic
# in a row's length.
EXPENSIVE = (
    "aten::mm",
    "aten::addmm",
    "aten::_grouped_mm",
    "mkldnn::_linear_pointwise",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
)


def checkpoint_layers(network: Any, how: Checkpointing) -> None:
    """Let a role's `network` keep less for the backward pass, in place.

    Raises ValueError for a model that names no decoder layers.
    """
    if how == "none":
        return
    # Nothing is random in evaluation mode, so no RNG state has to be restored.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if how == "selective":
        options["context_fn"] = _keep_and_reuse
    for layer in decoder_layers(network.model):
        layer.forward = partial(checkpoint, layer.forward, **options)


def _keep_and_reuse() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the modes of a layer's forward pass and of its recomputation."""
    kept: deque[tuple[str, Any, list[int]]] = deque()
    return _Keeping(kept), _Reusing(kept)


class _Mode(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions (block attention) run compiled under this mode."""
        return True

    def __init__(self, kept: deque[tuple[str, Any, list[int]]]) -> None:
        super().__init__()
        self._kept = kept


class _Keeping(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (name := func._schema.name) in EXPENSIVE:
            own = tree_map_only(torch.Tensor, _detached, result)
            self._kept.append((name, own, _versions(own)))
        return result


class _Reusing(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func._schema.name) in EXPENSIVE:
            kept_name, own, versions = self._kept.popleft()
            assert kept_name == name, f"{name} where the forward pass had {kept_name}"
            if _versions(own) == versions:  # otherwise the model has changed it in place
                return own
        return func(*args, **(kwargs or {}))


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its graph, which would keep itself alive; its version is shared."""
    in_place = torch._C.DispatchKey.ADInplaceOrView
    with torch._C._SetExcludeDispatchKeyGuard(in_place, False):
        return tensor.detach()


def _versions(result: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
