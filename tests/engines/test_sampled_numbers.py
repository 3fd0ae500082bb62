"""Completions with a log-probability that is not finite fail, with the tokens before it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rlsys.engines.generation.torch.slots import Slots
from rlsys.engines.generation.vllm.vllm_requests import generation
from rlsys.types import FinishReason, Generation, GenerationRequest, SamplingParams

BAD = [np.nan, np.inf, -np.inf]


def assert_failed(found: Generation, bad: float) -> None:
    assert found.finish_reason is FinishReason.FAILED
    assert found.token_ids.tolist() == [7]
    assert found.sampler_logprobs.tolist() == [-1.0]
    assert found.policy_versions.tolist() == [3]
    with pytest.raises(FloatingPointError) as raised:
        found.raise_failure()
    assert "token 1 of a completion" in str(raised.value)
    assert f"(log-probability {bad}) with version 4" in str(raised.value)


@pytest.mark.parametrize("bad", BAD)
def test_a_slot_fails_alone(bad: float) -> None:
    slots = Slots(context=100, stop_token_ids=(8,), decode_text=lambda ids: "")
    sampling = SamplingParams(max_tokens=9)
    for name in "ab":
        slots.add(
            GenerationRequest(request_id=name, prompt_token_ids=[1], sampling=sampling, seed=0)
        )
    both = np.array([0, 1])
    slots.record(both, np.array([7, 7]), np.array([-1.0, -2.0], np.float32), version=3)
    assert not slots.ended(both)
    assert slots.progress()[0].sampler_logprobs.tolist() == [-1.0]
    slots.record(both, np.array([8, 6]), np.array([bad, -3.0], np.float32), version=4)
    reasons = slots.ended(both)
    assert reasons == {0: FinishReason.FAILED}  # although its token is a stop token
    (failed,), _ = slots.remove(reasons)
    assert_failed(failed, bad)
    (other,) = slots.progress()
    other.raise_failure()
    assert other.sampler_logprobs.tolist() == [-2.0, -3.0]


@pytest.mark.parametrize("bad", BAD)
def test_a_completion_of_vllm_fails(bad: float) -> None:
    completion = SimpleNamespace(
        token_ids=[7, 8, 9],
        logprobs=SimpleNamespace(logprobs=[-1.0, bad, -1.0]),
        weight_versions=[
            SimpleNamespace(version="3", start=0, end=1),
            SimpleNamespace(version="4", start=1, end=3),
        ],
        finish_reason="stop",
    )
    assert_failed(generation("a", completion).until_failure(), bad)
