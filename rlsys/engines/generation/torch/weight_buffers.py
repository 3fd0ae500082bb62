"""Weights of a running model, exchanged for those of another version.

    Rows(parameters) ── put(tensor) ──► the parameters are parts of it, one after the other

    exchange(rows, names, weights) ──► Exchange ── switch() ──► what was there before
        beside generation                          while nothing runs

What lies in the trainer's shared memory as the model needs it, stays there, and the model computes
with it where it is; all else is copied, into memory beside that of the version that runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlsys.reallocation.transport.staging import copy_parts
from rlsys.reallocation.transport.weight_views import Weights


class WeightBuffers:
    """Parameters, or buffers, whose rows stand in one tensor; of one, in that itself.

    `is_turned`: the tensor, a matrix, is to lie column by column.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], *, is_turned: bool = False) -> None:
        self.parameters = tuple(parameters)
        self.is_turned = is_turned
        self._shape = tuple(self.parameters[0].shape)
        if len(self.parameters) > 1:
            self._shape = (sum(map(len, self.parameters)), *self._shape[1:])
        self._sizes = [one.shape[0] if one.dim() else 1 for one in self.parameters]

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self._shape).numel() * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """A tensor for all rows, without numbers."""
        device = self.parameters[0].device
        if self.is_turned:
            turned = torch.empty(self._shape[::-1], dtype=self.dtype, device=device)
            return turned.t()
        return torch.empty(self._shape, dtype=self.dtype, device=device)

    def parts(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of such a tensor, by parameter."""
        return (whole,) if len(self.parameters) == 1 else whole.split(self._sizes)

    @torch.no_grad()
    def copy(self) -> torch.Tensor:
        """The parameters as they are now."""
        whole = self.empty()
        for part, one in zip(self.parts(whole), self.parameters, strict=True):
            part.copy_(one)
        return whole

    def put(self, whole: torch.Tensor) -> None:
        self.whole = whole
        for part, one in zip(self.parts(whole), self.parameters, strict=True):
            one.data = part

    def release(self) -> None:
        """Forget the numbers, until `put` brings others."""
        self.whole = self.parameters[0].detach().new_empty(0)
        for one in self.parameters:
            one.data = self.whole


@dataclass(frozen=True, kw_only=True)
class Exchange:
    new: tuple[tuple[WeightBuffers, torch.Tensor], ...]
    stays_in_share: bool
    """Whether the weights must stay open as long as they are in use."""

    def switch(self) -> list[torch.Tensor]:
        """Returns what is not used any more, which takes a while to let go."""
        replaced = []
        for rows, whole in self.new:
            replaced += [one.data for one in rows.parameters]
            rows.put(whole)
        return replaced


def exchange(rows: Sequence[WeightBuffers], names: Mapping[int, str], weights: Weights) -> Exchange:
    """`weights` fit the parameters; `names` by the parameters' ids. Any thread may call this while
    the model runs.
    """
    found = [_in_share(one, names, weights) for one in rows]
    in_share = sum(
        one.num_bytes for one, whole in zip(rows, found, strict=True) if whole is not None
    )
    # For the sake of a few, the trainer would have to keep two versions.
    stays = 2 * in_share >= sum(one.num_bytes for one in rows)
    new: list[tuple[WeightBuffers, torch.Tensor]] = []
    targets: dict[str, torch.Tensor] = {}
    for one, whole in zip(rows, found, strict=True):
        if whole is None or not stays:
            whole = one.empty()
            parts = zip(one.parameters, one.parts(whole), strict=True)
            targets |= {names[id(parameter)]: part for parameter, part in parts}
        new.append((one, whole))
    copy_parts(
        (targets[name][box.slices], part) for name, box, part in weights.parts() if name in targets
    )
    return Exchange(new=tuple(new), stays_in_share=stays)


def _in_share(
    rows: WeightBuffers, names: Mapping[int, str], weights: Weights
) -> torch.Tensor | None:
    if rows.is_turned:
        return None
    return weights.joined([names[id(one)] for one in rows.parameters], rows.dtype)
