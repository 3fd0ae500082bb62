"""Conversion of requests and generations to and from vLLM's types.

    GenerationRequest ──► vllm_params, vllm_prompt ──► AsyncLLM ──► generation ──► Generation

vllm is imported inside functions, so that this module can be imported without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlsys.config.checks import check_vllm_temperature
from rlsys.engines.generation.constraint import check_request_structure
from rlsys.engines.generation.sampling import stream_key
from rlsys.engines.generation.stopping import check_stop, stop_ids, text_after
from rlsys.errors import InvalidValue, require
from rlsys.types import FinishReason, Generation, GenerationRequest

STREAM = "rlsys_stream"  # extra argument for SeededSampler: stream key, number of prior tokens
REQUEST_ID = "rlsys_request"  # extra argument for RouterHooks: the request's own id
FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORTED,
}


def vllm_params(request: GenerationRequest, llm: Any, stop_token_ids: Sequence[int]) -> Any:
    """Return vLLM's SamplingParams; `stop_token_ids` are the model's own ends.

    Raises ValueError for a request that `llm`, an AsyncLLM, can never run.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    name, sampling = f"request {request.request_id!r}", request.sampling
    num_tokens = len(request.prompt_token_ids)
    limit: int = llm.model_config.max_model_len
    require(
        1 <= num_tokens < limit,
        f"{name}: prompt_token_ids",
        rule=f"has {num_tokens} tokens, but the context of {limit} allows 1 to {limit - 1}",
        fix="Shorten the prompt (data.max_prompt_tokens), or give at least one token.",
    )
    if sampling.temperature:
        check_vllm_temperature(f"{name}: temperature", sampling.temperature)
    check_stop(request)
    stream = stream_key(request.seed)
    end_ids = stop_ids(request, stop_token_ids)
    structure = None
    if sampling.structure:
        check_request_structure(request, has_end=bool(end_ids))
        require(
            not request.num_prior_tokens,
            f"{name}: structure",
            rule=f"vLLM's grammar cannot start after {request.num_prior_tokens} prior tokens",
            fix="Sample the completion from its beginning.",
        )
        structure = StructuredOutputsParams(structural_tag=sampling.structure)
    try:
        llm.renderer.validate_token_ids(request.prompt_token_ids)
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop),
            stop_token_ids=end_ids,
            ignore_eos=True,  # otherwise vLLM chooses the end tokens
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,  # stop strings may contain them
            extra_args={
                STREAM: (stream, request.num_prior_tokens),
                REQUEST_ID: request.request_id,
            },
            # On model runner 2, vLLM derives one number from each seed and position. On runner 1
            # it would create a generator per request, which cannot be rewound on the CPU.
            seed=stream >> 1 if llm.vllm_config.use_v2_model_runner else None,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            structured_outputs=structure,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except VLLMClientError as error:
        raise InvalidValue(name, rule=str(error), fix="Change the request.") from error


def vllm_prompt(request: GenerationRequest, *, num_loads: int, number: int) -> Any:
    """Return the prompt with its key of the prefix cache.

    Requests share the cache if their salts are equal and no change of weights is between them,
    counted by `num_loads`: a version may come twice with other weights after a rollback. `number`
    orders requests of one priority.
    """
    from vllm.inputs.engine import tokens_input

    salt = f"{num_loads} {request.cache_salt}"
    prompt = tokens_input(list(request.prompt_token_ids), cache_salt=salt)
    prompt["arrival_time"] = float(number)  # the clock may give equal times
    return prompt


def adapter_number(policy: int) -> int:
    """Return vLLM's number of a policy's adapter; 0 would be none."""
    return policy + 1


def adapter_request(policy: int) -> Any:
    """Return the adapter of a policy's request.

    Its name and path are the same for all versions. They are in vLLM's keys of the prefix cache:
    the name separates policies, `num_loads` separates versions. vLLM does not read the path,
    because its workers have the adapter since their start.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"policy {policy}", adapter_number(policy), "published by the trainer")


def version_label(versions: Sequence[int]) -> str:
    """Return the versions of all policies as the one version that vLLM marks tokens with."""
    return " ".join(map(str, versions))


def read_prior_text(
    state: Any, request: GenerationRequest, decode: Callable[[list[int]], str]
) -> None:
    """Set the earlier text of a continued completion, where a stop string may have begun."""
    start = len(request.prompt_token_ids) - request.num_prior_tokens
    before, prior = request.prompt_token_ids[:start], request.prompt_token_ids[start:]
    state.detokenizer.output_text = text_after(decode, before, prior)


def generation(request_id: str, completion: Any, policy: int = 0) -> Generation:
    """Return vLLM's final CompletionOutput as a Generation; None is a request that was not sent.

    The tokens are marked with the versions of the policy that sampled them.
    `Generation.until_failure` has not been applied.
    """
    if completion is None:
        token_ids, logprobs, versions, reason = [], [], [], "abort"
    else:
        token_ids, logprobs = completion.token_ids, completion.logprobs.logprobs
        versions = [
            int(span.version.split()[policy])
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
    """Return the state of a running request as an aborted generation."""
    completion = state._new_completion_output([], None, None)
    completion.weight_versions = state._weight_version_spans() or []
    completion.finish_reason = "abort"
    adapter = state.lora_request
    policy = 0 if adapter is None else adapter.lora_int_id - adapter_number(0)
    return generation(state.external_req_id, completion, policy)
