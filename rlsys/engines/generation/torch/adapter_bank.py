"""Low-rank adapters of several policies in one batch (LoRA, arXiv 2106.09685).

    x [N, I] ─┬─► W of the base model ────────────────────────────────────► + ─► y [N, O]
              └─► rows by adapter [K, M, I] ─► A [K, I, R] ─► B [K, R, O] ──┘

The base model computes all rows at once. The rows are then grouped by adapter, and two batched
products add each group's part. So a pass of K policies needs few more calls than one of a single
policy. With one thread, each row gets the bits that it gets in a pass of its own policy alone; with
several, the kernels may sum in another order. Layers with the same input share both products: their
A are side by side, and their B on the diagonal of one matrix, whose zeros change no sum. Only
adapters of equal rank share a product, because the kernels of other ranks sum in another order.

Shape legend: U rows of a pass, T tokens of a row, N = U · T, I inputs and O outputs of a layer,
K adapters of equal rank, M rows of the largest group, R the rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rlsys.engines.generation.torch.kv_cache import ROW_BLOCK, round_up
from rlsys.engines.models.adapter_files import LayerFactors, read_adapter
from rlsys.errors import InvalidValue, require

NO_ADAPTER = 0


@dataclass(frozen=True)
class _Joined:
    """Factors of running adapters of equal rank in layers that have the same input."""

    a: torch.Tensor  # [K, I, layers · R]
    b: torch.Tensor  # [K, layers · R, sum of O], zero outside of a layer's own block


@dataclass(frozen=True)
class _Groups:
    """Rows of a pass by adapter."""

    num_rows: int  # U
    size: int  # M
    index: torch.Tensor | None  # rows of all adapters, M each, padded with row 0; None: all rows
    places: torch.Tensor | None  # [U], the place in `index` of each row; the end without adapter
    is_mixed: bool  # some rows have no adapter


class AdapterBank:
    """Adapters of one model, by number. Numbers are positive.

    Creating it adds a hook to each linear layer of the model. A caller that computes layers by
    itself calls `add_to` instead.
    """

    def __init__(self, model: Any) -> None:
        from transformers.pytorch_utils import Conv1D

        self._device = next(model.parameters()).device
        self._adapters: dict[int, Mapping[str, LayerFactors]] = {}
        self._shapes: dict[str, tuple[int, int]] = {}  # [O, I] of each linear layer
        self._names: dict[int, str] = {}  # by id of the layer
        self._groups: list[tuple[str, ...]] = []  # layers that are computed together
        self._running: tuple[int, ...] = ()  # adapters, in the order of the joined factors
        self._joined: dict[tuple[str, ...], Sequence[_Joined]] = {}  # by rank
        self._selected: _Groups | None = None  # None: no row has an adapter
        head = model.get_output_embeddings()  # it computes other rows than the layers
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | Conv1D) and module is not head:
                is_turned = isinstance(module, Conv1D)
                rows, columns = module.weight.shape
                self._shapes[name] = (columns, rows) if is_turned else (rows, columns)
                self._names[id(module)] = name
                self._groups.append((name,))
                module.register_forward_hook(partial(self._hook, (name,)))

    def __contains__(self, number: int) -> bool:
        return number in self._adapters

    def group(self, layers: Sequence[nn.Module]) -> tuple[str, ...]:
        """Return the name of layers with the same input, for `add_to`."""
        names = tuple(self._names[id(one)] for one in layers)
        if names not in self._groups:
            self._groups.append(names)
        return names

    def read(self, directory: Path) -> Mapping[str, LayerFactors]:
        """Return the adapter in a directory, as PEFT saves it, checked for this model.

        Any thread may call it.

        Raises:
            InvalidValue: It was trained on another model, or its numbers are not finite.
        """
        factors = read_adapter(directory)
        for name, one in factors.items():
            require(
                self._shapes.get(name) == one.shape,
                "adapter",
                str(directory),
                rule=f"it adapts {name} with shape {list(one.shape)}, and the base model has "
                f"{list(self._shapes.get(name, ())) or 'no such layer below its head'}",
                fix="Use the base model that it was trained on.",
            )
            require(
                bool(torch.isfinite(one.a).all() and torch.isfinite(one.b).all()),
                "adapter",
                str(directory),
                rule=f"its weights of {name} are not finite",
                fix="Load an earlier checkpoint, and lower the learning rate.",
            )
        return {name: one.to(self._device) for name, one in factors.items()}

    def add(self, number: int, factors: Mapping[str, LayerFactors]) -> None:
        """Add what `read` has returned."""
        assert number > NO_ADAPTER
        self.remove(number)
        self._adapters[number] = factors

    def remove(self, number: int) -> None:
        """Forget an adapter that no running request has."""
        self._adapters.pop(number, None)
        if number in self._running:
            self._running = ()  # joined anew for the next pass

    def select(self, numbers: npt.NDArray[Any], running: npt.NDArray[Any], num_rows: int) -> None:
        """Set the adapter of each row of the next passes; NO_ADAPTER: none.

        Args:
            numbers: Adapters of the first rows.
            running: Adapters of all running requests, whose factors are put together.
            num_rows: Rows of the pass, U. Those after `numbers` are padding.
        """
        wanted = {int(one) for one in np.unique(numbers)} - {NO_ADAPTER}
        self._selected = None
        if not wanted:
            return
        if not wanted <= set(self._running) or len(self._running) > 2 * len(wanted):
            alive = {int(one) for one in np.unique(running)} & self._adapters.keys()
            names = tuple(sorted(wanted | alive, key=lambda one: (self._rank(one), one)))
            if names != self._running:
                self._join(names)
        self._selected = self._groups_of(numbers, num_rows)

    def _groups_of(self, numbers: npt.NDArray[Any], num_rows: int) -> _Groups:
        if len(self._running) == 1 and (numbers == self._running[0]).all():
            return _Groups(num_rows, num_rows, None, None, is_mixed=False)
        members = [np.flatnonzero(numbers == one) for one in self._running]
        # Kernels for blocks of rows sum a row in the same order however many blocks there are.
        size = round_up(max(map(len, members)), ROW_BLOCK)  # M
        index = np.zeros((len(members), size), np.int64)
        places = np.zeros(num_rows, np.int64)
        places[: len(numbers)] = index.size
        for number, rows in enumerate(members):
            index[number, : len(rows)] = rows
            places[rows] = number * size + np.arange(len(rows))
        is_mixed = bool((numbers == NO_ADAPTER).any())
        all_rows = self._tensor(index.ravel())
        return _Groups(num_rows, size, all_rows, self._tensor(places), is_mixed)

    def _tensor(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def add_to(self, group: tuple[str, ...], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return y [..., O] plus the adapters' part for x [..., I]; may overwrite y.

        y has the outputs of all layers of the group, one after the other.
        """
        joined, groups = self._joined.get(group), self._selected
        if groups is None or joined is None:
            return y
        tokens = x.reshape(groups.num_rows, -1, x.shape[-1])  # [U, T, I]
        picked = tokens if groups.index is None else tokens.index_select(0, groups.index)
        parts, start = [], 0
        for one in joined:
            end = start + len(one.a) * groups.size
            rows = picked[start:end].float().reshape(len(one.a), -1, x.shape[-1])  # [K, M · T, I]
            product = torch.bmm(torch.bmm(rows, one.a), one.b)  # [K, M · T, O]
            parts.append(product.reshape(-1, tokens.shape[1], product.shape[2]))
            start = end
        if groups.is_mixed:
            parts.append(torch.zeros_like(parts[0][:1]))
        added = parts[0] if len(parts) == 1 else torch.cat(parts)
        if groups.places is not None:
            added = added.index_select(0, groups.places)  # [U, T, O]
        added = added.reshape(y.shape)
        return y.add_(added) if y.dtype is torch.float32 else (y.float() + added).to(y.dtype)

    def _hook(
        self, group: tuple[str, ...], module: nn.Module, args: Any, output: torch.Tensor
    ) -> torch.Tensor:
        return self.add_to(group, args[0], output)

    def _join(self, numbers: tuple[int, ...]) -> None:
        """Put the factors of these adapters together."""
        self._running = numbers
        same_rank = [list(some) for _, some in itertools.groupby(numbers, self._rank)]
        self._joined = {
            group: [self._of_group(group, some) for some in same_rank]
            for group in self._groups
            if any(name in self._adapters[one] for one in numbers for name in group)
        }

    def _rank(self, number: int) -> int:
        """Return the largest rank of an adapter's layers, R."""
        return max(len(one.a) for one in self._adapters[number].values())

    def _of_group(self, group: tuple[str, ...], numbers: Sequence[int]) -> _Joined:
        adapters, rank = [self._adapters[one] for one in numbers], self._rank(numbers[0])
        pairs = [self._of_layer(name, adapters, rank) for name in group]
        return _Joined(torch.cat([a for a, _ in pairs], -1), _diagonal([b for _, b in pairs]))

    def _of_layer(
        self, name: str, adapters: Sequence[Mapping[str, LayerFactors]], rank: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [K, I, R] and B [K, R, O] of a layer; zeros where an adapter has less."""
        outputs, inputs = self._shapes[name]
        a = torch.zeros(len(adapters), inputs, rank, device=self._device)
        b = torch.zeros(len(adapters), rank, outputs, device=self._device)
        for place, factors in enumerate(adapters):
            if (one := factors.get(name)) is not None:
                a[place, :, : len(one.a)] = one.a.t()
                b[place, : len(one.a)] = one.b.t() * one.scaling
        return a, b


def _diagonal(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return matrices with the blocks [K, rows, columns] on their diagonals."""
    return torch.stack([torch.block_diag(*one) for one in zip(*blocks, strict=True)])


def unknown_adapter(name: str, number: int) -> InvalidValue:
    """Return the error of a request whose adapter is not loaded."""
    return InvalidValue(
        f"{name}: adapter",
        number,
        rule="is not loaded",
        fix="Call add_adapter before, and drop_adapter after the last request.",
    )
