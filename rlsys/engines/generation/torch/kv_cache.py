"""Keys and values of the running sequences, one slot each, for every layer.

    begin_prefill(first_slot, source, first) ─┐
    begin_decode(positions, drafted) ─────────┴─► forward pass ─► attend(layer, ...), once per layer

    copy(slot, start, end) ──► Kept, of a sequence that ends ──► restore(slot, ...), for another

Running slots come first, and each is hardly longer than the longest sequence. So a decode step
reads one contiguous block of memory, and finished sequences cost nothing. Gaps would cost more than
the copies that avoid them, because a CPU prefetches along a block.

Shape legend: S slots, C capacity of a slot in tokens, N sequences of this pass, U distinct prompts
of a prefill, T tokens of a prompt, H key/value heads, G query heads per key/value head, D head
width, R rows of a decode pass with drafts, L its levels (decode_rows.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rlsys.engines.models.attention import (
    AttentionRule,
    attention_behind,
    causal_attention,
    soft_cap,
    softmax_with_sinks,
)

# Rows and lengths of a pass are rounded up to these. Kernels then see few different shapes (a new
# one costs oneDNN half a millisecond), and sum a row in the same order whatever else is in the
# batch: with fewer rows or columns, other kernels run, which round differently.
ROW_BLOCK = 16
TOKEN_BLOCK = 16
FEWEST_TOKENS = 32


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def slot_capacity(num_tokens: int) -> int:
    """Return the places of a slot for a sequence: at most an eighth more, in few sizes."""
    block = max(TOKEN_BLOCK, 1 << num_tokens.bit_length() >> 4)
    return round_up(max(num_tokens, FEWEST_TOKENS), block)


class _LayerViews(NamedTuple):
    """Views of one layer's keys and values for a decode step."""

    all_keys: torch.Tensor  # [S·H·C, D]
    all_values: torch.Tensor  # [S·H·C, D]
    running_keys: torch.Tensor  # [N·H, D, C]
    running_values: torch.Tensor  # [N·H, C, D]


# Keys and values of some tokens of a sequence, by layer: each [H, T, D].
Kept = dict[int, tuple[torch.Tensor, torch.Tensor]]


class _Prefill(NamedTuple):
    """Targets of the rows of a pass: slot first_slot + i takes row source[i] of U."""

    first_slot: int
    source: torch.Tensor  # [N]
    # Positions of the rows' first tokens; the slots hold what comes before. None: 0.
    first: torch.Tensor | None  # [U]
    num_places: int  # places of a slot that such rows attend to


class _Drafted(NamedTuple):
    """Rows of a pass with several tokens of some sequences."""

    num_levels: int  # L
    slots: torch.Tensor  # [R]
    offsets: torch.Tensor  # [R], places after the sequence's first new token; the row's level


