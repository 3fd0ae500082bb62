"""What of a forward pass is kept for the backward pass, and what is computed there again
(activation checkpointing, 1604.06174).

    none        kept: all that autograd asks for
    selective   kept: each decoder layer's input, and what its matrix products and attention gave;
                again: norms, activation functions, rotary embeddings, what ranks exchange
    full        kept: each decoder layer's input; again: the layer

The numbers are the same: what is computed again is computed from the same numbers by the same
operations.
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

# Results that cost more to compute again than to keep. Not bmm: scores of eager attention are
# quadratic in a row's length.
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
    """Let a role's `network` keep less for the backward pass, in place. Raises ValueError for a
    model that names no decoder layers.
    """
    if how == "none":
        return
    # In evaluation mode nothing is drawn, so that there is no state to put back.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if how == "selective":
        options["context_fn"] = _keep_and_reuse
    for layer in decoder_layers(network.model):
        layer.forward = partial(checkpoint, layer.forward, **options)


def _keep_and_reuse() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Of one forward pass of a layer, and of its repetition."""
    kept: deque[tuple[str, Any, list[int]]] = deque()
    return _Keeping(kept), _Reusing(kept)


class _Mode(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Else what is compiled (block attention) would run as if it were not, under this mode."""
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
            if _versions(own) == versions:  # else a model has changed it in place
                return own
        return func(*args, **(kwargs or {}))


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Without the graph, which would keep itself alive through it; sees changes in place."""
    in_place = torch._C.DispatchKey.ADInplaceOrView
    with torch._C._SetExcludeDispatchKeyGuard(in_place, False):
        return tensor.detach()


def _versions(result: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
