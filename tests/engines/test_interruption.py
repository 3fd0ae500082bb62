from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.store.row_transfer import read_rows
from rlsys.config import ModelConfig, RolloutConfig, SamplingConfig
from rlsys.controller.worker_protocols import StepRowsRef
from rlsys.data.prompts import load_tokenizer
from rlsys.engines.generation.continuation import continued
from rlsys.engines.generation.engine_choice import build_engine
from rlsys.engines.generation.generation_protocol import EngineStats
from rlsys.engines.generation.interruption import (
    InterruptingEngine,
    Interruption,
    interruption_of,
)
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.types import (
    INJECTED,
    FinishReason,
    Generation,
    GenerationRequest,
    Sampled,
    SamplingParams,
    WeightManifest,
)
from tests.errors import invalid

PHRASE, END, CLOSED = (7, 8), 0, 9


def letters(token_ids: Sequence[int]) -> str:
    """Return a text of one character per token; 9 closes the thinking."""
    return "".join(map(str, token_ids))


class Script:
    """An engine that counts upward from the prompt's last token, one version per call.

    It ends with a 0 after `ends_after` tokens of the completion.
    """

    def __init__(self, ends_after: int = 100) -> None:
        self.requests: list[GenerationRequest] = []
        self.ends_after = ends_after
        self.version = 3

    async def start(self) -> None: ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.requests += requests

    async def collect(self) -> list[Generation]:
        assert self.requests, "nothing would ever end"
        ended = [self.answer(request) for request in self.requests]
        self.requests.clear()
        self.version += 1
        return ended

    async def progress(self) -> list[Generation]:
        return [replace(self.answer(r), finish_reason=FinishReason.ABORTED) for r in self.requests]

    async def abort(self, request_ids: Collection[str]) -> None: ...

    async def pause(self) -> None: ...

    async def prepare(self, manifest: WeightManifest) -> None: ...

    async def load(self) -> None: ...

    async def resume(self) -> None: ...

    async def release(self) -> None: ...

    def stats(self) -> EngineStats:
        raise NotImplementedError

    async def close(self) -> None: ...

    def answer(self, request: GenerationRequest) -> Generation:
        left = self.ends_after - request.num_prior_tokens
        stops = left <= request.sampling.max_tokens
        num = min(left, request.sampling.max_tokens)
        token_ids = np.full(num, 5, np.int32)
        if stops:
            token_ids[-1] = END
        return Generation(
            request_id=request.request_id,
            token_ids=token_ids,
            sampler_logprobs=np.full(num, -1.0, np.float32),
            policy_versions=np.full(num, self.version, np.int32),
            finish_reason=FinishReason.STOP if stops else FinishReason.LENGTH,
        )


def request(max_tokens: int = 10, prior: Sequence[int] = ()) -> GenerationRequest:
    whole = GenerationRequest(
        request_id="0.0.0",
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=0,
    )
    if not prior:
        return whole
    earlier = Generation(
        request_id="",
        token_ids=np.array(prior, np.int32),
        sampler_logprobs=np.zeros(len(prior), np.float32),
        policy_versions=np.zeros(len(prior), np.int32),
        finish_reason=FinishReason.ABORTED,
    )
    return continued(whole, earlier)


def answered(script: Script, asked: GenerationRequest, *, after: int = 4) -> Generation:
    interruption = Interruption(after=after, phrase=PHRASE, closed_by=str(CLOSED), decode=letters)
    engine = InterruptingEngine(script, interruption)
    engine.submit([asked])
    (generation,) = asyncio.run(engine.collect())
    return generation


def test_thinking_is_interrupted_and_an_answer_follows() -> None:
    found = answered(Script(), request(max_tokens=10))
    assert found.token_ids.tolist() == [5, 5, 5, 5, *PHRASE, 5, 5, 5, 5]
    assert found.policy_versions.tolist() == [3, 3, 3, 3, INJECTED, INJECTED, 4, 4, 4, 4]
    assert found.sampler_logprobs.tolist() == [-1.0] * 4 + [0.0] * 2 + [-1.0] * 4
    assert found.finish_reason is FinishReason.LENGTH
    assert Sampled.of(found.policy_versions) == Sampled(oldest=3, newest=4, num_injected=2)


def test_completions_within_the_budget_are_unchanged() -> None:
    found = answered(Script(ends_after=4), request())
    assert found.token_ids.tolist() == [5, 5, 5, END]
    assert found.finish_reason is FinishReason.STOP


def test_closed_thinking_continues_without_an_interruption() -> None:
    found = answered(Script(), request(max_tokens=6, prior=[5, CLOSED]))
    assert found.token_ids.tolist() == [5, 5, 5, 5]  # plus the prior two: six in all
    assert INJECTED not in found.policy_versions


