"""How a model lies on the ranks: cut over tensor and expert ranks, FSDP2 over all that remain.

Each decoder layer is gathered before it runs and let go after it; embedding, last norm and head
stay for a whole pass. Gradients are summed over ranks, never averaged: the optimizer step divides
by the denominator of the global batch.

The masters of the parameters are float32. With a 16-bit `dtype` the ranks gather, compute and keep
activations in it, and reduce gradients in float32.
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

SHARDED = ("dp_shard", "ep", "cp")  # ranks that have different rows or tokens, and equal weights
SHARDED_EXPERTS = ("dp_shard", "cp")


def build_mesh(layout: ParallelLayout, *, rank: int, dtype: str, device: str) -> Mesh | None:
    """One float32 rank shards nothing and needs no process group. One 16-bit rank does, in a
    group of its own, because the mixed precision is FSDP2's. A collective.
    """
    if layout.num_ranks == 1 and dtype == "float32":
        return None
    # Around the mesh, too, which makes groups of its own.
    with on_loopback() if layout.num_ranks == 1 else nullcontext():
        if not dist.is_initialized():
            init_single_process_group(device)
        return Mesh(layout, rank, device)


def shard(network: Any, mesh: Mesh | None, *, dtype: str, device: str) -> None:
    """Lay a role's `network` out on the ranks of a mesh, in place, and move it to their devices.
    What of it is on the meta device gets memory for this rank's part there, without numbers.

    Raises ValueError for a model that does not fit the layout.
    """
    if mesh is not None:
        cut(network, mesh, dtype=dtype, device=device)
    allocate(network, device)
    network.to(device)  # FSDP2 looks for its parameters anew


def cut(network: Any, mesh: Mesh, *, dtype: str, device: str) -> None:
    """`shard`, without the memory."""
    layout = mesh.layout
    check_fits(str(layout), network.model.config)
    if layout.size("tp", "cp", "pp") > 1:
        if not network.packs:
            raise ValueError(
                f"{type(network.model).__name__} cannot run packed rows, which layouts with tp, cp "
                f"or pp cut ({layout}); use dp alone."
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
            # A factor otherwise becomes part of the reduction, which gloo cannot do.
            module.set_force_sum_reduction_for_comms(True)
            if device == "cpu":
                _exchange_apart(module)


def _exchange_apart(module: FSDPModule) -> None:
    """What is gathered for a layer and reduced of it comes and goes between activations; memory of
    its own keeps these together.
    """
    for group in _parameter_groups(module):
        for name in ("unshard", "wait_for_unshard", "post_backward"):
            setattr(group, name, apart()(getattr(group, name)))


def _parameter_groups(module: FSDPModule) -> list[Any]:
    """Return FSDP2's groups of parameters of a module. torch 2.11 keeps one, 2.13 a list."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def let_go(network: nn.Module) -> None:
    """Free what is gathered, so that the next pass gathers it anew. After a pass without a backward
    that is embedding, last norm and head: later passes would take them as they were by then. After
    a pass that failed it is whatever FSDP2 thinks is still under way.
    """
    for module in network.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._training_state = TrainingState.IDLE
            for group in _parameter_groups(module):
                group._training_state = TrainingState.IDLE
            module.reshard()


def allocate(network: nn.Module, device: str) -> None:
    """Memory for what of a network is on the meta device, without numbers."""
    made: dict[torch.Tensor, torch.Tensor] = {}  # tied ones stay tied
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
    """The layers that the model's authors say must stay in one piece. Raises ValueError for a model
    without any.
    """
    layers = named_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} names no decoder layers (_no_split_modules), so it can be "
            "neither sharded nor checkpointed layer by layer; use trainer.layout=dp1, float32 "
            "and model.gradient_checkpointing=none with it."
        )
    return layers


def named_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a model, sharded or not; none where the model names none."""
    names = set(model._no_split_modules or ())  # type: ignore[arg-type]
    # FSDP2 gives a module that it shards a subclass of this name.
    return [m for m in model.modules() if type(m).__name__.removeprefix("FSDP") in names]
