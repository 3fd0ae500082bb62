"""Requests and generations, in vLLM's terms.

    GenerationRequest ──► vllm_params, vllm_prompt ──► AsyncLLM ──► generation ──► Generation

vllm is imported inside functions: importing this module costs nothing where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlsys.config import VLLM_TEMPERATURES
from rlsys.engines.generation.constraint import check_request_structure
from rlsys.engines.generation.sampling import stream_key
from rlsys.engines.generation.stopping import text_after
from rlsys.types import FinishReason, Generation, GenerationRequest

STREAM = "rlsys_stream"  # what SeededSampler asks for: key of the random stream, tokens before
FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORTED,
}


def vllm_params(request: GenerationRequest, llm: Any, stop_token_ids: Sequence[int]) -> Any:
    """VLLM's SamplingParams; `stop_token_ids` end every completion. ValueError for a request that
    `llm`, an AsyncLLM, can never run.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    request_id, sampling = request.request_id, request.sampling
    num_tokens = len(request.prompt_token_ids)
    limit: int = llm.model_config.max_model_len
    if not 1 <= num_tokens < limit:
        raise ValueError(
            f"request {request_id!r} has a prompt of {num_tokens} tokens; the context of {limit} "
            f"tokens takes 1 to {limit - 1} and a completion."
        )
    lowest, highest = VLLM_TEMPERATURES
    if sampling.temperature and not lowest <= sampling.temperature <= highest:
        raise ValueError(
            f"request {request_id!r} has temperature={sampling.temperature}; vLLM samples from "
            f"{lowest} to {highest}, and at 0 the most likely token."
        )
    stream = stream_key(request.seed)
    structure = None
    if sampling.structure:
        check_request_structure(request, has_end=bool(stop_token_ids or sampling.stop_token_ids))
        if request.num_prior_tokens:
            raise ValueError(
                f"request {request_id!r} has a structure and {request.num_prior_tokens} prior "
                "tokens, which vLLM's grammar cannot begin behind. Sample it from its beginning."
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
            stop_token_ids=[*stop_token_ids, *sampling.stop_token_ids],
            ignore_eos=True,  # vLLM's own choice of tokens that end a completion
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,  # in the text that stop strings are looked for in
            extra_args={STREAM: (stream, request.num_prior_tokens)},
            # Its own streams: one number for each seed and position on model runner 2, but a
            # generator for each request, which the CPU's cannot rewind, on model runner 1.
            seed=stream >> 1 if llm.vllm_config.use_v2_model_runner else None,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            structured_outputs=structure,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except VLLMClientError as error:
        raise ValueError(f"request {request_id!r}: {error}") from error


def vllm_prompt(request: GenerationRequest, *, num_loads: int, number: int) -> Any:
    """The prompt, under a key of the prefix cache that requests of the same salt have which come
    between the same two changes of weights, by their number `num_loads`: a version may come twice,
    with other weights, where a run goes back. `number` orders requests of one priority.
    """
    from vllm.inputs.engine import tokens_input

    salt = f"{num_loads} {request.cache_salt}"
    prompt = tokens_input(list(request.prompt_token_ids), cache_salt=salt)
    prompt["arrival_time"] = float(number)  # the clock's could be equal
    return prompt


def read_prior_text(
    state: Any, request: GenerationRequest, decode: Callable[[list[int]], str]
) -> None:
    """Tell the RequestState of a continued completion what the completion says so far: a stop
    string may have begun there.
    """
    start = len(request.prompt_token_ids) - request.num_prior_tokens
    before, prior = request.prompt_token_ids[:start], request.prompt_token_ids[start:]
    state.detokenizer.output_text = text_after(decode, before, prior)


def generation(request_id: str, completion: Any) -> Generation:
    """What vLLM's final CompletionOutput says; None is a request that was never sent. Raises
    FloatingPointError as `Generation.check_sampled`.
    """
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
    sampled = Generation(
        request_id=request_id,
        token_ids=np.asarray(token_ids, np.int32),
        sampler_logprobs=np.asarray(logprobs, np.float32),
        policy_versions=np.asarray(versions, np.int32),
        finish_reason=FINISH_REASONS[reason],
    )
    sampled.check_sampled()
    return sampled


def partial_generation(state: Any) -> Generation:
    """What vLLM's RequestState of a running request holds, as an aborted generation."""
    completion = state._new_completion_output([], None, None)
    completion.weight_versions = state._weight_version_spans() or []
    completion.finish_reason = "abort"
    return generation(state.external_req_id, completion)