@pytest.mark.parametrize(
    ("prior", "rest"),
    [
        ([5], [5, 5, 5, *PHRASE, 5, 5, 5, 5]),
        ([5, 5, 5, 5], [*PHRASE, 5, 5, 5, 5]),  # its replica died at this point
        ([5, 5, 5, 5, *PHRASE, 5], [5, 5, 5]),
    ],
)
def test_another_replica_continues_after_any_number_of_tokens(
    prior: list[int], rest: list[int]
) -> None:
    found = answered(Script(), request(max_tokens=10, prior=prior))
    assert found.token_ids.tolist() == rest


def test_progress_includes_the_phrase() -> None:
    async def work() -> list[Generation]:
        script = Script()
        interruption = Interruption(after=2, phrase=PHRASE, closed_by=str(CLOSED), decode=letters)
        engine = InterruptingEngine(script, interruption)
        engine.submit([request(max_tokens=8)])
        thinking = asyncio.create_task(engine.collect())
        while not (script.requests and script.requests[0].num_prior_tokens):
            await asyncio.sleep(0)
            if thinking.done():  # its second part has been sampled too
                break
        return thinking.result() if thinking.done() else await engine.progress()

    (merged,) = asyncio.run(work())
    assert merged.token_ids.tolist()[:4] == [5, 5, *PHRASE]


def test_no_token_of_the_phrase_is_trained_on() -> None:
    versions = np.array([3, 3, INJECTED, INJECTED, 4], np.int32)

    class Store:
        def get_batch(self, cells: Any) -> dict[str, list[Any]]:
            return {
                "prompt_token_ids": [np.array([1, 2], np.int32)],
                "token_ids": [np.array([5, 5, 7, 8, 5], np.int32)],
                "policy_versions": [versions],
            }

    rows = StepRowsRef(cells={}, scalars={}, group_ids=[0], group_sizes=[1], group_num_tokens=[3])
    (row,) = read_rows(rows, Store())  # type: ignore[arg-type]
    assert row.loss_mask.tolist() == [True, True, False, False, True]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(
        tmp_path_factory.mktemp("interruption") / "model",
        characters="0123456789+=",
        width=16,
        num_layers=1,
        max_context=64,
    )


def test_the_torch_engine_samples_the_answer_after_the_phrase(tiny: Path) -> None:
    """Compare log-probabilities after the phrase with a forward pass over the whole text."""
    sampling = SamplingConfig(max_tokens=12, interrupt_after=5, interruption="===")
    rollout = RolloutConfig(kv_cache_gib=0.01)
    tokenizer = load_tokenizer(str(tiny))

    async def work() -> list[Generation]:
        model = ModelConfig(path=str(tiny))
        engine = build_engine(model, rollout, sampling, max_context=32)
        await engine.start()
        requests = [
            GenerationRequest(
                request_id=str(i),
                prompt_token_ids=tokenizer("1+1=")["input_ids"],
                sampling=sampling.params(),
                seed=i,
            )
            for i in range(24)
        ]
        engine.submit(requests)
        ended: list[Generation] = []
        while len(ended) < len(requests):
            ended += await engine.collect()
        await engine.close()
        return ended

    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(tiny)
    prompt = tokenizer("1+1=")["input_ids"]
    phrase = tokenizer("===", add_special_tokens=False)["input_ids"]
    interrupted = [g for g in asyncio.run(work()) if INJECTED in g.policy_versions]
    assert interrupted
    for found in interrupted:
        assert found.token_ids[5:8].tolist() == phrase
        assert (found.policy_versions == INJECTED).tolist() == [
            5 <= place < 8 for place in range(len(found.token_ids))
        ]
        ids = torch.tensor([[*prompt, *found.token_ids.tolist()]])
        with torch.no_grad():
            logprobs = network(ids).logits.float().log_softmax(-1)[0, len(prompt) - 1 : -1]
        expected = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        sampled = found.policy_versions != INJECTED
        assert np.allclose(found.sampler_logprobs[sampled], expected[sampled], atol=1e-4)


def test_a_budget_without_tokens_for_an_answer_is_rejected(tiny: Path) -> None:
    tokenizer = load_tokenizer(str(tiny))
    sampling = SamplingConfig(max_tokens=8, interrupt_after=5, interruption="===")
    with invalid("sampling.interrupt_after", 5):
        interruption_of(sampling, tokenizer)
    with invalid("sampling.interrupt_after", 8):
        SamplingConfig(max_tokens=8, interrupt_after=8)
    with invalid("sampling.interruption", " "):
        SamplingConfig(interruption=" ")
