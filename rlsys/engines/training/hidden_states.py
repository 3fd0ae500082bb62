"""What every head stands on: hidden states where a batch is read.

Shape legend: U places that are read, U' of them on this rank, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlsys.engines.causal_lm import backbone
from rlsys.engines.training.collate import Batch
from rlsys.engines.training.parallel.collectives import gather
from rlsys.engines.training.parallel.groups import Mesh
from rlsys.engines.training.parallel.tensor import cuts_vocabulary
from rlsys.engines.training.parallel.tokens import TokenShards


@dataclass(frozen=True)
class Places:
    """Which places of a batch this rank scores: all, unless ranks share its tokens."""

    num_places: int
    shards: TokenShards | None = None
    own: torch.Tensor | None = None  # [U'] into U
    by_chunk: bool = False

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """[U, ...] to [U', ...]."""
        return values if self.own is None else values.index_select(0, self.own)

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """[U', ...] to [U, ...]. A collective, where ranks share the tokens."""
        if self.shards is None or self.own is None:
            return values
        return self.shards.whole(values, self.own, self.num_places, by_chunk=self.by_chunk)


def hidden_states(
    model: Any, batch: Batch, row_limit: int | None, mesh: Mesh | None = None
) -> tuple[torch.Tensor, Places]:
    """[U', D] of this rank's places. Raises ValueError for a row of more inputs than `row_limit`,
    if there is one."""
    longest = batch.input_ids.shape[1] if batch.packing is None else batch.packing.longest
    if row_limit is not None and longest > row_limit:
        raise ValueError(
            f"a row has {longest} tokens, but the rotary embedding of this model turns all "
            f"tokens of rows of more than {row_limit} by other angles than when they "
            "were sampled; lower data.max_prompt_tokens or sampling.max_tokens."
        )
    if mesh is not None and mesh.num_token_shards > 1:
        return _of_shards(model, batch, mesh)
    packed = {}
    if batch.packing is not None:
        packed = {"packing": batch.packing, "position_ids": batch.packing.position_ids}
    output = backbone(model)(input_ids=batch.input_ids, use_cache=False, **packed)
    hidden: torch.Tensor = output.last_hidden_state
    places = Places(len(batch.positions))
    return hidden.flatten(0, 1).index_select(0, batch.positions), places


def _of_shards(model: Any, batch: Batch, mesh: Mesh) -> tuple[torch.Tensor, Places]:
    """Of a single packed row, whose tokens several ranks share."""
    num_tokens = batch.input_ids.shape[1]
    if batch.packing is not None:
        position_ids = batch.packing.position_ids
    else:
        position_ids = torch.arange(num_tokens, device=batch.input_ids.device)[None]
    shards, by_chunk = TokenShards(mesh, num_tokens), cuts_vocabulary(model)
    output = backbone(model)(
        input_ids=shards.chunk(batch.input_ids),
        position_ids=shards.chunk(position_ids),
        use_cache=False,
        packing=batch.packing,
        shards=shards,
    )
    hidden: torch.Tensor = output.last_hidden_state
    if by_chunk:
        hidden = gather(hidden, mesh.group("tp"), 1)
    own = shards.own(batch.positions, by_chunk=by_chunk)
    within = shards.within(batch.positions[own], by_chunk=by_chunk)
    places = Places(len(batch.positions), shards, own, by_chunk)
    return hidden[0].index_select(0, within), places
