"""Tensor parallelism with sequence-parallel activations, after the plans of transformers.

    tokens of this rank ─gather─► attention: some heads ─┐ partial sums
                                  MLP: some columns      ├─scatter_sum─► tokens of this rank

Between blocks each rank keeps its own tokens, and norms and residuals run on those alone. Split
weights are DTensors over the tensor ranks, so that saving, loading and gathering work; a layer
computes with its local part. A replicated weight has on each rank the part of the gradient that
flows through it: `sum_replicated` sums them once per update.

Shape legend: T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from rlsys.engines.training.parallel.collectives import gather, own_part, scatter_sum
from rlsys.engines.training.parallel.process_groups import Mesh
from rlsys.errors import InvalidValue
from rlsys.reallocation.shards import local_part

TENSOR = "tp"
# Styles of linear layers in the plans.
COLUMNS, ROWS = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")


def cut_tensors(model: Any, mesh: Mesh) -> None:
    """Split a model in place over the tensor ranks. Raises ValueError if it cannot be split.

    Experts of a mixture stay whole, and their blocks run on this rank's tokens.
    """
    styles = dict(_planned(model))
    cutter = _Cutter(mesh)
    blocks: dict[nn.Module, None] = {}
    modules = dict(model.named_modules())
    for name, style in styles.items():
        cutter.linear(modules[name], style)
        blocks[modules[name.rpartition(".")[0]]] = None
    if not blocks and not expert_modules(model):
        raise InvalidValue(
            "trainer.layout",
            str(mesh.layout),
            rule=f"{type(model).__name__} has no plan for tensor parallelism in transformers",
            fix="Use a layout without tp.",
        )
    for block in blocks:
        _wrap(block, mesh, whole_output=False)
    for module in modules.values():
        if module not in blocks and hasattr(module, "is_causal") and hasattr(module, "layer_idx"):
            _wrap(module, mesh, whole_output=True)
    cutter.vocabulary(model)


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold the weights of all experts of a layer, [E, ...] each."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def cuts_vocabulary(model: Any) -> bool:
    """Return whether its head gives the logits of some tokens only."""
    head = model.get_output_embeddings()
    return head is not None and is_cut(head.weight)


def sum_replicated(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Sum the gradients of weights that every tensor rank has whole. A collective."""
    grads = [
        local_part(grad)
        for parameter in parameters
        if not is_cut(parameter) and (grad := parameter.grad) is not None
    ]
    if not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=mesh.group(TENSOR))
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def is_cut(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is split over the tensor ranks."""
    return isinstance(parameter, DTensor) and any(
        TENSOR in name for name in parameter.device_mesh.mesh_dim_names or ()
    )


def _planned(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the linear layers that the model's authors split, and how."""
    plan = model.tp_plan or {}
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style in (*COLUMNS, *ROWS) and isinstance(module, nn.Linear) and module is not head:
            yield name, style


class _Cutter:
    """Splits weights; tied weights stay tied."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._device_mesh = mesh.along(TENSOR)
        self._group = mesh.group(TENSOR)
        self._size, self._rank = mesh.layout.tp, mesh.index(TENSOR)
        self._made: dict[int, nn.Parameter] = {}

    def weight(self, module: nn.Module, name: str, dim: int) -> None:
        whole = getattr(module, name)
        if whole is None:
            return
        if whole.shape[dim] % self._size:
            raise InvalidValue(
                "trainer.layout",
                str(self._mesh.layout),
                rule=f"tp{self._size} does not divide {name} {tuple(whole.shape)} of "
                f"{type(module).__name__}",
                fix="Use a tp that does.",
            )
        if id(whole) not in self._made:
            part = whole.detach().chunk(self._size, dim)[self._rank].clone()
            cut = DTensor.from_local(part, self._device_mesh, [Shard(dim)], run_check=False)
            self._made[id(whole)] = nn.Parameter(cut, requires_grad=whole.requires_grad)
        setattr(module, name, self._made[id(whole)])

    def linear(self, module: nn.Module, style: str) -> None:
        group = self._group
        compute = _local_forward(module)
        if style in COLUMNS:
            self.weight(module, "weight", 0)
            self.weight(module, "bias", 0)
            if style == "colwise_gather_output":
                module.forward = lambda x: gather(compute(x), group, -1)
                return
        else:
            self.weight(module, "weight", 1)
            if module.bias is not None:
                # Every rank adds the bias to its partial sum.
                compute = _local_forward(module, bias_scale=1 / self._size)
            if style == "rowwise_split_input":
                module.forward = lambda x: compute(own_part(x, group, -1))
                return
        module.forward = compute

    def vocabulary(self, model: Any) -> None:
        """Split embedding and head by tokens of the vocabulary, if their number is divisible.

        Otherwise they stay whole, and each rank uses them for its own tokens of the row.
        """
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        group, rank = self._group, self._rank
        num_tokens = embedding.weight.shape[0]
        compute = _local_forward(embedding)
        if num_tokens % self._size:
            embedding.forward = lambda ids: compute(own_part(ids, group, 1))
            return
        self.weight(embedding, "weight", 0)
        first, held = num_tokens // self._size * rank, num_tokens // self._size
        padding = embedding.padding_idx
        if padding is not None:
            inside = first <= padding < first + held
            embedding.padding_idx = padding - first if inside else None

        def embed(ids: torch.Tensor) -> torch.Tensor:
            own = ids - first
            outside = (own < 0) | (own >= held)
            found = compute(own.masked_fill(outside, 0)).masked_fill(outside[..., None], 0.0)
            return scatter_sum(found, group, 1)

        embedding.forward = embed
        if head is not None and head.weight.shape[0] % self._size == 0:
            self.weight(head, "weight", 0)
            self.weight(head, "bias", 0) if head.bias is not None else None
            head.forward = _local_forward(head)


def _local_forward(module: nn.Module, bias_scale: float = 1.0) -> Callable[..., torch.Tensor]:
    """Return the module's forward, computed with the local parts of its weights."""
    forward = module.forward

    def compute(*args: Any, **kwargs: Any) -> torch.Tensor:
        with local_weights(module) as local:
            if bias_scale != 1:
                local["bias"] = local["bias"] * bias_scale
            result: torch.Tensor = forward(*args, **kwargs)
        return result

    return compute


@contextmanager
def local_weights(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Let a module compute with its local weights within the block.

    Yields them by name; the block may replace them.
    """
    held = module._parameters
    local: dict[str, Any] = {name: local_part(weight) for name, weight in held.items()}
    module._parameters = local
    try:
        yield local
    finally:
        module._parameters = held


def _wrap(block: nn.Module, mesh: Mesh, *, whole_output: bool) -> None:
    """Let a block see all tokens and return those of this rank.

    Its output is a partial sum or, with `whole_output`, equal on all ranks.
    """
    forward, group = block.forward, mesh.group(TENSOR)

    def reduced(x: torch.Tensor) -> torch.Tensor:
        return own_part(x, group, 1) if whole_output else scatter_sum(x, group, 1)

    def whole(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (gather(args[0], group, 1), *args[1:])
        else:
            kwargs = {**kwargs, "hidden_states": gather(kwargs["hidden_states"], group, 1)}
        output = forward(*args, **kwargs)
        if isinstance(output, tuple):
            return (reduced(output[0]), *output[1:])
        return reduced(output)

    block.forward = whole
