"""From the JSON bodies of the API to checked values. Whatever is wrong is told with the value, the
rule and the fix; fields that this server has no use for are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsys.common import safe_json
from rlsys.tinker_server.api_errors import ApiError
from rlsys.tinker_server.datum_rows import ModelLimits
from rlsys.tinker_server.server_backend import StepParams
from rlsys.types import Int32Array, SamplingParams

Body = Mapping[str, Any]

MAX_SAMPLES = 1024
MAX_TOP_K = 32
MAX_SEED = 2**63 - 1
MAX_RANK = 1024

# Limits of ttl_seconds in the client's documentation: 1 hour and 10 years.
MIN_TTL_S, MAX_TTL_S = 3600, 10 * 366 * 24 * 3600

# What the API has and this server has not, by the field that asks for it.
_NOT_OFFERED = {
    "target_prompt_logprobs": "log-probabilities of chosen tokens",
    "prompt_alt_tokens_k": "draws at every position of a prompt",
}


def parse_json(body: bytes) -> Body:
    """Raises Refused, 400, for what is no JSON object."""
    try:
        found = safe_json.parse_json(body or b"{}")
    except ValueError as error:
        raise ApiError(f"the body is no JSON ({error}); send an object.", 400) from None
    if not isinstance(found, dict):
        raise ApiError(f"the body is {type(found).__name__}; send a JSON object.", 400)
    return found


def text(body: Body, name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str) or not value:
        raise ApiError(f"{name}={value!r}; give a text that is not empty.")
    return value


def optional_text(body: Body, name: str) -> str | None:
    return None if body.get(name) is None else text(body, name)


def whole(body: Body, name: str, default: int | None = None, *, low: int = 0, high: int) -> int:
    value = body.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ApiError(f"{name}={value!r}; give a whole number from {low} to {high}.")
    return value


def number(
    body: Body,
    name: str,
    default: float,
    *,
    low: float = 0.0,
    below: float,
    nullable: bool = False,
) -> float:
    """Return a finite number; the default where the name is missing. Raises Refused.

    Clients write NaN and infinities as null, so null is refused unless `nullable`.
    """
    value = body.get(name, default)
    if value is None and nullable:
        value = default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value < below:
        raise ApiError(f"{name}={value!r}; give a number of at least {low:g}, below {below:g}.")
    return float(value)


def yes(body: Body, name: str, default: bool = False) -> bool:
    value = body.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ApiError(f"{name}={value!r}; give true or false.")
    return value


def texts(body: Body, name: str) -> list[str]:
    """Return a list of texts; an empty one where it is missing. Raises Refused."""
    value = body.get(name)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ApiError(f"{name}={value!r}. Give a list of texts.")
    return value


def ttl_s(body: Body) -> int | None:
    """Return for how many seconds a checkpoint is kept; None: for ever. Raises Refused."""
    if body.get("ttl_seconds") is None:
        return None
    return whole(body, "ttl_seconds", low=MIN_TTL_S, high=MAX_TTL_S)


def user_metadata(body: Body) -> dict[str, str]:
    """Return the client's labels of a session, a model or a checkpoint, all as texts."""
    found = body.get("user_metadata")
    found = found if isinstance(found, dict) else {}
    return {str(name): str(value) for name, value in found.items()}


def seq_id(body: Body) -> int:
    return whole(body, "seq_id", low=0, high=2**31 - 1)


def adam(body: Body) -> StepParams:
    """Of an optim_step request. Raises Refused for another optimizer."""
    if (other := body.get("optimizer_params")) is not None:
        kind = other.get("type") if isinstance(other, dict) else other
        raise ApiError(
            f"optimizer_params={kind!r}; this server trains with AdamW: give AdamParams."
        )
    params = body.get("adam_params")
    if not isinstance(params, dict):
        raise ApiError(f"adam_params={params!r}; give AdamParams.")
    return StepParams(
        learning_rate=number(params, "learning_rate", 1e-4, below=math.inf),
        beta1=number(params, "beta1", 0.9, below=1.0),
        beta2=number(params, "beta2", 0.95, below=1.0),
        eps=number(params, "eps", 1e-12, below=math.inf),
        weight_decay=number(params, "weight_decay", 0.0, below=math.inf),
        grad_clip_norm=number(params, "grad_clip_norm", 0.0, below=math.inf),
    )


@dataclass(frozen=True, kw_only=True)
class LoraRequest:
    """`rank` 0: all weights are to be trained."""

    rank: int = 0
    seed: int | None = None
    attention: bool = True
    mlp: bool = True
    unembedding: bool = True


def lora(body: Body) -> LoraRequest:
    """Of a create_model request."""
    if (optimizer := body.get("optimizer_config")) is not None:
        kind = optimizer.get("type") if isinstance(optimizer, dict) else optimizer
        if kind != "adamw":
            raise ApiError(f"optimizer_config={kind!r}; this server trains with adamw.")
    config = body.get("lora_config")
    if config is None:
        return LoraRequest()
    if not isinstance(config, dict):
        raise ApiError(f"lora_config={config!r}; give an object with rank.")
    asked = LoraRequest(
        rank=whole(config, "rank", low=1, high=MAX_RANK),
        seed=None if config.get("seed") is None else whole(config, "seed", high=MAX_SEED),
        attention=yes(config, "train_attn", True),
        mlp=yes(config, "train_mlp", True),
        unembedding=yes(config, "train_unembed", True),
    )
    if not (asked.attention or asked.mlp):
        raise ApiError(
            "lora_config trains the unembedding alone, beside which this server puts no adapters; "
            "set train_attn or train_mlp."
        )
    return asked


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """A checked sample request.

    `seed` None: any. `prompt_logprobs`: whether log-probabilities of the prompt's tokens are
    returned. `last_n`: number of the last prompt tokens that are scored. `record`: whether the
    server remembers the sequences for stable_reinforce.
    """

    prompt: Int32Array
    num_samples: int
    sampling: SamplingParams
    seed: int | None
    prompt_logprobs: bool
    last_n: int
    prompt_top_k: int
    sample_top_k: int
    record: bool


