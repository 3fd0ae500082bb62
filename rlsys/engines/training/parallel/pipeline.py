"""Pipeline parallelism: each rank has some of the layers, and passes go through all ranks in turn.

    tokens ─► rank 0: embedding, layers ─hidden─► rank 1: layers ─► ... ─► last: layers, head
                                        ◄─gradient─                          └─► loss

Several passes are in flight at once; pipeline_schedule.py gives the order of a rank's tasks. With
several pieces per rank, the last rank's output of one piece is the input of the first rank's next.

The Hugging Face model keeps its names and layer numbers: layers of other ranks, and of pieces that
are not running, are replaced by identities.

A head that is tied to the embedding exists on the first and last stage; their gradients are summed
once per update.

Shape legend: T tokens of this rank, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from rlsys.engines.models.causal_lm import backbone
from rlsys.engines.training.parallel.pipeline_schedule import (
    PipelineTask,
    forwards,
    one_forward_one_backward,
)
from rlsys.engines.training.parallel.process_groups import Mesh
from rlsys.errors import InvalidValue
from rlsys.reallocation.shards import local_part

PIPELINE = "pp"

T = TypeVar("T")
Forward = Callable[[int, torch.Tensor | None], torch.Tensor]
"""Runs the current piece on the i-th pass, given the previous piece's hidden states, if any."""


