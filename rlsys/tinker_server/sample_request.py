"""Execution of one sample request, from its checked fields to the bytes of its answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlsys.common.random_streams import request_seed
from rlsys.tinker_server.protobuf_messages import MASK_LOGPROB, TopK, WireSequence, encode_sample
from rlsys.tinker_server.request_checks import SampleRequest
from rlsys.tinker_server.server_backend import Backend, ScoreRequest, Scores
from rlsys.tinker_server.server_checkpoints import SamplerWeights
from rlsys.types import FinishReason, Float32Array, Generation, GenerationRequest


@dataclass(frozen=True, kw_only=True)
class SampledSequence:
    """Result of one sample request. `body` is a SampleResponse."""

    body: bytes
    generations: Sequence[Generation]


async def run_sample(
    backend: Backend, name: str, owner: str, weights: SamplerWeights, request: SampleRequest
) -> SampledSequence:
    """Sample a request and return its answer. Raise as the backend does.

    `name` is unique, and `owner` is the session.
    """
    seed = secrets.randbits(63) if request.seed is None else request.seed
    generations = await backend.sample(
        weights,
        [
            GenerationRequest(
                request_id=f"{name}:{index}",
                prompt_token_ids=tuple(request.prompt.tolist()),
                sampling=request.sampling,
                seed=request_seed(seed, 0, index),
            )
            for index in range(request.num_samples)
        ],
        owner,
    )
    for one in generations:
        others = set(one.policy_versions.tolist()) - {weights.number}
        assert not others, f"{one.request_id} was sampled by weights {others}, not {weights}"
    prompt, of_samples = await _scores(backend, weights, request, generations)
    sequences = [
        WireSequence(
            token_ids=one.token_ids,
            logprobs=one.sampler_logprobs,
            is_stopped=one.finish_reason is FinishReason.STOP,
            top_k=top_k,
        )
        for one, top_k in zip(generations, of_samples, strict=True)
    ]
    body = encode_sample(
        sequences,
        prompt_logprobs=_prompt_logprobs(request, prompt),
        prompt_top_k=None
        if prompt is None or prompt.top_k is None
        else _last_top_k(prompt.top_k, request.last_n),
    )
    return SampledSequence(body=body, generations=generations)


def _prompt_logprobs(request: SampleRequest, scores: Scores | None) -> Float32Array | None:
    """Return the log-probability of each prompt token [P], NaN if it was not scored.

    Without a request for them, the result is None.
    """
    if not request.prompt_logprobs:
        return None
    found = np.full(len(request.prompt), np.nan, np.float32)
    if scores is not None:
        found[-request.last_n :] = scores.logprobs[-request.last_n :]
    return found


async def _scores(
    backend: Backend,
    weights: SamplerWeights,
    request: SampleRequest,
    generations: Sequence[Generation],
) -> tuple[Scores | None, list[TopK | None]]:
    """Return the scores of the prompt, and the most likely tokens of each completion.

    Those of the prompt are the model's own, at temperature 1. Those of a completion are at the
    temperature of its sampler_logprobs.
    """
    nothing: list[TopK | None] = [None] * len(generations)
    prompt = None
    if request.last_n:
        (prompt,) = await backend.score(
            ScoreRequest(weights=weights, rows=[request.prompt], top_k=request.prompt_top_k)
        )
    if not request.sample_top_k:
        return prompt, nothing
    whole = [np.concatenate((request.prompt, one.token_ids)) for one in generations]
    scores = await backend.score(
        ScoreRequest(
            weights=weights,
            rows=whole,
            top_k=request.sample_top_k,
            temperature=request.sampling.temperature,
        )
    )
    start = len(request.prompt) - 1
    tops: list[TopK | None] = []
    for one in scores:
        assert one.top_k is not None
        tops.append(
            TopK(token_ids=one.top_k.token_ids[start:], logprobs=one.top_k.logprobs[start:])
        )
    return prompt, tops


def _last_top_k(top_k: TopK, last_n: int) -> TopK:
    """Return the most likely tokens with MASK_LOGPROB where the prompt is not scored, [P, K]."""
    size, k = top_k.token_ids.shape
    tokens = np.zeros((size + 1, k), np.int32)
    logprobs = np.full((size + 1, k), MASK_LOGPROB, np.float32)
    tokens[-last_n:], logprobs[-last_n:] = top_k.token_ids[-last_n:], top_k.logprobs[-last_n:]
    return TopK(token_ids=tokens, logprobs=logprobs)


async def gather_all(calls: Sequence[asyncio.Future[Generation]]) -> list[Generation]:
    """Return all results. If one fails, or this is cancelled, cancel all."""
    try:
        return list(await asyncio.gather(*calls))
    finally:
        for call in calls:
            call.cancel()
