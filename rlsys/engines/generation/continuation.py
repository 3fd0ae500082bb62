"""A rollout that another replica goes on with, after its own has died.

    request + what had been sampled ──► continued request ──► engine ──► rest ──► merged generation

The continued request carries the sampled tokens at its prompt's end. The merged generation has the
tokens, log-probabilities, versions and experts of both parts, as if nothing had happened.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlsys.types import ExpertArray, Generation, GenerationRequest


def continued(request: GenerationRequest, prior: Generation) -> GenerationRequest:
    """The request that samples what is left of `request` after `prior`, its earlier tokens."""
    left = request.sampling.max_tokens - len(prior.token_ids)
    assert left > 0, "nothing is left to sample"
    return replace(
        request,
        prompt_token_ids=[*request.prompt_token_ids, *prior.token_ids.tolist()],
        sampling=replace(request.sampling, max_tokens=left),
        num_prior_tokens=request.num_prior_tokens + len(prior.token_ids),
    )


def merged(prior: Generation, rest: Generation) -> Generation:
    """Both parts as one, under the name and with the end of the second."""
    return replace(
        rest,
        token_ids=np.concatenate([prior.token_ids, rest.token_ids]),
        sampler_logprobs=np.concatenate([prior.sampler_logprobs, rest.sampler_logprobs]),
        policy_versions=np.concatenate([prior.policy_versions, rest.policy_versions]),
        routed_experts=_merged_experts(prior.routed_experts, rest.routed_experts),
    )


def _merged_experts(prior: ExpertArray | None, rest: ExpertArray | None) -> ExpertArray | None:
    """Of what both parts ran, the first one's: it sampled on from there."""
    if prior is None or rest is None:
        return rest if prior is None else prior
    return np.concatenate([prior, rest[len(prior) :]])
