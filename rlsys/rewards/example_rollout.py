"""A rollout made by hand, for the unit test of a reward function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlsys.config.fields import checked
from rlsys.types import FinishReason, Rollout


def example_rollout(
    completion_text: str = "",
    *,
    metadata: Mapping[str, Any] | None = None,
    prompt_text: str = "",
    token_ids: Sequence[int] = (),
    prompt_token_ids: Sequence[int] = (),
    finish_reason: FinishReason = FinishReason.STOP,
    group_id: int = 0,
    index: int = 0,
) -> Rollout:
    """`assert correct(example_rollout("18", metadata={"answer": "18"})) == 1.0`

    `metadata` holds the dataset row's columns beside the prompt. Tokens are read-only, as they are
    in a run.
    """
    checked(completion_text, str, "completion_text")
    checked(prompt_text, str, "prompt_text")
    prompt = np.array(prompt_token_ids, np.int32)
    tokens = np.array(token_ids, np.int32)
    for array in (prompt, tokens):
        array.flags.writeable = False
    return Rollout(
        group_id=group_id,
        index=index,
        prompt_text=prompt_text,
        completion_text=completion_text,
        prompt_token_ids=prompt,
        token_ids=tokens,
        finish_reason=finish_reason,
        metadata=dict(metadata or {}),
    )
