"""Sequence parallelism: the tokens of a pass on several ranks, and attention over whole rows.

    M tokens ─pad─► context ranks: chunks of M/cp ─► tensor ranks: shards of M/(cp·tp)

Each rank scores the places in its own shard; `whole` gathers the scores of all places on every
rank. In attention, as many context ranks as divide the heads exchange heads for tokens (Ulysses,
2309.14509): each sees some heads of all their tokens. Beyond that, ranks have the same heads of
other tokens, and keys are sent around (ring.py), as in USP (2405.07719). If ring.py does not
support the attention (windows that rows exceed, soft caps, sinks, kernels other than the CPU's),
each of these ranks computes it for all tokens.

Shape legend: M tokens, U places, H heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rlsys.engines.models.prefix_tree import PrefixTree
from rlsys.engines.training.parallel.collectives import exchange, total
from rlsys.engines.training.parallel.process_groups import Mesh
from rlsys.engines.training.parallel.ring import RingCalls, ring_attention
from rlsys.errors import InvalidValue

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TokenShards:
    """The `num_tokens` of a pass over the context and tensor ranks of a mesh.

    Packed rows have a `tree`.
    """

    mesh: Mesh
    num_tokens: int
    tree: PrefixTree | None = None
    _made: dict[int, RingCalls] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of tokens of each rank."""
        return -(-self.num_tokens // self.mesh.num_token_shards)

    def chunk(self, row: torch.Tensor) -> torch.Tensor:
        """Return this context rank's part of [1, M] or [W, M], padded with 0."""
        padded = self.size * self.mesh.num_token_shards
        row = torch.nn.functional.pad(row, (0, padded - row.shape[1]))
        return row.chunk(self.mesh.layout.cp, 1)[self.mesh.index("cp")]

    def own_inputs(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of this rank's own tokens between layers, of [M, W]; padding is 0."""
        return self.chunk(values.t()).chunk(self.mesh.layout.tp, 1)[self.mesh.index("tp")].t()

    def own(self, positions: torch.Tensor, *, by_chunk: bool) -> torch.Tensor:
        """Return which of the places [U] this rank scores, [U'] into U.

        These are the places in its shard or, with `by_chunk`, in its chunk, which the tensor ranks
        score together.
        """
        size, index = self._size_and_index(by_chunk)
        # On the host, because shapes depend on it.
        here = [place for place, at in enumerate(positions.tolist()) if at // size == index]
        return torch.tensor(here, dtype=torch.int64, device=positions.device)

    def within(self, positions: torch.Tensor, *, by_chunk: bool) -> torch.Tensor:
        """Return places of this rank relative to its shard or chunk."""
        size, index = self._size_and_index(by_chunk)
        return positions - index * size

    def whole(
        self, values: torch.Tensor, own: torch.Tensor, num_places: int, *, by_chunk: bool
    ) -> torch.Tensor:
        """Return the values of all ranks' places, [U, ...]; each rank keeps its own gradient."""
        if by_chunk and self.mesh.layout.cp == 1:
            return values
        placed = values.new_zeros(num_places, *values.shape[1:]).index_copy(0, own, values)
        return total(placed, self.mesh.group(*(("cp",) if by_chunk else ("cp", "tp"))))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attend: Attend,
        scaling: float | None,
    ) -> torch.Tensor:
        """Attend over all M tokens of the pass for some heads.

        Takes query, key and value [1, heads, chunk, D] and returns [1, chunk, H, D]. `scaling` is
        given if attention hides nothing of the tree; then ranks that share heads compute it block
        by block.
        """
        if query.shape[2] != self.size * self.mesh.layout.tp:
            raise InvalidValue(
                "trainer.layout",
                str(self.mesh.layout),
                rule="attention of this model is not split as its plan says: it sees the tokens of "
                "one tensor rank only",
                fix="Use a layout without tp.",
            )
        swapping, around = self._peers(query.shape[1])
        num_copies = _num_copies(query.shape[1], key.shape[1], len(swapping))
        if num_copies > 1:
            key, value = (x.repeat_interleave(num_copies, 1) for x in (key, value))
        if len(swapping) > 1:
            query, key, value = (self._to_heads(x, swapping) for x in (query, key, value))
        if len(around) > 1 and scaling is not None:
            calls = self._calls(around, query.shape[2])
            attended = ring_attention(query, key, value, calls, scaling)
        else:
            attended = self._at_once(query, key, value, attend, around)
        return self._to_tokens(attended, swapping) if len(swapping) > 1 else attended

    def own_heads(self, per_head: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Return this rank's part of a vector with one element per head, [H].

        `num_heads` are the heads of this rank before the exchange.
        """
        if len(per_head) > num_heads:
            per_head = per_head.chunk(self.mesh.layout.tp)[self.mesh.index("tp")]
        swapping, _ = self._peers(num_heads)
        return per_head.chunk(len(swapping))[swapping.index(self.mesh.index("cp"))]

    def _peers(self, num_heads: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the context ranks in two groups.

        The first exchange heads for tokens with this rank, as many as the heads allow. The second
        have the same heads of other tokens.
        """
        count, index = self.mesh.layout.cp, self.mesh.index("cp")
        num_swapping = math.gcd(count, num_heads)
        first = index - index % num_swapping
        return range(first, first + num_swapping), range(index - first, count, num_swapping)

    def _at_once(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attend: Attend,
        around: Sequence[int],
    ) -> torch.Tensor:
        """Return [1, chunk, H, D] of heads that `around` share, each computing all tokens."""
        length = query.shape[2]
        if len(around) > 1:
            everywhere = (x.repeat(1, len(around), 1, 1) for x in (query, key, value))
            query, key, value = (self._to_heads(x, around) for x in everywhere)
        query, key, value = (x[:, :, : self.num_tokens] for x in (query, key, value))
        attended = attend(query, key, value)  # [1, M, H, D]
        missing = length * len(around) - attended.shape[1]
        attended = torch.nn.functional.pad(attended, (0, 0, 0, 0, 0, missing))
        return attended.chunk(len(around), 1)[around.index(self.mesh.index("cp"))]

    def _calls(self, around: Sequence[int], length: int) -> RingCalls:
        if length not in self._made:
            assert self.tree is not None, "attention with a scaling has a tree"
            index = around.index(self.mesh.index("cp"))
            group = self.mesh.group("cp")
            self._made[length] = RingCalls(self.tree.blocks, length, group, around, index)
        return self._made[length]

    def _size_and_index(self, by_chunk: bool) -> tuple[int, int]:
        if by_chunk:
            return self.size * self.mesh.layout.tp, self.mesh.index("cp")
        return self.size, self.mesh.index("cp", "tp")

    def _to_heads(self, x: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
        """Return [1, H, n·chunk, D] of [1, n·H, chunk, D]: each of n ranks gets some heads."""
        arrived = self._swapped(x[0], ranks)  # [n·H, chunk, D], by the rank that it comes from
        parts = arrived.view(len(ranks), -1, *x.shape[2:]).transpose(0, 1)
        return parts.reshape(1, -1, len(ranks) * x.shape[2], x.shape[3])

    def _to_tokens(self, x: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
        """Return [1, chunk, n·H, D] of [1, n·chunk, H, D]."""
        arrived = self._swapped(x[0], ranks)
        parts = arrived.view(len(ranks), -1, *x.shape[2:])  # [n, chunk, H, D]
        return parts.transpose(0, 1).flatten(1, 2)[None]

    def _swapped(self, x: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
        """Send the r-th part of the first axis to the r-th of these context ranks."""
        counts = [0] * self.mesh.layout.cp
        for rank in ranks:
            counts[rank] = len(x) // len(ranks)
        return exchange(x, self.mesh.group("cp"), counts, counts)


def _num_copies(num_heads: int, num_key_heads: int, num_ranks: int) -> int:
    """Return the copies of each key head that give each rank the keys of its own queries."""
    if num_key_heads % num_ranks == 0:
        return 1
    if num_ranks % num_key_heads == 0:
        return num_ranks // num_key_heads
    return num_heads // num_key_heads
