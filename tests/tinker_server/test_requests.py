"""Checks of JSON bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlsys.tinker_server import request_checks
from rlsys.tinker_server.datum_rows import ModelLimits
from rlsys.types import SamplingParams
from tests.tinker_server.refusals import refused

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
    assert all(sampling(stop=stop).stop_at_eos for stop in (None, "a", ["a"], [4]))
    assert sampling(stop=[]) == SamplingParams(max_tokens=5, stop_at_eos=False)


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
    with refused("prompt_logprobs_last_n"):
        request_checks.sample(body(**sent), LIMITS)


def test_a_time_to_live_is_an_hour_to_ten_years() -> None:
    assert request_checks.ttl_s({}) is None
    assert request_checks.ttl_s({"ttl_seconds": 3600}) == 3600
    for wrong in (3599, 10**10, "1h", True):
        with refused("ttl_seconds", wrong):
            request_checks.ttl_s({"ttl_seconds": wrong})


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        (body(prompt=[]), "prompt"),
        (body(prompt=[1] * 8), "prompt"),
        (body(prompt=[10]), "prompt.tokens"),
        (body(prompt=[True]), "prompt.tokens"),
        (body(prompt="text"), "prompt.tokens"),
        (body(num_samples=0), "num_samples"),
        (body(sampling_params={"top_p": 0}), "sampling_params.top_p"),
        (body(sampling_params={"temperature": -1}), "sampling_params.temperature"),
        (body(sampling_params={"max_tokens": 0}), "sampling_params.max_tokens"),
        (body(sampling_params={"stop": ""}), "sampling_params.stop"),
        (body(sampling_params={"stop": {}}), "sampling_params.stop"),
        (body(sampling_params={"stop": [True]}), "sampling_params.stop"),
        (body(sampling_params={"stop": [-1]}), "sampling_params.stop"),
        (body(sampling_params={"stop": [2, 10]}), "sampling_params.stop"),  # of 10 tokens
        (body(sampling_params={"stop": [2**31]}), "sampling_params.stop"),
        (body(sampling_params={"stop": ["a", 1]}), "sampling_params.stop"),
        (body(sampling_params={"seed": "x"}), "sampling_params.seed"),
        (body(target_prompt_logprobs={"data": [1]}), "target_prompt_logprobs"),
        (body(topk_prompt_logprobs=11), "topk_prompt_logprobs"),
        (body(topk_sample_logprobs=11), "topk_sample_logprobs"),
        (body(prompt_alt_tokens_k=2), "prompt_alt_tokens_k"),
        ({"prompt": {"chunks": [{"type": "image"}]}, "sampling_params": {}}, "prompt.chunks"),
        ({"prompt": {}, "sampling_params": {}}, "prompt"),
    ],
)
def test_a_sample_that_cannot_be_is_refused(sent: dict[str, Any], field: str) -> None:
    with refused(field):
        request_checks.sample(sent, LIMITS)


@pytest.mark.parametrize("stop", ["\\ud800", "a\\udfff", ["x", "\\ud83d"]])
def test_stop_strings_with_half_a_surrogate_pair_are_refused(stop: Any) -> None:
    """A tokenizer cannot encode them. JSON may escape them."""
    sent = json.dumps(body(sampling_params={"stop": stop})).replace("\\\\u", "\\u")
    with refused("sampling_params.stop"):
        request_checks.sample(request_checks.parse_json(sent.encode()), LIMITS)
    whole = body(sampling_params={"stop": "\U0001f600"})
    assert request_checks.sample(whole, LIMITS).sampling.stop == ("\U0001f600",)


def test_all_texts_must_have_whole_characters() -> None:
    half = "\ud800"
    with refused("path", half):
        request_checks.text({"path": half}, "path")
    with refused("keys", half):
        request_checks.texts({"keys": ["a", half]}, "keys")
    for metadata in ({half: "a"}, {"a": half}):
        with refused("user_metadata"):
            request_checks.user_metadata({"user_metadata": metadata})


def test_only_adamw_is_offered() -> None:
    params = request_checks.adam({"adam_params": {"learning_rate": 0.5, "eps": 0.0}})
    assert (params.learning_rate, params.eps, params.beta2) == (0.5, 0.0, 0.95)
    with refused("optimizer_params", "dimuon"):
        request_checks.adam({"optimizer_params": {"type": "dimuon"}})
    for name in ("learning_rate", "beta1", "eps", "weight_decay", "grad_clip_norm"):
        with refused(f"adam_params.{name}", None):  # as clients write NaN
            request_checks.adam({"adam_params": {name: None}})
    assert request_checks.adam({"adam_params": {"learning_rate": 1}}).learning_rate == 1
    with refused("adam_params.learning_rate", 1e30):  # as in runs
        request_checks.adam({"adam_params": {"learning_rate": 1e30}})
    with refused("adam_params.learning_rate", -1):
        request_checks.adam({"adam_params": {"learning_rate": -1}})
    with refused("adam_params.beta1", 1):
        request_checks.adam({"adam_params": {"beta1": 1}})
    with refused("optimizer_config", "dimuon"):
        request_checks.lora({"optimizer_config": {"type": "dimuon"}})


def test_adapters_have_a_rank() -> None:
    assert request_checks.lora({"lora_config": {"rank": 8, "train_mlp": False}}).rank == 8
    assert request_checks.lora({}).rank == 0
    with refused("lora_config.rank", 0):
        request_checks.lora({"lora_config": {"rank": 0}})
    with refused("lora_config"):
        request_checks.lora({"lora_config": {"rank": 1, "train_mlp": False, "train_attn": False}})


@pytest.mark.parametrize("wrong", [b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_body_is_an_object(wrong: bytes) -> None:
    assert request_checks.parse_json(b"") == {}
    with refused("body", status=400):
        request_checks.parse_json(wrong)