def sample(body: Body, limits: ModelLimits) -> SampleRequest:
    """Check a sample request. Raises Refused."""
    for name, what in _NOT_OFFERED.items():
        if body.get(name):
            raise ApiError(f"{name} asks for {what}, which is not offered here. Leave it out.")
    prompt = _prompt(body.get("prompt"), limits)
    params = body.get("sampling_params")
    if not isinstance(params, dict):
        raise ApiError(f"sampling_params={params!r}; give an object.")
    prompt_logprobs = yes(body, "prompt_logprobs")
    top_k = whole(body, "topk_prompt_logprobs", 0, high=MAX_TOP_K)
    return SampleRequest(
        prompt=prompt,
        num_samples=whole(body, "num_samples", 1, low=1, high=MAX_SAMPLES),
        sampling=_sampling(params, limits.max_context - len(prompt)),
        seed=None if params.get("seed") is None else whole(params, "seed", high=MAX_SEED),
        prompt_logprobs=prompt_logprobs,
        last_n=_last_n(body, len(prompt), prompt_logprobs=prompt_logprobs, top_k=top_k),
        prompt_top_k=top_k,
        sample_top_k=whole(body, "topk_sample_logprobs", 0, high=MAX_TOP_K),
        record=yes(body, "record_stability_info"),
    )


def _last_n(body: Body, size: int, *, prompt_logprobs: bool, top_k: int) -> int:
    """Return how many of the last prompt tokens are scored. The first token never is.

    As the client documents it, prompt_logprobs_last_n requires prompt_logprobs and is between 1
    and the prompt's length - 1. Raises Refused for anything else.
    """
    if body.get("prompt_logprobs_last_n") is None:
        return size - 1 if prompt_logprobs or top_k else 0
    value = body["prompt_logprobs_last_n"]
    if not prompt_logprobs:
        raise ApiError(f"prompt_logprobs_last_n={value!r} requires prompt_logprobs=true.")
    if size < 2:
        raise ApiError(
            f"prompt_logprobs_last_n={value!r}: a prompt of one token has no scored token. Leave "
            "it out."
        )
    return whole(body, "prompt_logprobs_last_n", low=1, high=size - 1)


def _prompt(prompt: Any, limits: ModelLimits) -> Int32Array:
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list):
        raise ApiError("prompt has no list of chunks; give a ModelInput.")
    tokens: list[int] = []
    for chunk in chunks:
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            kind = chunk.get("type") if isinstance(chunk, dict) else chunk
            raise ApiError(
                f"prompt has a chunk of type {kind!r}; this server's models read tokens alone: "
                "send encoded_text."
            )
        tokens += _tokens(chunk.get("tokens"), "tokens of the prompt", limits.vocab_size)
    if not 1 <= len(tokens) < limits.max_context:
        raise ApiError(
            f"the prompt has {len(tokens)} tokens; give at least 1 and fewer than the model's "
            f"context of {limits.max_context}."
        )
    return np.array(tokens, np.int32)


def _tokens(tokens: Any, what: str, vocab_size: int) -> Sequence[int]:
    if not isinstance(tokens, list):
        raise ApiError(f"{what} are {type(tokens).__name__}; give a list of whole numbers.")
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ApiError(f"{what} hold {token!r}; the vocabulary has 0 to {vocab_size - 1}.")
    return tokens


def _sampling(params: Body, room: int) -> SamplingParams:
    temperature = number(params, "temperature", 1.0, below=math.inf)
    top_k = whole(params, "top_k", -1, low=-1, high=2**31 - 1)
    stops, stop_tokens = _stops(params.get("stop"))
    top_p = number(params, "top_p", 1.0, below=math.inf)
    if not 0 < top_p <= 1:
        raise ApiError(f"top_p={top_p:g}; give a share above 0, of at most 1.")
    found = SamplingParams(
        temperature=temperature or 1.0,
        top_p=top_p,
        top_k=max(top_k, 0),
        max_tokens=min(whole(params, "max_tokens", room, low=1, high=2**31 - 1), room),
        stop=stops,
        stop_token_ids=stop_tokens,
    )
    return found if temperature else found.greedy


def _stops(stop: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Strings and tokens."""
    if stop is None:
        return (), ()
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list):
        raise ApiError(f"stop={stop!r}; give a text, or a list of texts or of tokens.")
    if not stop:
        raise ApiError(
            "stop=[] asks to go on behind the end of sequence, at which this server always stops; "
            "leave stop out."
        )
    if all(isinstance(one, str) and one for one in stop):
        return tuple(stop), ()
    if all(type(one) is int and one >= 0 for one in stop):
        return (), tuple(stop)
    raise ApiError(f"stop={stop!r}; give texts that are not empty alone, or tokens alone.")
