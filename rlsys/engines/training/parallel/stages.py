"""Pipeline parallelism: each rank has some of the layers, and passes go through all ranks in turn.

    tokens ─► stage 0: embedding, layers ─hidden─► stage 1: layers ─► ... ─► last: layers, head
                                         ◄─gradient─                           └─► loss

The Hugging Face model stays whole in names and layer numbers: what belongs to other stages lets
through what it is given. Several passes are under way at once, one forward and one backward in turn
(1F1B; PipeDream-Flush, 2006.09503), so that a stage holds activations of at most as many passes as
there are stages behind it.

A head that is tied to the embedding stands on both ends; their gradients are added up once an
update.

Shape legend: T tokens of this rank, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from rlsys.engines.causal_lm import backbone, local_part
from rlsys.engines.training.parallel.groups import Mesh

PIPELINE = "pp"

T = TypeVar("T")


class _Skipped(nn.Module):
    """In place of a layer of another stage."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


class Stage:
    """This rank's part of a model. Raises ValueError for a model that cannot be cut into stages."""

    def __init__(self, model: Any, mesh: Mesh) -> None:
        self._group = mesh.group(PIPELINE)
        self._device = mesh.device
        self._holders: dict[str, int] = {}
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self.number, self._count = mesh.index(PIPELINE), mesh.layout.pp
        self.is_first, self.is_last = self.number == 0, self.number == self._count - 1
        self._ranks = dist.get_process_group_ranks(self._group)
        self._sent: list[tuple[dist.Work | None, torch.Tensor]] = []
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        is_tied = head is not None and head.weight is embedding.weight
        self._tied_module: Any = embedding if is_tied else None
        self._cut(model, embedding)

    def tied_weight(self) -> nn.Parameter | None:
        """The one that stands on both ends, if this rank is one of them."""
        if self._tied_module is None or not (self.is_first or self.is_last):
            return None
        weight: nn.Parameter = self._tied_module.weight
        return weight

    def add_tied(self) -> None:
        """Sum the gradients of both ends. A collective."""
        weight = self.tied_weight()
        if weight is None or weight.grad is None:
            return
        grad = _local(weight.grad)
        other = torch.empty_like(grad)
        peer = self._ranks[-1 if self.is_first else 0]
        if self.is_first:
            dist.send(grad, peer, group=self._group)
            dist.recv(other, peer, group=self._group)
        else:
            dist.recv(other, peer, group=self._group)
            dist.send(grad, peer, group=self._group)
        grad.add_(other)

    def of_all(self, facts: Mapping[str, T], tensors: Mapping[str, torch.Tensor]) -> dict[str, T]:
        """Facts of all stages' tensors by name, from those of this one's, which are `tensors`. A
        collective."""
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        found: list[Any] = [None] * self._count
        dist.all_gather_object(found, (dict(facts), shapes), group=self._group)
        self._holders = {
            name: number for number in reversed(range(self._count)) for name in found[number][0]
        }
        self._shapes = {name: shape for _, some in found for name, shape in some.items()}
        return {name: fact for some, _ in found for name, fact in some.items()}

    def to_first(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
        """A tensor of whichever stage has it, on the first one. A collective, after `of_all`; on
        other stages what comes back has no meaning."""
        holder = self._holders[name]
        if self.number == holder and holder:
            assert tensor is not None
            dist.send(tensor.contiguous(), self._ranks[0], group=self._group)
        elif self.is_first and holder:
            shape, dtype = self._shapes[name]
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            dist.recv(tensor, self._ranks[holder], group=self._group)
        return torch.empty(0) if tensor is None else tensor

    def run(
        self,
        num_passes: int,
        forward: Callable[[int, torch.Tensor | None], torch.Tensor],
        received: Callable[[int], torch.Tensor],
    ) -> None:
        """Forward and backward of all passes. `forward(i, hidden)` gives the hidden states for the
        next stage, or, on the last, the loss; `received(i)` an empty tensor for what comes in."""
        under_way: list[tuple[torch.Tensor | None, torch.Tensor]] = []
        ahead = min(self._count - 1 - self.number, num_passes)

        def begin(number: int) -> None:
            hidden = None if self.is_first else self._receive(received(number), -1)
            if hidden is not None:
                hidden.requires_grad_()
            output = forward(number, hidden)
            if not self.is_last:
                self._send(output.detach(), 1)
            under_way.append((hidden, output))

        def end() -> None:
            hidden, output = under_way.pop(0)
            if self.is_last:
                output.backward()
            else:
                output.backward(self._receive(torch.empty_like(output), 1))
            if hidden is not None:
                assert hidden.grad is not None
                self._send(hidden.grad, -1)

        for number in range(ahead):
            begin(number)
        for number in range(ahead, num_passes):
            begin(number)
            end()
        while under_way:
            end()
        self._settle()

    def through(
        self, hidden: torch.Tensor | None, forward: Callable[[torch.Tensor | None], torch.Tensor]
    ) -> torch.Tensor | None:
        """One pass without gradient: what the last stage makes of it, and None on the others."""
        if hidden is not None:
            hidden = self._receive(hidden, -1)
        output = forward(hidden)
        if self.is_last:
            return output
        self._send(output, 1)
        self._settle()
        return None

    def _receive(self, into: torch.Tensor, direction: int) -> torch.Tensor:
        dist.recv(into, self._ranks[self.number + direction], group=self._group)
        return into

    def _send(self, tensor: torch.Tensor, direction: int) -> None:
        tensor = tensor.contiguous()
        peer = self._ranks[self.number + direction]
        self._sent.append((dist.isend(tensor, peer, group=self._group), tensor))

    def _settle(self) -> None:
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        self._sent.clear()

    def _cut(self, model: Any, embedding: nn.Module) -> None:
        body = backbone(model)
        layers = getattr(body, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ValueError(
                f"{type(model).__name__} has no list of layers that could be cut into stages; use "
                "a layout without pp."
            )
        first, last = (
            len(layers) * number // self._count for number in (self.number, self.number + 1)
        )
        for number in range(len(layers)):
            if not first <= number < last:
                layers[number] = _skipped(layers[number])
        ends = [
            name
            for name, child in body.named_children()
            if child not in (layers, embedding) and next(child.parameters(), None) is not None
        ]
        if not self.is_last:
            for name in ends:
                setattr(body, name, _Skipped())
        self._check_skipping(model, body, layers, ends)
        if not self.is_first and not (self.is_last and self._tied_module is not None):
            model.set_input_embeddings(_Skipped())
        if not self.is_last:
            for name, child in list(model.named_children()):
                is_body = any(module is body for module in child.modules())
                if not is_body and next(child.parameters(), None) is not None:
                    setattr(model, name, _Skipped())

    def _check_skipping(
        self, model: Any, body: Any, layers: nn.ModuleList, ends: list[str]
    ) -> None:
        """What is skipped must change nothing: some models scale what comes in, or add to it."""
        own, own_ends = list(layers), {name: getattr(body, name) for name in ends}
        width = model.config.get_text_config().hidden_size
        given = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0))
        for number in range(len(layers)):
            layers[number] = _skipped(own[number])
        for name in ends:
            setattr(body, name, _Skipped())
        try:
            with torch.no_grad():
                position_ids = torch.arange(3)[None]
                output = body(inputs_embeds=given, position_ids=position_ids, use_cache=False)
            is_same = torch.equal(output.last_hidden_state, given)
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
            is_same = False  # it wants more than hidden states, or has weights between its layers
        finally:
            for number, layer in enumerate(own):
                layers[number] = layer
            for name, module in own_ends.items():
                setattr(body, name, module)
        if not is_same:
            raise ValueError(
                f"{type(model).__name__} does more between its layers than pass hidden states on, "
                "so it cannot be cut into stages; use a layout without pp."
            )


def _skipped(layer: nn.Module) -> _Skipped:
    """With what a model asks its layers."""
    skipped = _Skipped()
    for name in ("attention_type", "layer_type", "layer_idx"):
        if hasattr(layer, name):
            setattr(skipped, name, getattr(layer, name))
    return skipped


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = local_part(tensor)
    return local
