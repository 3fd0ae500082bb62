"""Rollouts in the messages to a process of reward functions."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsys.common import pickling
from rlsys.types import FinishReason, Int32Array, Rollout

# Bound here, so that user code that replaces it has no effect on this module.
_loads = pickle.loads


@dataclass(frozen=True, kw_only=True)
class PackedRollouts:
    """Rollouts as a few large objects, which pickle much faster than many small ones."""

    group_ids: list[int]
    indices: list[int]
    prompt_texts: list[str]
    completion_texts: list[str]
    finish_reasons: list[FinishReason]
    tokens: bytes  # int32: prompt and completion of the first rollout, of the second, ...
    ends: list[int]  # end of each prompt and each completion, in tokens
    metadata: list[bytes]  # pickled, each object once
    metadata_of: list[int]  # index into `metadata`, by rollout

    def rollout(self, i: int) -> Rollout:
        """Return a new rollout with read-only tokens and its own copy of the metadata.

        Changes by one reward function do not affect others.
        """
        ends = self.ends
        start, middle, end = ends[2 * i - 1] if i else 0, ends[2 * i], ends[2 * i + 1]
        tokens = self._all_tokens
        rollout = Rollout.__new__(Rollout)
        # The constructor takes two microseconds, as long as a cheap reward function.
        vars(rollout).update(
            group_id=self.group_ids[i],
            index=self.indices[i],
            prompt_text=self.prompt_texts[i],
            completion_text=self.completion_texts[i],
            prompt_token_ids=tokens[start:middle],
            token_ids=tokens[middle:end],
            finish_reason=self.finish_reasons[i],
            metadata=_loads(self.metadata[self.metadata_of[i]]),
        )
        return rollout

    @functools.cached_property
    def _all_tokens(self) -> Int32Array:
        return np.frombuffer(self.tokens, np.int32)  # read-only, like the bytes


def pack_rollouts(rollouts: Sequence[Rollout]) -> PackedRollouts:
    """Pack rollouts for another process."""
    tokens: list[Int32Array] = []
    ends: list[int] = []
    metadata: list[bytes] = []
    places: dict[int, int] = {}  # by id of a metadata object, which the rollouts of a group share
    metadata_of: list[int] = []
    total = 0
    for rollout in rollouts:
        for part in (rollout.prompt_token_ids, rollout.token_ids):
            tokens.append(part)
            total += len(part)
            ends.append(total)
        place = places.setdefault(id(rollout.metadata), len(metadata))
        if place == len(metadata):
            metadata.append(_pickled(dict(rollout.metadata)))
        metadata_of.append(place)
    return PackedRollouts(
        group_ids=[rollout.group_id for rollout in rollouts],
        indices=[rollout.index for rollout in rollouts],
        prompt_texts=[rollout.prompt_text for rollout in rollouts],
        completion_texts=[rollout.completion_text for rollout in rollouts],
        finish_reasons=[rollout.finish_reason for rollout in rollouts],
        tokens=np.concatenate(tokens, dtype=np.int32).tobytes() if tokens else b"",
        ends=ends,
        metadata=metadata,
        metadata_of=metadata_of,
    )


def _pickled(metadata: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps(metadata)
    except (pickle.PicklingError, AttributeError, TypeError):
        return pickling.dumps(metadata)  # an instance of a class of the recipe's script
