"""Continuing a rollout on another replica: the remaining request, and merging both parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlsys.engines.generation.continuation import continued, merged
from rlsys.types import FinishReason, Generation, GenerationRequest, SamplingParams


def generation(token_ids: list[int], version: int, reason: FinishReason) -> Generation:
    return Generation(
        request_id="3.1.0",
        token_ids=np.array(token_ids, np.int32),
        sampler_logprobs=np.array([-0.1 * token for token in token_ids], np.float32),
        policy_versions=np.full(len(token_ids), version, np.int32),
        finish_reason=reason,
    )


REQUEST = GenerationRequest(
    request_id="3.1.0",
    prompt_token_ids=(7, 8),
    sampling=SamplingParams(max_tokens=5, temperature=0.5, stop=("#",)),
    seed=42,
)


def test_the_rest_starts_where_the_first_part_ended() -> None:
    once = continued(REQUEST, generation([1, 2], 4, FinishReason.ABORTED))
    assert list(once.prompt_token_ids) == [7, 8, 1, 2]
    assert (once.num_prior_tokens, once.seed, once.request_id) == (2, 42, "3.1.0")
    assert once.sampling == SamplingParams(max_tokens=3, temperature=0.5, stop=("#",))

    twice = continued(once, generation([3], 5, FinishReason.ABORTED))
    assert list(twice.prompt_token_ids) == [7, 8, 1, 2, 3]
    assert (twice.num_prior_tokens, twice.sampling.max_tokens) == (3, 2)


def test_continuing_a_complete_rollout_fails() -> None:
    with pytest.raises(AssertionError):
        continued(REQUEST, generation([1, 2, 3, 4, 5], 4, FinishReason.LENGTH))


def test_every_token_keeps_its_logprob_and_version() -> None:
    whole = merged(
        generation([1, 2], 4, FinishReason.ABORTED), generation([3], 6, FinishReason.STOP)
    )
    assert whole.token_ids.tolist() == [1, 2, 3]
    assert whole.sampler_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert whole.policy_versions.tolist() == [4, 4, 6]
    assert (whole.request_id, whole.finish_reason) == ("3.1.0", FinishReason.STOP)


def test_experts_are_those_of_the_part_that_sampled() -> None:
    """Use a prompt of 2 tokens.

    The first part sampled 2 more and so ran 3. Then come 2 injected tokens, and one by another
    replica, which ran all 6 before it.
    """
    first = replace(
        generation([1, 2], 4, FinishReason.ABORTED),
        routed_experts=np.array([[10], [11], [12]], np.uint8),
    )
    injected = replace(first, token_ids=np.array([5, 6], np.int32))
    second = replace(
        generation([3], 6, FinishReason.STOP),
        routed_experts=np.array([[20], [21], [22], [23], [24], [25]], np.uint8),
    )
    whole = merged(merged(first, injected), second)
    assert whole.routed_experts is not None
    assert whole.routed_experts.dtype == np.uint8
    assert whole.routed_experts[:, 0].tolist() == [10, 11, 12, 23, 24, 25]
    nothing = Generation.of_nothing("3.1.0", FinishReason.ABORTED)
    kept = merged(first, nothing).routed_experts
    assert kept is first.routed_experts
    assert merged(nothing, second).routed_experts is second.routed_experts
