"""Checks of JSON requests. Fields that this server does not use are ignored.

Every function raises ApiError for a value that is not valid.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsys.common import safe_json
from rlsys.config.training_config import MAX_LEARNING_RATE
from rlsys.errors import InvalidValue
from rlsys.text.tokenizer_boundary import check_encodable
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

# Features of the API that this server lacks, by the field that requests them.
_NOT_OFFERED = {
    "target_prompt_logprobs": "log-probabilities of chosen tokens",
    "prompt_alt_tokens_k": "draws at every position of a prompt",
}


def parse_json(body: bytes) -> Body:
    """Return the object in a body, or raise ApiError, 400."""
    try:
        found = safe_json.parse_json(body or b"{}")
    except ValueError as error:
        raise ApiError(
            "body", rule=f"it is not JSON ({error})", fix="Send a JSON object.", status=400
        ) from None
    if not isinstance(found, dict):
        raise ApiError(
            "body",
            rule=f"it is {type(found).__name__}, not an object",
            fix="Send a JSON object.",
            status=400,
        )
    return found


def text(body: Body, name: str, default: str | None = None) -> str:
    """Return a text that is not empty."""
    value = body.get(name, default)
    if not isinstance(value, str) or not value:
        raise ApiError(name, value, rule="must be a text that is not empty", fix="Give a text.")
    return whole_characters(name, value)


def whole_characters(name: str, value: str) -> str:
    """Return a text if it has no half of a surrogate pair, which JSON can escape."""
    try:
        return check_encodable(value, name, change="the request")
    except InvalidValue as error:
        raise ApiError(error.field, error.value, rule=error.rule, fix=error.fix) from None


def optional_text(body: Body, name: str) -> str | None:
    """Return a text, or None if it is missing."""
    return None if body.get(name) is None else text(body, name)


def whole_number(
    body: Body, name: str, default: int | None = None, *, low: int = 0, high: int
) -> int:
    """Return an integer from `low` to `high`."""
    value = body.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ApiError(
            name,
            value,
            rule=f"must be a whole number from {low} to {high}",
            fix="Change it.",
        )
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
    """Return a finite number, the default if it is missing.

    Clients write NaN and infinities as null, so null is refused unless `nullable`.
    """
    value = body.get(name, default)
    if value is None and nullable:
        value = default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value < below:
        raise ApiError(
            name,
            value,
            rule=f"must be a number of at least {low:g} and below {below:g}",
            fix=f"Use {default:g}, for example.",
        )
    return float(value)


def flag(body: Body, name: str, default: bool = False) -> bool:
    """Return a boolean."""
    value = body.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ApiError(name, value, rule="must be true or false", fix="Send one of them.")
    return value


def texts(body: Body, name: str) -> list[str]:
    """Return a list of texts, an empty one if it is missing."""
    value = body.get(name)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ApiError(name, value, rule="must be a list of texts", fix="Send a list.")
    return [whole_characters(name, one) for one in value]


def ttl_s(body: Body) -> int | None:
    """Return the lifetime of a checkpoint in seconds. None: for ever."""
    if body.get("ttl_seconds") is None:
        return None
    return whole_number(body, "ttl_seconds", low=MIN_TTL_S, high=MAX_TTL_S)


def user_metadata(body: Body) -> dict[str, str]:
    """Return the client's labels of a session, a model or a checkpoint, as texts."""
    found = body.get("user_metadata")
    found = found if isinstance(found, dict) else {}
    return {
        whole_characters("user_metadata", str(name)): whole_characters("user_metadata", str(value))
        for name, value in found.items()
    }


def seq_id(body: Body) -> int:
    """Return the number of a command."""
    return whole_number(body, "seq_id", low=0, high=2**31 - 1)


def adam(body: Body) -> StepParams:
    """Return the settings of an optimizer step."""
    if (other := body.get("optimizer_params")) is not None:
        kind = other.get("type") if isinstance(other, dict) else other
        raise ApiError(
            "optimizer_params",
            kind,
            rule="this server only trains with AdamW",
            fix="Give AdamParams.",
        )
    params = body.get("adam_params")
    if not isinstance(params, dict):
        raise ApiError("adam_params", params, rule="must be an object", fix="Give AdamParams.")
    with _inside("adam_params."):
        return StepParams(
            learning_rate=_learning_rate(params),
            beta1=number(params, "beta1", 0.9, below=1.0),
            beta2=number(params, "beta2", 0.95, below=1.0),
            eps=number(params, "eps", 1e-12, below=math.inf),
            weight_decay=number(params, "weight_decay", 0.0, below=math.inf),
            grad_clip_norm=number(params, "grad_clip_norm", 0.0, below=math.inf),
        )


