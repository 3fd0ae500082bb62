"""How the tokens of a pass lie on the ranks that share it, and how attention sees whole rows.

    M tokens ─pad─► context ranks: chunks of M/cp ─► tensor ranks: shards of M/(cp·tp)

Each rank scores the places in its own shard; `whole` brings the scores of all places together on
every rank. In attention, context ranks exchange heads for tokens (Ulysses, 2309.14509): each sees
some heads of all tokens.

Shape legend: M tokens, U places, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlsys.engines.training.parallel.collectives import exchange, total
from rlsys.engines.training.parallel.groups import Mesh

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TokenShards:
    """Of a pass of `num_tokens` over the context and tensor ranks of a mesh."""

    mesh: Mesh
    num_tokens: int

    @property
    def size(self) -> int:
        """Tokens of each rank."""
        return -(-self.num_tokens // self.mesh.num_token_shards)

    def chunk(self, row: torch.Tensor) -> torch.Tensor:
        """This context rank's part of [1, M] or [W, M], behind which there is padding of 0."""
        padded = self.size * self.mesh.num_token_shards
        row = torch.nn.functional.pad(row, (0, padded - row.shape[1]))
        return row.chunk(self.mesh.layout.cp, 1)[self.mesh.index("cp")]

    def own_inputs(self, values: torch.Tensor) -> torch.Tensor:
        """Of values of all tokens [M, W], those of this rank's own between the layers; 0 for
        padding."""
        return self.chunk(values.t()).chunk(self.mesh.layout.tp, 1)[self.mesh.index("tp")].t()

    def own(self, positions: torch.Tensor, *, by_chunk: bool) -> torch.Tensor:
        """Which of the places [U] this rank scores, [U'] into U: those in its shard, or, where the
        tensor ranks score the same ones together, in its chunk."""
        size, index = self._sized(by_chunk)
        return (positions // size == index).nonzero()[:, 0]

    def within(self, positions: torch.Tensor, *, by_chunk: bool) -> torch.Tensor:
        """Places of this rank as they lie in its shard or chunk."""
        size, index = self._sized(by_chunk)
        return positions - index * size

    def whole(
        self, values: torch.Tensor, own: torch.Tensor, num_places: int, *, by_chunk: bool
    ) -> torch.Tensor:
        """What all ranks say of their places, [U, ...]; of a gradient, each takes its own part."""
        if by_chunk and self.mesh.layout.cp == 1:
            return values
        placed = values.new_zeros(num_places, *values.shape[1:]).index_copy(0, own, values)
        return total(placed, self.mesh.group(*(("cp",) if by_chunk else ("cp", "tp"))))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """`attend` over all M tokens of the pass, for some heads: query, key and value
        [1, heads, chunk, D]; returns [1, chunk, H, D]."""
        num_ranks = self.mesh.layout.cp
        if query.shape[2] != self.size * self.mesh.layout.tp:
            raise ValueError(
                "attention sees the tokens of one tensor rank only: this model's attention is not "
                "cut as its plan says; use a layout without tp."
            )
        if key.shape[1] % num_ranks:
            # Each rank needs the keys of its own queries.
            copies = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        length = query.shape[2]
        if num_ranks > 1:
            query, key, value = (self._to_heads(x) for x in (query, key, value))
        query, key, value = (x[:, :, : self.num_tokens] for x in (query, key, value))
        attended = attend(query, key, value)  # [1, M, H/cp, D]
        missing = length * num_ranks - attended.shape[1]
        attended = torch.nn.functional.pad(attended, (0, 0, 0, 0, 0, missing))
        return self._to_tokens(attended) if num_ranks > 1 else attended

    def own_heads(self, per_head: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Of something that each head has one of, [H], the part that this rank attends with;
        `num_heads`: that it has before the exchange."""
        if len(per_head) > num_heads:
            per_head = per_head.chunk(self.mesh.layout.tp)[self.mesh.index("tp")]
        return per_head.chunk(self.mesh.layout.cp)[self.mesh.index("cp")]

    def _sized(self, by_chunk: bool) -> tuple[int, int]:
        if by_chunk:
            return self.size * self.mesh.layout.tp, self.mesh.index("cp")
        return self.size, self.mesh.index("cp", "tp")

    def _to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[1, H, chunk, D] to [1, H/cp, cp·chunk, D]."""
        num_ranks, length = self.mesh.layout.cp, x.shape[2]
        arrived = self._swapped(x[0])  # [cp·H/cp, chunk, D], by the rank that it comes from
        parts = arrived.view(num_ranks, -1, length, x.shape[3]).transpose(0, 1)
        return parts.reshape(1, -1, num_ranks * length, x.shape[3])

    def _to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[1, cp·chunk, H/cp, D] to [1, chunk, H, D]."""
        num_ranks = self.mesh.layout.cp
        arrived = self._swapped(x[0]).view(num_ranks, -1, *x.shape[2:])  # [cp, chunk, H/cp, D]
        return arrived.transpose(0, 1).flatten(1, 2)[None]

    def _swapped(self, x: torch.Tensor) -> torch.Tensor:
        """The r-th part of the first axis goes to rank r."""
        counts = [len(x) // self.mesh.layout.cp] * self.mesh.layout.cp
        return exchange(x, self.mesh.group("cp"), counts, counts)