class _Skipped(nn.Module):
    """Identity in place of a layer that is not computed."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


class PipelineStage:
    """The part of a model on this rank.

    Raises ValueError for a model that cannot be split into stages.

    `number` is the rank's position in its pipeline.
    """

    def __init__(self, model: Any, mesh: Mesh) -> None:
        self._mesh = mesh
        self._group = mesh.group(PIPELINE)
        self._holders: dict[str, int] = {}
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self.number, self._count = mesh.index(PIPELINE), mesh.layout.pp
        self._num_pieces = mesh.layout.num_pieces
        self._running = 0
        self._sent: list[tuple[dist.Work | None, torch.Tensor]] = []
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        is_tied = head is not None and head.weight is embedding.weight
        self._tied_module: Any = embedding if is_tied else None
        self._cut(model, embedding)

    @property
    def is_first(self) -> bool:
        """True if the running piece takes tokens."""
        return self.number == 0 and self._running == 0

    @property
    def is_last(self) -> bool:
        """True if the running piece ends with the head."""
        return self._has_head and self._running == self._num_pieces - 1

    @property
    def _has_head(self) -> bool:
        return self.number == self._count - 1

    def tied_weight(self) -> nn.Parameter | None:
        """Return the weight shared by embedding and head, on the ranks that have one of them."""
        if self._tied_module is None or not (self.number == 0 or self._has_head):
            return None
        weight: nn.Parameter = self._tied_module.weight
        return weight

    def sum_tied(self) -> None:
        """Sum the gradients of embedding and head if they are tied. A collective."""
        weight = self.tied_weight()
        if weight is None or weight.grad is None:
            return
        grad = local_part(weight.grad)
        other = torch.empty_like(grad)
        if self.number == 0:
            dist.send(grad, group=self._group, group_dst=self._count - 1)
            dist.recv(other, group=self._group, group_src=self._count - 1)
        else:
            dist.recv(other, group=self._group, group_src=0)
            dist.send(grad, group=self._group, group_dst=0)
        grad.add_(other)

    def gather_facts(
        self, facts: Mapping[str, T], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, T]:
        """Return the facts about all stages' tensors, by name. A collective.

        `facts` are those about this stage's `tensors`.
        """
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        found: list[Any] = [None] * self._count
        dist.all_gather_object(found, (dict(facts), shapes), group=self._group)
        self._holders = {
            name: number for number in reversed(range(self._count)) for name in found[number][0]
        }
        self._shapes = {name: shape for _, some in found for name, shape in some.items()}
        return {name: fact for some, _ in found for name, fact in some.items()}

    def send_to_first(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
        """Send a tensor from its stage to the first one. A collective, after `gather_facts`.

        The result has no meaning on other ranks.
        """
        holder = self._holders[name]
        if self.number == holder and holder:
            assert tensor is not None
            dist.send(tensor.contiguous(), group=self._group, group_dst=0)
        elif self.number == 0 and holder:
            shape, dtype = self._shapes[name]
            tensor = torch.empty(shape, dtype=dtype, device=self._mesh.device)
            dist.recv(tensor, group=self._group, group_src=holder)
        return torch.empty(0) if tensor is None else tensor

    def run(
        self, num_passes: int, forward: Forward, new_buffer: Callable[[int], torch.Tensor]
    ) -> None:
        """Run forward and backward of all passes.

        `forward(i, hidden)` returns the hidden states for the next piece or, in the last one, the
        loss; `new_buffer(i)` an empty tensor for the input.
        """
        in_flight: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}

        def begin(number: int) -> None:
            hidden = None if self.is_first else self._receive(new_buffer(number), -1)
            if hidden is not None:
                hidden.requires_grad_()
            output = forward(number, hidden)
            if not self.is_last:
                self._send(output.detach(), 1)
            in_flight[self._running, number] = hidden, output

        def end(number: int) -> None:
            hidden, output = in_flight.pop((self._running, number))
            if self.is_last:
                output.backward()
            else:
                output.backward(self._receive(torch.empty_like(output), 1))
            if hidden is not None:
                assert hidden.grad is not None
                self._send(hidden.grad, -1)

        order = one_forward_one_backward(self.number, self._count, self._num_pieces, num_passes)
        for task in self._each(order):
            begin(task.number) if task.is_forward else end(task.number)

    def infer(
        self, num_passes: int, forward: Forward, new_buffer: Callable[[int], torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return the last piece's output of each pass, without gradient; None on other ranks."""
        outputs: list[torch.Tensor | None] = [None] * num_passes
        for task in self._each(forwards(self._count, self._num_pieces, num_passes)):
            hidden = None if self.is_first else self._receive(new_buffer(task.number), -1)
            output = forward(task.number, hidden)
            if self.is_last:
                outputs[task.number] = output
            else:
                self._send(output, 1)
        return outputs

    def _each(self, order: list[PipelineTask]) -> Iterator[PipelineTask]:
        """Yield tasks with their piece as the running one, then wait for everything sent."""
        for task in order:
            self._running = task.piece
            yield task
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        self._sent.clear()

    def _receive(self, into: torch.Tensor, direction: int) -> torch.Tensor:
        """Receive from the previous piece (-1), or a gradient from the next one (1)."""
        source = (self.number + direction) % self._count
        group = self._mesh.channel(gradient=direction > 0, source=source)
        dist.recv(into, group=group, group_src=source)
        return into

    def _send(self, tensor: torch.Tensor, direction: int) -> None:
        tensor = tensor.contiguous()
        group = self._mesh.channel(gradient=direction < 0, source=self.number)
        target = (self.number + direction) % self._count
        self._sent.append((dist.isend(tensor, group=group, group_dst=target), tensor))

    def _cut(self, model: Any, embedding: nn.Module) -> None:
        body = backbone(model)
        layers = getattr(body, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise InvalidValue(
                "trainer.layout",
                str(self._mesh.layout),
                rule=f"{type(model).__name__} has no list of layers to split into stages",
                fix="Use a layout without pp.",
            )
        pieces = [self._layers_of(piece, len(layers)) for piece in range(self._num_pieces)]
        for number in range(len(layers)):
            if not any(number in piece for piece in pieces):
                layers[number] = _skipped(layers[number])
        ends = [
            name
            for name, child in body.named_children()
            if child not in (layers, embedding) and next(child.parameters(), None) is not None
        ]
        if not self._has_head:
            for name in ends:
                setattr(body, name, _Skipped())
        self._check_skipping(model, body, ends)
        forward = body.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with _only(body, pieces[self._running], () if self.is_last else ends):
                return forward(*args, **kwargs)

        body.forward = run
        if self.number and not (self._has_head and self._tied_module is not None):
            model.set_input_embeddings(_Skipped())
        if not self._has_head:
            for name, child in list(model.named_children()):
                is_body = any(module is body for module in child.modules())
                if not is_body and next(child.parameters(), None) is not None:
                    setattr(model, name, _Skipped())

    def _layers_of(self, piece: int, num_layers: int) -> range:
        place, count = piece * self._count + self.number, self._num_pieces * self._count
        return range(num_layers * place // count, num_layers * (place + 1) // count)

    def _check_skipping(self, model: Any, body: Any, ends: list[str]) -> None:
        """Check that skipping layers is an identity: some models scale or add to the input."""
        width = model.config.get_text_config().hidden_size
        given = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0))
        try:
            with torch.no_grad(), _only(body, (), ends):
                position_ids = torch.arange(3)[None]
                output = body(inputs_embeds=given, position_ids=position_ids, use_cache=False)
            is_same = torch.equal(output.last_hidden_state, given)
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
            is_same = False  # layers need more input, or there are weights between them
        if not is_same:
            raise InvalidValue(
                "trainer.layout",
                str(self._mesh.layout),
                rule=f"{type(model).__name__} does more between its layers than pass hidden states "
                "on, so it cannot be split into stages",
                fix="Use a layout without pp.",
            )


@contextmanager
def _only(body: Any, numbers: Collection[int], skipped_ends: Collection[str]) -> Iterator[None]:
    """Run only these layers of a model, and all around them except `skipped_ends`."""
    own, own_ends = list(body.layers), {name: getattr(body, name) for name in skipped_ends}
    for number, layer in enumerate(own):
        if number not in numbers and not isinstance(layer, _Skipped):
            body.layers[number] = _skipped(layer)
    for name in skipped_ends:
        setattr(body, name, _Skipped())
    try:
        yield
    finally:
        for number, layer in enumerate(own):
            body.layers[number] = layer
        for name, module in own_ends.items():
            setattr(body, name, module)


def _skipped(layer: nn.Module) -> _Skipped:
    """Return an identity with the attributes that a model reads of its layers."""
    skipped = _Skipped()
    for name in ("attention_type", "layer_type", "layer_idx"):
        if hasattr(layer, name):
            setattr(skipped, name, getattr(layer, name))
    return skipped
