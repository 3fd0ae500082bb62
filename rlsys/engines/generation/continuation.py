"""Continuing a rollout on another replica after its own has died.

    request + sampled tokens ──► continued request ──► engine ──► rest ──► merged generation

The continued request has the sampled tokens at its prompt's end. The merged generation has the
tokens, log-probabilities, versions and experts of both parts, as without the interruption.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlsys.types import ExpertArray, Generation, GenerationRequest


def continued(request: GenerationRequest, prior: Generation) -> GenerationRequest:
    """Return the request for the rest of `request` after its earlier tokens `prior`."""
    left = request.sampling.max_tokens - len(prior.token_ids)
    assert left > 0, "nothing is left to sample"
    return replace(
        request,
        prompt_token_ids=[*request.prompt_token_ids, *prior.token_ids.tolist()],
        sampling=replace(request.sampling, max_tokens=left),
        num_prior_tokens=request.num_prior_tokens + len(prior.token_ids),
    )


def merged(prior: Generation, rest: Generation) -> Generation:
    """Return both parts as one, with the request id and finish reason of the second."""
    return replace(
        rest,
        token_ids=np.concatenate([prior.token_ids, rest.token_ids]),
        sampler_logprobs=np.concatenate([prior.sampler_logprobs, rest.sampler_logprobs]),
        policy_versions=np.concatenate([prior.policy_versions, rest.policy_versions]),
        routed_experts=_merged_experts(prior.routed_experts, rest.routed_experts),
    )


def _merged_experts(prior: ExpertArray | None, rest: ExpertArray | None) -> ExpertArray | None:
    """Concatenate experts; tokens that both parts ran keep those of the first, which sampled."""
    if prior is None or rest is None:
        return rest if prior is None else prior
    return np.concatenate([prior, rest[len(prior) :]])
