"""What every head stands on: hidden states where a batch is read.

Shape legend: U places that are read, D width.
"""

from __future__ import annotations

from typing import Any

import torch

from rlsys.engines.causal_lm import backbone
from rlsys.engines.training.collate import Batch


def hidden_states(model: Any, batch: Batch, row_limit: int | None) -> torch.Tensor:
    """[U, D]. Raises ValueError for a row of more inputs than `row_limit`, if there is one."""
    packed, longest = {}, batch.input_ids.shape[1]
    if batch.packing is not None:
        packed = {"packing": batch.packing, "position_ids": batch.packing.position_ids}
        longest = batch.packing.longest
    if row_limit is not None and longest > row_limit:
        raise ValueError(
            f"a row has {longest} tokens, but the rotary embedding of this model turns all "
            f"tokens of rows of more than {row_limit} by other angles than when they "
            "were sampled; lower data.max_prompt_tokens or sampling.max_tokens."
        )
    output = backbone(model)(input_ids=batch.input_ids, use_cache=False, **packed)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden.flatten(0, 1).index_select(0, batch.positions)
