"""Replacing the weights of a running model.

    WeightBuffers(parameters) ── put(tensor) ──► the parameters are consecutive parts of the tensor

    exchange(buffers, names, weights) ──► Exchange ── switch() ──► the replaced tensors
        during generation                             while nothing runs

Weights that are in the trainer's shared memory in the form that the model needs stay there, and the
model reads them in place. Others are copied, to memory besides that of the running version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlsys.reallocation.transport.tensor_copies import copy_parts
from rlsys.reallocation.transport.weight_views import Weights


class WeightBuffers:
    """Parameters or buffers whose rows are in one tensor.

    `is_transposed` means that the tensor, a matrix, is stored column by column.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], *, is_transposed: bool = False) -> None:
        self.parameters = tuple(parameters)
        self.is_transposed = is_transposed
        self._shape = tuple(self.parameters[0].shape)
        if len(self.parameters) > 1:
            self._shape = (sum(map(len, self.parameters)), *self._shape[1:])
        self._sizes = [one.shape[0] if one.dim() else 1 for one in self.parameters]

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the parameters."""
        return self.parameters[0].dtype

    @property
    def num_bytes(self) -> int:
        """Size of all parameters."""
        return torch.Size(self._shape).numel() * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """Return an uninitialised tensor for all rows."""
        device = self.parameters[0].device
        if self.is_transposed:
            transposed = torch.empty(self._shape[::-1], dtype=self.dtype, device=device)
            return transposed.t()
        return torch.empty(self._shape, dtype=self.dtype, device=device)

    def parts(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the parts of such a tensor, by parameter."""
        return (whole,) if len(self.parameters) == 1 else whole.split(self._sizes)

    @torch.no_grad()
    def copy(self) -> torch.Tensor:
        """Return a copy of the parameters."""
        whole = self.empty()
        for part, one in zip(self.parts(whole), self.parameters, strict=True):
            part.copy_(one)
        return whole

    def put(self, whole: torch.Tensor) -> None:
        """Let the parameters be parts of a tensor."""
        self.whole = whole
        for part, one in zip(self.parts(whole), self.parameters, strict=True):
            one.data = part

    def release(self) -> None:
        """Free the memory until the next `put`."""
        self.whole = self.parameters[0].detach().new_empty(0)
        for one in self.parameters:
            one.data = self.whole


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """New tensors for a model's parameters."""

    new: tuple[tuple[WeightBuffers, torch.Tensor], ...]
    uses_shared_memory: bool
    """True if the weights must stay open as long as the model uses them."""

    def switch(self) -> list[torch.Tensor]:
        """Replace the parameters and return their old tensors, which take a while to free."""
        replaced = []
        for buffers, whole in self.new:
            replaced += [one.data for one in buffers.parameters]
            buffers.put(whole)
        return replaced


def exchange(
    buffers: Sequence[WeightBuffers], names: Mapping[int, str], weights: Weights
) -> Exchange:
    """Prepare an exchange; any thread may call this while the model runs.

    `weights` fit the parameters; `names` are those of parameters, by id.
    """
    found = [_in_shared_memory(one, names, weights) for one in buffers]
    num_shared = sum(
        one.num_bytes for one, whole in zip(buffers, found, strict=True) if whole is not None
    )
    # Sharing only a few would make the trainer keep two versions.
    shares = 2 * num_shared >= sum(one.num_bytes for one in buffers)
    new: list[tuple[WeightBuffers, torch.Tensor]] = []
    targets: dict[str, torch.Tensor] = {}
    for one, whole in zip(buffers, found, strict=True):
        if whole is None or not shares:
            whole = one.empty()
            parts = zip(one.parameters, one.parts(whole), strict=True)
            targets |= {names[id(parameter)]: part for parameter, part in parts}
        new.append((one, whole))
    copy_parts(
        (targets[name][box.slices], part) for name, box, part in weights.parts() if name in targets
    )
    return Exchange(new=tuple(new), uses_shared_memory=shares)


def _in_shared_memory(
    buffers: WeightBuffers, names: Mapping[int, str], weights: Weights
) -> torch.Tensor | None:
    if buffers.is_transposed:
        return None
    return weights.joined([names[id(one)] for one in buffers.parameters], buffers.dtype)
