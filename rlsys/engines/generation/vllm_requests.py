"""Requests and generations, in vLLM's terms.

    GenerationRequest ──► vllm_params, vllm_prompt ──► AsyncLLM ──► generation ──► Generation

vllm is imported inside functions: importing this module costs nothing where it is not installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlsys.types import FinishReason, Generation, GenerationRequest

MIN_TEMPERATURE = 0.01  # asked for a lower one above 0, vLLM samples at this one
FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORTED,
}


def vllm_params(request: GenerationRequest, llm: Any) -> Any:
    """vLLM's SamplingParams; ValueError for a request that `llm`, an AsyncLLM, can never run."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    request_id, sampling = request.request_id, request.sampling
    num_tokens = len(request.prompt_token_ids)
    limit: int = llm.model_config.max_model_len
    if not 1 <= num_tokens < limit:
        raise ValueError(
            f"request {request_id!r} has a prompt of {num_tokens} tokens; the context of {limit} "
            f"tokens takes 1 to {limit - 1} and a completion."
        )
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"request {request_id!r} has temperature={sampling.temperature}; vLLM's lowest is "
            f"{MIN_TEMPERATURE}, or 0 for the most likely token."
        )
    try:
        llm.renderer.validate_token_ids(request.prompt_token_ids)
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except VLLMClientError as error:
        raise ValueError(f"request {request_id!r}: {error}") from error


def vllm_prompt(request: GenerationRequest, version: int) -> Any:
    """The prompt, under a key of the prefix cache that no other version's requests have."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(request.prompt_token_ids), cache_salt=str(version))


def generation(request_id: str, completion: Any) -> Generation:
    """What vLLM's final CompletionOutput says; None is a request that was never sent."""
    if completion is None:
        token_ids, logprobs, versions, reason = [], [], [], "abort"
    else:
        token_ids, logprobs = completion.token_ids, completion.logprobs.logprobs
        versions = [
            int(span.version)
            for span in completion.weight_versions
            for _ in range(span.start, span.end)
        ]
        reason = completion.finish_reason
    assert len(token_ids) == len(logprobs) == len(versions)
    return Generation(
        request_id=request_id,
        token_ids=np.asarray(token_ids, np.int32),
        sampler_logprobs=np.asarray(logprobs, np.float32),
        policy_versions=np.asarray(versions, np.int32),
        finish_reason=FINISH_REASONS[reason],
    )


def partial_generation(state: Any) -> Generation:
    """What vLLM's RequestState of a running request holds, as an aborted generation."""
    completion = state._new_completion_output([], None, None)
    completion.weight_versions = state._weight_version_spans() or []
    completion.finish_reason = "abort"
    return generation(state.external_req_id, completion)
