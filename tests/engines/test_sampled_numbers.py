"""Log-probabilities of sampled tokens must be finite."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rlsys.engines.generation.torch.slots import Slots
from rlsys.engines.generation.vllm.vllm_requests import generation
from rlsys.types import GenerationRequest, SamplingParams


def assert_names_tokens(error: FloatingPointError, bad: float) -> None:
    assert "1 of 2 sampled tokens" in str(error)
    assert f"first {bad} of token 8 by version 4" in str(error)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_slots_give_none(bad: float) -> None:
    slots = Slots(context=100, stop_token_ids=(), decode_text=lambda ids: "")
    sampling = SamplingParams(max_tokens=9)
    slots.add(GenerationRequest(request_id="a", prompt_token_ids=[1], sampling=sampling, seed=0))
    slots.record(np.array([0]), np.array([7]), np.array([-1.0], np.float32), version=3)
    assert slots.progress()[0].sampler_logprobs.tolist() == [-1.0]
    slots.record(np.array([0]), np.array([8]), np.array([bad], np.float32), version=4)
    with pytest.raises(FloatingPointError) as found:
        slots.progress()
    assert_names_tokens(found.value, bad)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_vllm_gives_none(bad: float) -> None:
    completion = SimpleNamespace(
        token_ids=[7, 8],
        logprobs=SimpleNamespace(logprobs=[-1.0, bad]),
        weight_versions=[SimpleNamespace(version="4", start=0, end=2)],
        finish_reason="stop",
    )
    with pytest.raises(FloatingPointError) as found:
        generation("a", completion)
    assert_names_tokens(found.value, bad)
