"""How a model lies on the ranks: FSDP2 over one data-parallel mesh.

Each decoder layer is gathered before it runs and let go after it; embedding, last norm and head
stay for a whole pass. Gradients are summed over ranks, never averaged: the optimizer step divides
by the denominator of the global batch.

The masters of the parameters are float32. With `dtype` bfloat16 the ranks gather, compute and keep
activations in bfloat16, and reduce gradients in float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from rlsys.engines.training.ranks import init_single_process_group


def shard(network: Any, *, world_size: int, dtype: str, device: str) -> None:
    """Shard a role's `network` in place over all ranks, and move it to their devices.

    One float32 rank shards nothing and needs no process group. One bfloat16 rank does, in a group
    of its own, because the mixed precision is FSDP2's.
    """
    if world_size == 1 and dtype == "float32":
        network.to(device)
        return
    if not dist.is_initialized():
        init_single_process_group(device)
    mesh = init_device_mesh(torch.device(device).type, (world_size,), mesh_dim_names=("data",))
    precision = (
        MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
        if dtype != "float32"
        else MixedPrecisionPolicy()
    )
    for module in (*decoder_layers(network.model), network):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A factor otherwise becomes part of the reduction, which gloo cannot do.
            module.set_force_sum_reduction_for_comms(True)


def recompute_activations(network: Any) -> None:
    """Keep only each decoder layer's input for the backward pass, and run the layer again there."""
    for layer in decoder_layers(network.model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that the model's authors say must stay in one piece."""
    names = set(model._no_split_modules or ())  # type: ignore[arg-type]
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} names no decoder layers (_no_split_modules), so it can be "
            "neither sharded nor checkpointed layer by layer; use trainer.num_ranks=1, float32 "
            "and model.gradient_checkpointing=false with it."
        )
    return layers


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter or gradient, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a parameter, gathered on every rank: a collective if it is sharded."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
