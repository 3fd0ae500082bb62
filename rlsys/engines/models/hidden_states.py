"""Hidden states at the places of a batch that a head reads.

Shape legend: U places that are read, U' of them on this rank, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlsys.engines.models.causal_lm import backbone
from rlsys.engines.models.collate import CollatedBatch
from rlsys.engines.training.parallel.collectives import gather
from rlsys.engines.training.parallel.process_groups import Mesh
from rlsys.engines.training.parallel.sequence_parallel import TokenShards
from rlsys.engines.training.parallel.tensor_parallel import cuts_vocabulary
from rlsys.errors import require


@dataclass(frozen=True)
class HeadPositions:
    """Places of a batch that this rank scores: all, unless ranks share its tokens."""

    num_places: int
    shards: TokenShards | None = None
    own: torch.Tensor | None = None  # [U'] into U
    by_chunk: bool = False

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Select this rank's values: [U, ...] to [U', ...]."""
        return values if self.own is None else values.index_select(0, self.own)

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """Gather values of all ranks: [U', ...] to [U, ...].

        A collective if ranks share the tokens.
        """
        if self.shards is None or self.own is None:
            return values
        return self.shards.whole(values, self.own, self.num_places, by_chunk=self.by_chunk)


def hidden_states(
    model: Any,
    batch: CollatedBatch,
    row_limit: int | None,
    mesh: Mesh | None = None,
    received: torch.Tensor | None = None,
) -> tuple[torch.Tensor, HeadPositions]:
    """Return the hidden states [U', D] of this rank's places.

    `received` holds the hidden states of the previous pipeline stage, [1, T, D], and replaces the
    batch's tokens. Raises InvalidValue for a row of more inputs than `row_limit`.
    """
    output, shards = layer_outputs(model, batch, row_limit, mesh, received)
    if shards is None:
        places = HeadPositions(len(batch.positions))
        return output.flatten(0, 1).index_select(0, batch.positions), places
    by_chunk = cuts_vocabulary(model)
    if by_chunk:
        output = gather(output, shards.mesh.group("tp"), 1)
    own = shards.own(batch.positions, by_chunk=by_chunk)
    within = shards.within(batch.positions[own], by_chunk=by_chunk)
    places = HeadPositions(len(batch.positions), shards, own, by_chunk)
    return output[0].index_select(0, within), places


def layer_outputs(
    model: Any,
    batch: CollatedBatch,
    row_limit: int | None,
    mesh: Mesh | None = None,
    received: torch.Tensor | None = None,
) -> tuple[torch.Tensor, TokenShards | None]:
    """Return the outputs of this rank's layers, [1, T, D] or [B, L, D]."""
    longest = batch.input_ids.shape[1] if batch.packing is None else batch.packing.longest
    require(
        row_limit is None or longest <= row_limit,
        "tokens of a row",
        longest,
        rule=f"must be at most {row_limit}, because the rotary embedding of this model uses other "
        "angles for longer rows than those at which their tokens were sampled",
        fix="Lower data.max_prompt_tokens or sampling.max_tokens.",
    )
    shards = tokens_of(batch, mesh)
    options: dict[str, Any] = {}
    if batch.packing is not None:
        options = {"packing": batch.packing, "position_ids": batch.packing.position_ids}
    if mesh is not None and not options:
        longest = batch.input_ids.shape[1]
        options = {"position_ids": torch.arange(longest, device=batch.input_ids.device)[None]}
    input_ids = batch.input_ids
    if shards is not None:
        options |= {"position_ids": shards.chunk(options["position_ids"]), "shards": shards}
        input_ids = shards.chunk(input_ids)
    if batch.routed_experts is not None:
        experts = batch.routed_experts
        options["routed_experts"] = experts if shards is None else shards.own_inputs(experts)
    inputs = {"input_ids": input_ids} if received is None else {"inputs_embeds": received}
    output = backbone(model)(**inputs, **options, use_cache=False)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden, shards


def tokens_of(batch: CollatedBatch, mesh: Mesh | None) -> TokenShards | None:
    """Return the shards of a batch's tokens over ranks, or None if no ranks share them."""
    if mesh is None or mesh.num_token_shards == 1:
        return None
    tree = None if batch.packing is None else batch.packing.tree
    return TokenShards(mesh, batch.input_ids.shape[1], tree)


def hidden_shape(batch: CollatedBatch, mesh: Mesh | None) -> tuple[int, int]:
    """Return the shape of this rank's hidden states between layers, without their width."""
    shards = tokens_of(batch, mesh)
    if shards is not None:
        return 1, shards.size
    num_rows, length = batch.input_ids.shape
    return num_rows, length
