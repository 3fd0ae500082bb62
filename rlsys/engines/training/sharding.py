"""Sharding of a model over ranks: split over tensor and expert ranks, FSDP2 over the others.

Each decoder layer is gathered before it runs and freed after it. Embedding, last norm and head stay
gathered for a whole pass. Gradients are summed over ranks, never averaged: the optimizer step
divides by the denominator of the global batch.

Master parameters are float32. With a 16-bit `dtype` the ranks gather, compute and keep activations
in it, and reduce gradients in float32.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from rlsys.config.layout_fits_model import check_fits
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.engines.devices.cpu import apart
from rlsys.engines.devices.network import on_loopback
from rlsys.engines.training.parallel.experts import cut_experts
from rlsys.engines.training.parallel.pipeline import PipelineStage
from rlsys.engines.training.parallel.process_groups import Mesh
from rlsys.engines.training.parallel.tensor_parallel import cut_tensors, expert_modules
from rlsys.engines.training.ranks import init_single_process_group
from rlsys.errors import InvalidValue, require

SHARDED = ("dp_shard", "ep", "cp")  # ranks with different rows or tokens and equal weights
SHARDED_EXPERTS = ("dp_shard", "cp")


def build_mesh(layout: ParallelLayout, *, rank: int, dtype: str, device: str) -> Mesh | None:
    """Return the mesh of a layout, None if it shards nothing. A collective.

    One float32 rank shards nothing and needs no process group. One 16-bit rank needs a group of its
    own, because FSDP2 provides the mixed precision.
    """
    if layout.num_ranks == 1 and dtype == "float32":
        return None
    # The mesh creates groups too.
    with on_loopback() if layout.num_ranks == 1 else nullcontext():
        if not dist.is_initialized():
            init_single_process_group(device)
        return Mesh(layout, rank, device)


def shard(network: Any, mesh: Mesh | None, *, dtype: str, device: str) -> None:
    """Shard a role's `network` over the ranks of a mesh, in place, and move it to their devices.

    Tensors on the meta device get uninitialised memory for this rank's part.

    Raises ValueError for a model that does not fit the layout.
    """
    if mesh is not None:
        cut(network, mesh, dtype=dtype, device=device)
    allocate(network, device)
    network.to(device)  # FSDP2 looks for its parameters anew


def cut(network: Any, mesh: Mesh, *, dtype: str, device: str) -> None:
    """Shard a network as `shard` does, without allocating memory."""
    layout = mesh.layout
    check_fits(layout, network.model.config)
    if layout.size("tp", "cp", "pp") > 1:
        require(
            network.packs,
            "trainer.layout",
            str(layout),
            rule=f"{type(network.model).__name__} cannot run packed rows, which tp, cp and pp need",
            fix="Use a layout of dp alone.",
        )
        network.mesh = mesh
    if layout.size("ep", "tp") > 1:
        cut_experts(network.model, mesh)
    if layout.tp > 1:
        cut_tensors(network.model, mesh)
    if layout.pp > 1:
        network.stage = PipelineStage(network.model, mesh)
    experts = expert_modules(network.model) if layout.size("ep", "tp") > 1 else []
    network._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    if layout.size("dp_replicate", *SHARDED) == 1 and dtype == "float32":
        return
    precision = (
        MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
        if dtype != "float32"
        else MixedPrecisionPolicy()
    )
    for module in experts:
        fully_shard(module, mesh=mesh.sharding(*SHARDED_EXPERTS), mp_policy=precision)
    for module in (*decoder_layers(network.model), network):
        fully_shard(module, mesh=mesh.sharding(*SHARDED), mp_policy=precision)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Otherwise the factor becomes part of the reduction, which gloo does not support.
            module.set_force_sum_reduction_for_comms(True)
            if device == "cpu":
                _exchange_apart(module)


def _exchange_apart(module: FSDPModule) -> None:
    """Give the buffers that FSDP2 gathers and reduces memory of their own.

    They come and go between activations and would fragment the heap.
    """
    for group in _parameter_groups(module):
        for name in ("unshard", "wait_for_unshard", "post_backward"):
            setattr(group, name, apart()(getattr(group, name)))


def _parameter_groups(module: FSDPModule) -> list[Any]:
    """Return FSDP2's parameter groups of a module. torch 2.11 keeps one, 2.13 a list."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def free_gathered(network: nn.Module) -> None:
    """Free gathered weights, so that the next pass gathers them again.

    After a pass without backward, embedding, last norm and head are still gathered and would be
    outdated in later passes. After a failed pass, FSDP2's state is reset.
    """
    for module in network.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._training_state = TrainingState.IDLE
            for group in _parameter_groups(module):
                group._training_state = TrainingState.IDLE
            module.reshard()


def allocate(network: nn.Module, device: str) -> None:
    """Allocate uninitialised memory for the tensors of a network on the meta device."""
    made: dict[torch.Tensor, torch.Tensor] = {}  # keeps tied tensors tied
    for module in network.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in tables:
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    if tensor not in made:
                        made[tensor] = _empty(tensor, device)
                    held[name] = made[tensor]


def _empty(tensor: torch.Tensor, device: str) -> torch.Tensor:
    empty = torch.empty_like(tensor, device=device)
    if not isinstance(tensor, nn.Parameter):
        return empty
    return nn.Parameter(empty, requires_grad=tensor.requires_grad)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that the model's authors do not allow to split.

    Raises ValueError for a model without any.
    """
    layers = named_layers(model)
    if not layers:
        raise InvalidValue(
            "model.path",
            rule=f"{type(model).__name__} names no decoder layers (_no_split_modules), so it can "
            "be neither sharded nor checkpointed layer by layer",
            fix="Use trainer.layout=dp1, float32 and model.gradient_checkpointing=none with it.",
        )
    return layers


def named_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a model, sharded or not; an empty list if it names none."""
    names = set(model._no_split_modules or ())  # type: ignore[arg-type]
    # FSDP2 replaces the class of a sharded module by a subclass with this prefix.
    return [m for m in model.modules() if type(m).__name__.removeprefix("FSDP") in names]
