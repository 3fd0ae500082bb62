"""Supervised examples as rollouts, for the same passes as reinforcement learning.

Used for warm starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlsys.types import TrainRow


def supervised_row(token_ids: Sequence[int], prompt_length: int) -> TrainRow:
    """Return a row whose loss covers the tokens after the prompt; unused columns are 0."""
    tokens = np.asarray(token_ids, np.int32)
    completion = tokens[prompt_length:]
    zeros = np.zeros(len(completion), np.float32)
    return TrainRow(
        prompt_token_ids=tokens[:prompt_length],
        token_ids=completion,
        policy_versions=zeros.astype(np.int32),
        loss_mask=np.ones(len(completion), np.bool_),
        columns={"sampler_logprobs": zeros, "advantages": zeros},
        group_id=0,
        group_size=1,
        group_num_tokens=len(completion),
    )
