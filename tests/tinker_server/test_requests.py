"""JSON bodies: what they mean, and what is told of those that mean nothing."""

from __future__ import annotations

from typing import Any

import pytest

from rlsys.tinker_server import request_checks
from rlsys.tinker_server.api_errors import ApiError
from rlsys.tinker_server.datum_rows import ModelLimits
from rlsys.types import SamplingParams

LIMITS = ModelLimits(vocab_size=10, max_context=8)


def body(prompt: Any = None, **fields: Any) -> dict[str, Any]:
    chunks = [{"type": "encoded_text", "tokens": [1, 2, 3] if prompt is None else prompt}]
    return {"prompt": {"chunks": chunks}, "sampling_params": {}, **fields}


def sampling(**params: Any) -> SamplingParams:
    return request_checks.sample(body(sampling_params=params), LIMITS).sampling


def test_sampling_parameters_are_the_engines() -> None:
    assert sampling() == SamplingParams(max_tokens=5)  # as far as the context goes
    assert sampling(max_tokens=100).max_tokens == 5
    assert sampling(top_k=-1, top_p=0.5, temperature=0.7, max_tokens=2) == SamplingParams(
        top_p=0.5, temperature=0.7, max_tokens=2
    )
    greedy = sampling(temperature=0.0, top_p=0.9)
    assert (greedy.top_k, greedy.temperature, greedy.top_p) == (1, 1.0, 1.0)
    assert sampling(stop="a").stop == ("a",)
    assert sampling(stop=["a", "b"]).stop == ("a", "b")
    assert sampling(stop=[4, 5]).stop_token_ids == (4, 5)


def test_prompt_log_probabilities_of_all_of_some_or_none() -> None:
    def found(**fields: Any) -> tuple[bool, int, int]:
        one = request_checks.sample(body(**fields), LIMITS)
        return one.prompt_logprobs, one.last_n, one.prompt_top_k

    assert found() == (False, 0, 0)
    assert found(prompt_logprobs=True) == (True, 2, 0)
    assert found(prompt_logprobs=True, prompt_logprobs_last_n=1) == (True, 1, 0)
    assert found(topk_prompt_logprobs=3) == (False, 2, 3)
    # A prompt of one token has no scored token.
    assert found(prompt=[1], prompt_logprobs=True) == (True, 0, 0)


@pytest.mark.parametrize(
    "sent",
    [
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 0},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 3},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 1, "prompt": [1]},
        {"prompt_logprobs_last_n": 1},
        {"prompt_logprobs_last_n": 1, "topk_prompt_logprobs": 2},
    ],
)
def test_the_last_n_requires_prompt_logprobs_and_is_within_the_prompt(sent: dict[str, Any]) -> None:
    """The client's documentation of prompt_logprobs_last_n, whose own check is the same."""
    with pytest.raises(ApiError) as refused:
        request_checks.sample(body(**sent), LIMITS)
    assert "prompt_logprobs_last_n" in str(refused.value)


def test_a_time_to_live_is_an_hour_to_ten_years() -> None:
    assert request_checks.ttl_s({}) is None
    assert request_checks.ttl_s({"ttl_seconds": 3600}) == 3600
    for wrong in (3599, 10**10, "1h", True):
        with pytest.raises(ApiError) as refused:
            request_checks.ttl_s({"ttl_seconds": wrong})
        assert "ttl_seconds" in str(refused.value)


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (body(prompt=[]), "prompt has 0 tokens"),
        (body(prompt=[1] * 8), "prompt has 8 tokens; give at least 1 and fewer than"),
        (body(prompt=[10]), "tokens of the prompt hold 10; the vocabulary has 0 to 9"),
        (body(prompt=[True]), "hold True"),
        (body(prompt="text"), "are str"),
        (body(num_samples=0), "num_samples=0; give a whole number from 1"),
        (body(sampling_params={"top_p": 0}), "top_p=0"),
        (body(sampling_params={"temperature": -1}), "temperature=-1"),
        (body(sampling_params={"max_tokens": 0}), "max_tokens=0"),
        (body(sampling_params={"stop": []}), "stop=.. asks to go on behind the end"),
        (body(sampling_params={"stop": ["a", 1]}), "texts that are not empty alone"),
        (body(sampling_params={"seed": "x"}), "seed='x'"),
        (body(target_prompt_logprobs={"data": [1]}), "target_prompt_logprobs asks for"),
        (body(prompt_alt_tokens_k=2), "prompt_alt_tokens_k asks for"),
        ({"prompt": {"chunks": [{"type": "image"}]}, "sampling_params": {}}, "type 'image'"),
        ({"prompt": {}, "sampling_params": {}}, "no list of chunks"),
    ],
)
def test_a_sample_that_cannot_be_is_refused(sent: dict[str, Any], told: str) -> None:
    with pytest.raises(ApiError, match=told):
        request_checks.sample(sent, LIMITS)


def test_only_adamw_is_offered() -> None:
    params = request_checks.adam({"adam_params": {"learning_rate": 0.5, "eps": 0.0}})
    assert (params.learning_rate, params.eps, params.beta2) == (0.5, 0.0, 0.95)
    with pytest.raises(ApiError, match="optimizer_params='dimuon'"):
        request_checks.adam({"optimizer_params": {"type": "dimuon"}})
    for name in ("learning_rate", "beta1", "eps", "weight_decay", "grad_clip_norm"):
        with pytest.raises(ApiError, match=f"{name}=None"):  # as clients write NaN
            request_checks.adam({"adam_params": {name: None}})
    with pytest.raises(ApiError, match="learning_rate=-1"):
        request_checks.adam({"adam_params": {"learning_rate": -1}})
    with pytest.raises(ApiError, match="beta1=1"):
        request_checks.adam({"adam_params": {"beta1": 1}})
    with pytest.raises(ApiError, match="optimizer_config='dimuon'"):
        request_checks.lora({"optimizer_config": {"type": "dimuon"}})


def test_adapters_are_asked_for_by_rank() -> None:
    assert request_checks.lora({"lora_config": {"rank": 8, "train_mlp": False}}).rank == 8
    assert request_checks.lora({}).rank == 0
    with pytest.raises(ApiError, match="rank=0"):
        request_checks.lora({"lora_config": {"rank": 0}})
    with pytest.raises(ApiError, match="unembedding alone"):
        request_checks.lora({"lora_config": {"rank": 1, "train_mlp": False, "train_attn": False}})


def test_a_body_is_an_object() -> None:
    assert request_checks.parse_json(b"") == {}
    for wrong in (b"[]", b"{", b"\xff"):
        with pytest.raises(ApiError) as refused:
            request_checks.parse_json(wrong)
        assert refused.value.status == 400


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="the body is no JSON") as raised:
        request_checks.parse_json(body)
    assert raised.value.status == 400