def _learning_rate(params: Body) -> float:
    """Return the learning rate. Runs have the same limit, but a client may use 0."""
    rate = number(params, "learning_rate", 1e-4, below=math.inf)
    if rate > MAX_LEARNING_RATE:
        raise ApiError(
            "learning_rate",
            rate,
            rule=f"must be at most {MAX_LEARNING_RATE:g}, since AdamW moves each weight by about "
            "that much",
            fix="Use a rate such as 1e-4.",
        )
    return rate


@contextlib.contextmanager
def _inside(prefix: str) -> Iterator[None]:
    """Add a prefix to the fields of errors in the block."""
    try:
        yield
    except ApiError as error:
        raise error.within(prefix) from None


@dataclass(frozen=True, kw_only=True)
class LoraRequest:
    """Adapters that a new model gets. `rank` 0: all weights are trained."""

    rank: int = 0
    seed: int | None = None
    attention: bool = True
    mlp: bool = True
    unembedding: bool = True


def lora(body: Body) -> LoraRequest:
    """Return the adapters in a create_model request."""
    if (optimizer := body.get("optimizer_config")) is not None:
        kind = optimizer.get("type") if isinstance(optimizer, dict) else optimizer
        if kind != "adamw":
            raise ApiError(
                "optimizer_config",
                kind,
                rule="this server only trains with AdamW",
                fix="Use adamw.",
            )
    config = body.get("lora_config")
    if config is None:
        return LoraRequest()
    if not isinstance(config, dict):
        raise ApiError(
            "lora_config", config, rule="must be an object", fix="Give an object with rank."
        )
    with _inside("lora_config."):
        found = LoraRequest(
            rank=whole_number(config, "rank", low=1, high=MAX_RANK),
            seed=None
            if config.get("seed") is None
            else whole_number(config, "seed", high=MAX_SEED),
            attention=flag(config, "train_attn", True),
            mlp=flag(config, "train_mlp", True),
            unembedding=flag(config, "train_unembed", True),
        )
    if not (found.attention or found.mlp):
        raise ApiError(
            "lora_config",
            config,
            rule="it trains the unembedding alone, which gets no adapters on this server",
            fix="Set train_attn or train_mlp.",
        )
    return found


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """A checked sample request.

    Attributes:
        prompt: Token ids.
        num_samples: Completions.
        sampling: Sampling parameters.
        seed: Seed; None: any.
        prompt_logprobs: Whether log-probabilities of the prompt's tokens are returned.
        last_n: Number of the last prompt tokens that are scored.
        prompt_top_k: Most likely tokens to return per prompt token.
        sample_top_k: Most likely tokens to return per sampled token.
        record: Whether the server records the sequences for stable_reinforce.
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
    """Return a checked sample request."""
    for name, what in _NOT_OFFERED.items():
        if body.get(name):
            raise ApiError(
                name, rule=f"it requests {what}, which is not offered", fix="Leave it out."
            )
    prompt = _prompt(body.get("prompt"), limits)
    params = body.get("sampling_params")
    if not isinstance(params, dict):
        raise ApiError("sampling_params", params, rule="must be an object", fix="Send an object.")
    prompt_logprobs = flag(body, "prompt_logprobs")
    max_top_k = min(MAX_TOP_K, limits.vocab_size)
    top_k = whole_number(body, "topk_prompt_logprobs", 0, high=max_top_k)
    with _inside("sampling_params."):
        sampling = _sampling(params, limits, limits.max_context - len(prompt))
        seed = None if params.get("seed") is None else whole_number(params, "seed", high=MAX_SEED)
    return SampleRequest(
        prompt=prompt,
        num_samples=whole_number(body, "num_samples", 1, low=1, high=MAX_SAMPLES),
        sampling=sampling,
        seed=seed,
        prompt_logprobs=prompt_logprobs,
        last_n=_last_n(body, len(prompt), prompt_logprobs=prompt_logprobs, top_k=top_k),
        prompt_top_k=top_k,
        sample_top_k=whole_number(body, "topk_sample_logprobs", 0, high=max_top_k),
        record=flag(body, "record_stability_info"),
    )


def _last_n(body: Body, size: int, *, prompt_logprobs: bool, top_k: int) -> int:
    """Return how many of the last prompt tokens are scored. The first token never is.

    The client's documentation says that prompt_logprobs_last_n requires prompt_logprobs and is
    between 1 and the prompt's length - 1.
    """
    if body.get("prompt_logprobs_last_n") is None:
        return size - 1 if prompt_logprobs or top_k else 0
    value = body["prompt_logprobs_last_n"]
    if not prompt_logprobs:
        raise ApiError(
            "prompt_logprobs_last_n",
            value,
            rule="requires prompt_logprobs=true",
            fix="Set it, or leave this field out.",
        )
    if size < 2:
        raise ApiError(
            "prompt_logprobs_last_n",
            value,
            rule="a prompt of one token has no scored token",
            fix="Leave it out.",
        )
    return whole_number(body, "prompt_logprobs_last_n", low=1, high=size - 1)


def _prompt(prompt: Any, limits: ModelLimits) -> Int32Array:
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list):
        raise ApiError("prompt", rule="it has no list of chunks", fix="Send a ModelInput.")
    tokens: list[int] = []
    for chunk in chunks:
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            kind = chunk.get("type") if isinstance(chunk, dict) else chunk
            raise ApiError(
                "prompt.chunks",
                kind,
                rule="this server's models only read tokens",
                fix="Send chunks of type encoded_text.",
            )
        tokens += _tokens(chunk.get("tokens"), limits.vocab_size)
    if not 1 <= len(tokens) < limits.max_context:
        raise ApiError(
            "prompt",
            rule=f"it has {len(tokens)} tokens, and must have at least 1 and fewer than "
            f"{limits.max_context}, the model's context",
            fix="Change its length.",
        )
    return np.array(tokens, np.int32)


def _tokens(tokens: Any, vocab_size: int, *, name: str = "prompt.tokens") -> Sequence[int]:
    if not isinstance(tokens, list):
        raise ApiError(
            name,
            rule=f"they are {type(tokens).__name__}, not a list",
            fix="Send a list of whole numbers.",
        )
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ApiError(
                name,
                token,
                rule=f"must be from 0 to {vocab_size - 1}, the model's vocabulary",
                fix="Use the tokenizer of this model.",
            )
    return tokens


def _sampling(params: Body, limits: ModelLimits, room: int) -> SamplingParams:
    temperature = number(params, "temperature", 1.0, below=math.inf)
    top_k = whole_number(params, "top_k", -1, low=-1, high=2**31 - 1)
    stop = params.get("stop")
    stops, stop_tokens = _stops(stop, limits.vocab_size)
    top_p = number(params, "top_p", 1.0, below=math.inf)
    if not 0 < top_p <= 1:
        raise ApiError(
            "top_p", top_p, rule="must be above 0 and at most 1", fix="Use 1, for example."
        )
    found = SamplingParams(
        temperature=temperature or 1.0,
        top_p=top_p,
        top_k=max(top_k, 0),
        max_tokens=min(whole_number(params, "max_tokens", room, low=1, high=2**31 - 1), room),
        stop=stops,
        stop_token_ids=stop_tokens,
        stop_at_eos=stop != [],
    )
    return found if temperature else found.greedy


def _stops(stop: Any, vocab_size: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the stop strings and the stop tokens.

    Both are empty for None and for []. The latter disables the end of sequence too.
    """
    if stop is None:
        return (), ()
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list):
        raise ApiError(
            "stop",
            stop,
            rule="must be a text, or a list of texts or of tokens",
            fix="Send one of them.",
        )
    if all(isinstance(one, str) and one for one in stop):
        return tuple(whole_characters("stop", one) for one in stop), ()
    if all(type(one) is int for one in stop):
        return (), tuple(_tokens(stop, vocab_size, name="stop"))
    raise ApiError(
        "stop",
        stop,
        rule="must have only texts that are not empty, or only tokens",
        fix="Send one kind.",
    )
