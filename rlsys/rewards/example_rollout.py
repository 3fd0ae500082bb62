"""A handmade rollout for the unit test of a reward function."""

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
    """Return a rollout for the unit test of a reward function.

    Example: `assert correct(example_rollout("18", metadata={"answer": "18"})) == 1.0`.

    Args:
        completion_text: The text that the policy sampled.
        metadata: The columns of the dataset row except the prompt.
        prompt_text: The text of the prompt.
        token_ids: Tokens of the completion. The array is read-only, as in a run.
        prompt_token_ids: Tokens of the prompt. The array is read-only, as in a run.
        finish_reason: Why sampling ended.
        group_id: The number of the rollout's group.
        index: The number of the rollout within its group.

    Raises:
        InvalidValue: A text is not a string.
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
