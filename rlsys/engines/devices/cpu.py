"""CPU tuning of engines. Code outside of this package imports it from here.

    keep_freed_memory()     once per process: malloc keeps freed blocks for the next micro-batch
    apart(), Pieces         blocks and fragments that malloc should return nevertheless
    tune_for_cpu(model)     linear layers by the fastest library for this CPU, in place
    linear_function(...)    the same for a single product, in the sampler's decode step

None of it changes what a model computes, except for rounding.
"""

from __future__ import annotations

from torch import nn

from rlsys.engines.devices import onednn_linear
from rlsys.engines.devices.malloc_tuning import Pieces, apart, keep_freed_memory
from rlsys.engines.devices.onednn_linear import LinearFunction, is_best_turned, linear_function
from rlsys.engines.devices.sixteen_bit_linear import (
    rounded_linear,
    use_float32_products,
    wants_float32,
)

__all__ = [
    "LinearFunction",
    "Pieces",
    "apart",
    "is_best_turned",
    "keep_freed_memory",
    "linear_function",
    "rounded_linear",
    "tune_for_cpu",
    "wants_float32",
]


def tune_for_cpu(model: nn.Module) -> None:
    """Switch the linear layers of a model to faster products, in place.

    Both engines use them, so that they run the same arithmetic. Tensors on other devices are
    multiplied as before.
    """
    if onednn_linear.is_faster():
        onednn_linear.use_onednn(model)
    use_float32_products(model)