class SlotCache:
    """A rlsys.engines.models.attention.KeyValueCache over slots.

    The number of slots doubles as needed, up to `max_slots`, and shrinks when the capacity changes.
    The capacity follows the longest sequence. Slots × capacity stays within `max_tokens`.
    """

    def __init__(self, *, max_slots: int, max_tokens: int, device: str = "cpu") -> None:
        self.num_slots = 0
        self.capacity = 0
        self._max_slots = round_up(max_slots, ROW_BLOCK)
        self._max_tokens = max_tokens
        self._device = torch.device(device)
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # K, V: [S, H, C, D]
        self._prefill: _Prefill | None = None
        self._positions = torch.empty(0, dtype=torch.long)  # [N]
        self._drafted: _Drafted | None = None
        self._views: dict[int, _LayerViews] = {}  # valid while N and the layers stay the same
        self._places: dict[int, torch.Tensor] = {}  # H -> [N·H] or [R·H] rows of [S·H·C, D]
        # window, chunk, H, level -> [N·H, 1, C], 0 where a sequence attends, −inf elsewhere
        self._masks: dict[tuple[int | None, int | None, int, int], torch.Tensor] = {}

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token over all layers; known after the first pass."""
        num_bytes = sum(keys.nbytes + values.nbytes for keys, values in self._layers.values())
        return num_bytes // (self.num_slots * self.capacity)

    def padded(self, num_rows: int) -> int:
        """Return the rows that a decode step over the first `num_rows` slots computes."""
        return min(round_up(num_rows, ROW_BLOCK), self.num_slots)

    def reserve(self, num_slots: int, longest: int) -> None:
        """Make room for `num_slots` sequences, the longest of `longest` tokens, keeping them.

        The caller ensures that num_slots · slot_capacity(longest) fits into max_tokens.
        """
        slots, capacity = self.size(num_slots, longest)
        if (slots, capacity) == (self.num_slots, self.capacity):
            return
        assert slots * capacity <= self._max_tokens
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (
                _resized(keys, num_slots, slots, capacity),
                _resized(values, num_slots, slots, capacity),
            )
        self.num_slots, self.capacity = slots, capacity
        self._views = {}

    def size(self, num_slots: int, longest: int) -> tuple[int, int]:
        """Return the slots and capacity after `reserve`."""
        capacity = slot_capacity(longest)
        fits = num_slots <= self.num_slots and capacity <= self.capacity
        if fits and 4 * capacity >= 3 * self.capacity:
            return self.num_slots, self.capacity
        slots = round_up(num_slots, ROW_BLOCK)
        if num_slots > self.num_slots:
            slots = max(slots, min(2 * self.num_slots, self._max_slots))
        return (slots if slots * capacity <= self._max_tokens else num_slots), capacity

    def copy(self, slot: int, start: int, end: int) -> Kept:
        """Return copies of keys and values of a slot's tokens `start` .. `end`."""
        return {
            layer: (keys[slot, :, start:end].clone(), values[slot, :, start:end].clone())
            for layer, (keys, values) in self._layers.items()
        }

    def restore(self, slot: int, start: int, end: int, kept: Kept) -> None:
        """Write tokens `start` .. `end` back into a slot, out of a copy that begins at `start`."""
        for layer, (keys, values) in kept.items():
            all_keys, all_values = self._layers[layer]
            all_keys[slot, :, start:end] = keys[:, : end - start]
            all_values[slot, :, start:end] = values[:, : end - start]

    def clear(self, slot: int) -> None:
        """Set a slot to zeros, because what follows in it must be finite (see _allocate)."""
        for keys, values in self._layers.values():
            keys[slot] = 0
            values[slot] = 0

    def move(self, target: int, source: int, num_tokens: int) -> None:
        """Copy a sequence of `num_tokens` into another slot."""
        for keys, values in self._layers.values():
            keys[target, :, :num_tokens] = keys[source, :, :num_tokens]
            values[target, :, :num_tokens] = values[source, :, :num_tokens]

    def begin_prefill(
        self,
        first_slot: int,
        source: torch.Tensor,
        first: torch.Tensor | None = None,
        num_places: int = 0,
    ) -> None:
        """Let the next pass run prompts; slot first_slot + i takes row source[i] [N] of U.

        With `first` [U] a row begins at that position, and the slots that take it hold what comes
        before; all rows end within the first `num_places` places of a slot.
        """
        assert num_places <= self.capacity, "reserve comes first"
        self._prefill = _Prefill(first_slot, source, first, num_places)

    def begin_decode(
        self,
        positions: torch.Tensor,
        drafted: tuple[int, torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Let the next pass run one token of each of the first N slots, at `positions` [N].

        With `drafted`, the number of levels and each row's slot [R] and offset [R], it runs several
        tokens of a slot, at `positions` + offset. Rows may occur twice, to pad the pass.
        """
        if len(positions) != len(self._positions):
            self._views = {}
        self._prefill = None
        self._drafted = None if drafted is None else _Drafted(*drafted)
        self._positions = positions
        self._places = {}
        self._masks = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Store keys and values of a layer and return the attention output."""
        if self._prefill is None:
            attended = self.attend_one(layer, query[:, :, 0], key[:, :, 0], value[:, :, 0], rule)
            return attended[:, None]
        if layer not in self._layers:
            self._layers[layer] = (self._allocate(key), self._allocate(value))
        keys, values = self._layers[layer]
        first_slot, source, first, num_places = self._prefill
        if first is not None:
            place, slots = self._places_after(self._prefill, key.shape[2])
            keys[place] = key[source].transpose(1, 2)  # [N, T, H, D]
            values[place] = value[source].transpose(1, 2)
            keys, values = keys[slots, :, :num_places], values[slots, :, :num_places]
            return attention_behind(query, keys, values, rule, first)
        place = (slice(first_slot, first_slot + len(source)), slice(None), slice(key.shape[2]))
        keys[place] = key[source]
        values[place] = value[source]
        return causal_attention(query, key, value, rule)

    def attend_one(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Store one token of each row and attend: query [N, H·G, D], key and value [N, H, D].

        Returns [N, H·G, D]. With drafts, R is in place of N.
        """
        num_heads, width = key.shape[1:]
        if layer not in self._views:
            self._views[layer] = self._view(layer)
        views = self._views[layer]
        places = self._decode_places(num_heads)
        views.all_keys.index_copy_(0, places, key.reshape(-1, width))
        views.all_values.index_copy_(0, places, value.reshape(-1, value.shape[2]))
        if self._drafted is None:
            return self._attend_level(0, query, views, num_heads, rule)
        # One level after the other, in the shapes of a pass without drafts: kernels sum a row in
        # another order if there are more queries per sequence.
        num_slots = len(self._positions)
        cells = self._drafted.offsets * num_slots + self._drafted.slots  # [R]
        levels = query.new_zeros(self._drafted.num_levels, num_slots, *query.shape[1:])
        levels.flatten(0, 1).index_copy_(0, cells, query)
        attended = [
            self._attend_level(level, queries, views, num_heads, rule)
            for level, queries in enumerate(levels)
        ]
        return torch.cat(attended)[cells]

    def _attend_level(
        self,
        level: int,
        query: torch.Tensor,
        views: _LayerViews,
        num_heads: int,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Return the attention output [N, H·G, D] of queries `level` places after `positions`."""
        keys, values = views.running_keys, views.running_values
        num_rows, _, width = query.shape
        grouped = query.reshape(num_rows * num_heads, -1, width)  # [N·H, G, D]
        mask = self._mask(rule, num_heads, query.dtype, level)
        if rule.softcap is None:
            mask = mask.expand(-1, grouped.shape[1], -1)
            scores = torch.baddbmm(mask, grouped, keys, alpha=rule.scaling)  # [N·H, G, C]
        else:
            scores = soft_cap(torch.bmm(grouped, keys) * rule.scaling, rule.softcap) + mask
        sinks = None if rule.sinks is None else rule.sinks.view(num_heads, -1).repeat(num_rows, 1)
        weights = softmax_with_sinks(scores, sinks).to(values.dtype)
        attended = torch.bmm(weights, values)  # [N·H, G, D]
        return attended.view(num_rows, -1, values.shape[2])

    def _places_after(
        self, prefill: _Prefill, num_tokens: int
    ) -> tuple[tuple[Any, ...], torch.Tensor]:
        """Return where rows that follow cached tokens are written, and a slot of each row.

        The first result indexes [N, T] of K and V as [S, :, C]; the second has a slot per row [U].
        """
        first_slot, source, first, _ = prefill
        assert first is not None
        slots = first_slot + torch.arange(len(source), device=self._device)  # [N]
        steps = torch.arange(num_tokens, device=self._device)
        place = slots[:, None], slice(None), first[source][:, None] + steps
        return place, torch.full_like(first, first_slot).index_copy_(0, source, slots)

    def _view(self, layer: int) -> _LayerViews:
        keys, values = self._layers[layer]
        num_rows = len(self._positions)
        return _LayerViews(
            all_keys=keys.flatten(0, 2),
            all_values=values.flatten(0, 2),
            running_keys=keys[:num_rows].flatten(0, 1).mT,
            running_values=values[:num_rows].flatten(0, 1),
        )

    def _allocate(self, state: torch.Tensor) -> torch.Tensor:
        """Return zeros: places without a token are read with weight 0 and must be finite."""
        return state.new_zeros(self.num_slots, state.shape[1], self.capacity, state.shape[3])

    def _decode_places(self, num_heads: int) -> torch.Tensor:
        if num_heads not in self._places:
            heads = torch.arange(len(self._positions) * num_heads, device=self._device)
            first_places = heads.view(-1, num_heads) * self.capacity
            places = first_places + self._positions[:, None]  # [N, H]
            if self._drafted is not None:
                places = places[self._drafted.slots] + self._drafted.offsets[:, None]  # [R, H]
            self._places[num_heads] = places.flatten()
        return self._places[num_heads]

    def _mask(
        self, rule: AttentionRule, num_heads: int, dtype: torch.dtype, level: int
    ) -> torch.Tensor:
        key = rule.sliding_window, rule.chunk, num_heads, level
        if key not in self._masks:
            place = torch.arange(self.capacity, device=self._device)
            last = self._positions[:, None, None] + level
            hidden = place > last
            if rule.sliding_window is not None:
                hidden = hidden | (place <= last - rule.sliding_window)
            if rule.chunk is not None:
                hidden = hidden | (place < last - last % rule.chunk)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self._device)
            mask = mask.masked_fill_(hidden, float("-inf")).expand(-1, num_heads, -1)
            self._masks[key] = mask.reshape(-1, 1, self.capacity)
        return self._masks[key]


def _resized(stored: torch.Tensor, num_kept: int, num_slots: int, capacity: int) -> torch.Tensor:
    """Return a resized copy; new places are zero, see _allocate."""
    kept = stored[:num_kept, :, :capacity]  # [S, H, C, D]
    num_filled, num_heads, length, width = kept.shape
    resized = stored.new_empty(num_slots, num_heads, capacity, width)
    resized[:num_filled, :, :length] = kept
    resized[:num_filled, :, length:] = 0
    resized[num_filled:] = 0
    return resized
