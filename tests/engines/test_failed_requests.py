"""A request without finite probabilities fails alone: others in its batch are as without it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.config import RolloutConfig
from rlsys.engines.generation.constraint import Grammars
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.types import FinishReason, Generation, GenerationRequest
from tests.engines.structures import CHOICE, structure
from tests.engines.test_adapter_bank import add, of, write_adapter
from tests.engines.test_speculation import always
from tests.engines.torch_engine_harness import batch_of, build_model, prompt, request, run

GOOD, DIVERGED = 1, 2
REPEATS = (5, 9, 11, 5, 9, 11, 5, 9, 11, 5, 9)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def adapters(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    write_adapter(model_path, directory / str(GOOD), seed=1, rank=4)
    write_adapter(model_path, directory / str(DIVERGED), seed=2, rank=4, scale=1e15)
    return directory


def same(found: Mapping[str, Generation], expected: Mapping[str, Generation]) -> None:
    for name, one in expected.items():
        assert one.finish_reason is not FinishReason.FAILED
        assert found[name].finish_reason is one.finish_reason
        assert np.array_equal(found[name].token_ids, one.token_ids)
        assert np.array_equal(found[name].sampler_logprobs, one.sampler_logprobs)


def adapted_batch(model_path: Path, adapters: Path, **options: Any) -> Any:
    batch = batch_of(load_causal_lm(model_path, dtype="float32"), **options)
    for number in (GOOD, DIVERGED):
        add(batch, number, adapters / str(number))
    return batch


@pytest.mark.parametrize("drafts", [False, True])
def test_a_diverged_adapter_fails_alone(model_path: Path, adapters: Path, drafts: bool) -> None:
    asked = [REPEATS, prompt(9, seed=1), REPEATS]
    good = [
        of(number, f"good {place}", tokens, max_tokens=30, temperature=0.4, seed=place)
        for place, (number, tokens) in enumerate(zip((GOOD, 0, GOOD), asked, strict=True))
    ]
    settings: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.5, "temperature": 1e-9}]
    bad = [
        of(DIVERGED, f"bad {place}", tokens, max_tokens=30, **options)
        for place, (tokens, options) in enumerate(zip(asked, settings, strict=True))
    ]

    def batch() -> Any:
        policy = always() if drafts else None
        return adapted_batch(model_path, adapters, draft_policy=policy)

    expected = run(batch(), good)
    one = batch()
    for _ in range(2):  # also in places that failed requests have left
        found = run(one, [bad[0], good[0], bad[1], good[1], good[2], bad[2]])
        same(found, expected)
        for each in bad:
            failed = found[each.request_id]
            assert (failed.finish_reason, len(failed.token_ids)) == (FinishReason.FAILED, 0)
            with pytest.raises(FloatingPointError) as raised:
                failed.raise_failure()
            assert f"version {DIVERGED}" in str(raised.value)


def test_a_constrained_request_fails_alone(model_path: Path, adapters: Path) -> None:
    vocabulary = load_causal_lm(model_path, dtype="float32").config.vocab_size
    batch = adapted_batch(
        model_path, adapters, grammars=Grammars(model_path, vocabulary), stop_token_ids=(1,)
    )
    sampling = {"structure": structure(CHOICE), "max_tokens": 40}
    good = of(GOOD, "good", prompt(6), **sampling)
    expected = run(batch, [good])
    found = run(batch, [of(DIVERGED, "bad", prompt(6), **sampling), good])
    same(found, expected)
    assert found["bad"].finish_reason is FinishReason.FAILED


def test_a_failure_in_the_middle_keeps_the_tokens_before_it(model_path: Path) -> None:
    """An input token whose embedding overflows follows some others."""
    model = load_causal_lm(model_path, dtype="float32")
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # not that of the embedding
    asked = prompt(7)
    whole = run(batch_of(model), [request("a", asked, max_tokens=12)])["a"].token_ids.tolist()
    culprit = next(token for token in whole[2:] if token not in (*asked, *whole[:2]))
    first = whole.index(culprit)
    other = request("b", prompt(5, seed=3), max_tokens=12, seed=1)
    before = run(batch_of(model), [other])["b"]
    assert culprit not in (*other.prompt_token_ids, *before.token_ids.tolist())
    with torch.no_grad():
        model.get_input_embeddings().weight[culprit] = torch.inf
    batch = batch_of(model)
    for _ in range(2):
        found = run(batch, [request("a", asked, max_tokens=12), other])
        assert found["a"].finish_reason is FinishReason.FAILED
        assert found["a"].token_ids.tolist() == whole[: first + 1]
        assert np.isfinite(found["a"].sampler_logprobs).all()
        same(found, {"b": before})


def test_the_engine_goes_on(model_path: Path, adapters: Path) -> None:
    async def main() -> None:
        engine = TorchEngine(model_path, RolloutConfig(kv_cache_gib=0.01), dtype="float32")
        await engine.start()
        for number in (GOOD, DIVERGED):
            await engine.add_adapter(number, adapters / str(number))

        async def ended(*requests: GenerationRequest) -> dict[str, FinishReason]:
            engine.submit(requests)
            found: dict[str, FinishReason] = {}
            while len(found) < len(requests):
                found |= {one.request_id: one.finish_reason for one in await engine.collect()}
            return found

        good, bad = (of(number, "x", prompt(5), max_tokens=4) for number in (GOOD, DIVERGED))
        for _ in range(2):
            found = await ended(replace(good, request_id="good"), replace(bad, request_id="bad"))
            assert found == {"good": FinishReason.LENGTH, "bad": FinishReason.FAILED}
        await engine.close()

    asyncio.run(main())
