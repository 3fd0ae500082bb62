from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlsys
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
from rlsys.errors import InvalidValue
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
    """An engine that samples 5 each time, one version per call.

    It ends with a 0 after `ends_after` tokens of the completion. Its token `closes_at`, if any, is
    a 9. Like a real engine, it refuses requests that leave no token to sample.
    """

    def __init__(
        self, ends_after: int = 1000, *, context: int = 1000, closes_at: int | None = None
    ) -> None:
        self.requests: list[GenerationRequest] = []
        self.ends_after = ends_after
        self.context = context
        self.closes_at = closes_at
        self.version = 3

    async def start(self) -> None: ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for one in requests:
            num_tokens = len(one.prompt_token_ids)
            if not (0 < num_tokens < self.context and one.sampling.max_tokens >= 1):
                raise InvalidValue("prompt_token_ids", num_tokens, rule="no room", fix="")
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
        left = max(1, self.ends_after - request.num_prior_tokens)
        limit = min(request.sampling.max_tokens, self.context - len(request.prompt_token_ids))
        stops = left <= limit
        num = min(left, limit)
        token_ids = np.full(num, 5, np.int32)
        if self.closes_at is not None and 0 <= self.closes_at - request.num_prior_tokens < num:
            token_ids[self.closes_at - request.num_prior_tokens] = CLOSED
        if stops:
            token_ids[-1] = END
        return Generation(
            request_id=request.request_id,
            token_ids=token_ids,
            sampler_logprobs=np.full(num, -1.0, np.float32),
            policy_versions=np.full(num, self.version, np.int32),
            finish_reason=FinishReason.STOP if stops else FinishReason.LENGTH,
        )


def request(
    max_tokens: int = 10, prior: Sequence[int] = (), *, num_prompt_tokens: int = 2
) -> GenerationRequest:
    whole = GenerationRequest(
        request_id="0.0.0",
        prompt_token_ids=[1] * num_prompt_tokens,
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
    engine = InterruptingEngine(script, interruption_after(after))
    engine.submit([asked])
    (generation,) = asyncio.run(engine.collect())
    return generation


def interruption_after(num_tokens: int, phrase: Sequence[int] = PHRASE) -> Interruption:
    return Interruption(
        after=num_tokens, phrase=tuple(phrase), closed_by=str(CLOSED), decode=letters
    )


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
    found = answered(Script(), request(max_tokens=7, prior=[5, CLOSED]))
    assert found.token_ids.tolist() == [5, 5, 5, 5, 5]  # plus the prior two: seven in all
    assert found.policy_versions.tolist() == [3, 3, 4, 4, 4]


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        (3, [5] * 3),
        (4, [5] * 4),  # after
        (5, [5] * 5),
        (6, [5] * 6),  # after + phrase
        (7, [5] * 4 + [*PHRASE, 5]),
        (8, [5] * 4 + [*PHRASE, 5, 5]),
    ],
)
@pytest.mark.parametrize("limit", ["max_tokens", "context"])
def test_a_request_without_room_for_an_answer_is_sampled_to_its_end(
    limit: str, max_tokens: int, expected: list[int]
) -> None:
    """Interrupt after 4 tokens with a phrase of 2; the prompt has 2 tokens."""
    if limit == "max_tokens":
        found = answered(Script(), request(max_tokens))
    else:
        found = answered(Script(context=2 + max_tokens), request(50))
    assert found.token_ids.tolist() == expected
    assert found.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("num_prior", [1, 4, 5])
def test_a_request_without_room_continues_on_another_replica_without_the_phrase(
    num_prior: int,
) -> None:
    prior = [5] * num_prior
    assert answered(Script(), request(6, prior)).token_ids.tolist() == [5] * (6 - num_prior)
    found = answered(Script(context=8), request(50, prior))
    assert found.token_ids.tolist() == [5] * (6 - num_prior)


@given(data=st.data())
def test_no_request_fails_or_exceeds_its_limits(data: st.DataObject) -> None:
    """Whatever has been sampled before by other replicas, the completion is the same."""
    size = st.integers(1, 12)
    after, num_prompt, max_tokens = data.draw(size), data.draw(size), data.draw(st.integers(1, 30))
    phrase = [7] * data.draw(size)
    context = num_prompt + data.draw(st.integers(1, 30))
    ends_after, closes_at = data.draw(st.integers(1, 40)), data.draw(st.none() | st.integers(0, 20))

    def sampled(prior: Sequence[int]) -> Generation:
        script = Script(ends_after, context=context, closes_at=closes_at)
        engine = InterruptingEngine(script, interruption_after(after, phrase))
        engine.submit([request(max_tokens, prior, num_prompt_tokens=num_prompt)])
        (found,) = asyncio.run(engine.collect())
        return found

    found = sampled([])
    tokens, limit = found.token_ids.tolist(), min(max_tokens, context - num_prompt)
    is_closed = closes_at is not None and closes_at < after
    if after + len(phrase) < limit and after < ends_after and not is_closed:
        assert tokens[after : after + len(phrase)] == phrase
        assert np.flatnonzero(found.policy_versions == INJECTED).tolist() == list(
            range(after, after + len(phrase))
        )
        ends_after = max(ends_after, after + len(phrase) + 1)
    else:
        assert INJECTED not in found.policy_versions
    is_stopped = found.finish_reason is FinishReason.STOP
    assert len(tokens) == min(ends_after, limit)
    assert is_stopped == (ends_after <= limit)
    for num_prior in range(1, len(tokens)):
        if after < num_prior < after + len(phrase) and INJECTED in found.policy_versions:
            continue  # engines report the phrase as a whole
        assert tokens[:num_prior] + sampled(tokens[:num_prior]).token_ids.tolist() == tokens


def test_a_request_that_is_aborted_at_the_budget_does_not_continue() -> None:
    """The engine has ended the first part, and nothing has collected it yet."""

    async def work() -> list[Generation]:
        engine = InterruptingEngine(Script(), interruption_after(4))
        engine.submit([request(10), replace(request(10), request_id="other")])
        await engine.abort(["0.0.0", "unknown"])
        return [*await engine.collect(), *await engine.collect()]

    aborted, other = asyncio.run(work())
    assert aborted.finish_reason is FinishReason.ABORTED
    assert aborted.token_ids.tolist() == [5] * 4
    assert other.token_ids.tolist() == [5] * 4 + [*PHRASE, 5, 5, 5, 5]


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
        engine = InterruptingEngine(script, interruption_after(2))
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


@pytest.mark.parametrize("speculation", [{}, {"method": "ngram", "num_tokens": 2}])
def test_the_torch_engine_samples_every_length_at_the_end_of_its_context(
    tiny: Path, speculation: dict[str, Any]
) -> None:
    """The context is 64 tokens. Interrupt after 5 tokens with a phrase of 3."""
    sampling = SamplingConfig(max_tokens=40, interrupt_after=5, interruption="===")
    rollout = RolloutConfig(kv_cache_gib=0.01, speculation=speculation)
    # Prompt, max_tokens, tokens of the completion.
    cases = [
        *((4, most, most) for most in (1, 4, 5, 6, 8, 9, 40)),
        *((prompt, 40, 64 - prompt) for prompt in (54, 55, 56, 58, 59, 60, 63)),
    ]

    async def work() -> dict[str, Generation]:
        model = ModelConfig(path=str(tiny))
        engine = build_engine(model, rollout, sampling, max_context=64)
        await engine.start()
        requests = [
            GenerationRequest(
                request_id=f"{case}.{index}",
                prompt_token_ids=[5] * cases[case][0],
                sampling=replace(sampling.params(), max_tokens=cases[case][1], top_k=3),
                seed=index,
            )
            for case in range(len(cases))
            for index in range(4)  # samples of one prompt
        ]
        engine.submit(requests)
        ended: dict[str, Generation] = {}
        while len(ended) < len(requests):
            ended |= {one.request_id: one for one in await engine.collect()}
        await engine.close()
        return ended

    num_interrupted = 0
    for name, found in asyncio.run(work()).items():
        _, _, most = cases[int(name.split(".")[0])]
        is_cut = found.finish_reason is FinishReason.LENGTH
        assert len(found.token_ids) == most if is_cut else len(found.token_ids) <= most
        has_phrase = INJECTED in found.policy_versions
        assert has_phrase == (most >= 9 and len(found.token_ids) > 5)
        num_interrupted += has_phrase
    assert num_interrupted


TURNS = (6, 7, 11, 12, 20)  # max_tokens


@rlsys.environment(plain_text=True)
async def talks(chat: Any, task: Any) -> float:
    for max_tokens in TURNS:
        await chat("1", max_tokens=max_tokens)
    while not chat.done:  # until sampling.max_tokens leaves none
        await chat("1")
    return 1.0


def test_turns_of_an_episode_are_interrupted_if_the_phrase_and_an_answer_fit(tiny: Path) -> None:
    """Interrupt after 6 tokens with a phrase of 5: a turn needs 12."""
    sampling = SamplingConfig(max_tokens=56, interrupt_after=6, interruption="+++++")
    episodes = rlsys.play(
        tiny,
        talks,
        [{"number": number} for number in range(16)],
        sampling=sampling,
        rollout=RolloutConfig(kv_cache_gib=0.01),
        max_prompt_tokens=8,
    )
    assert max(len(one.trajectory.token_ids) for one in episodes) == 56
    num_interrupted, full = 0, set()
    for one in episodes:
        replies = [line["text"] for line in one.transcript if line["role"] == "assistant"]
        for reply, max_tokens in zip(replies, TURNS, strict=False):
            num_tokens = len(re.findall("<[a-z]+>|.", reply))
            assert num_tokens <= max_tokens
            assert ("+++++" in reply) == (num_tokens > 6 and max_tokens >= 12)
            num_interrupted += "+++++" in reply
            if num_tokens == max_tokens:
                full.add(max_tokens)
    assert num_interrupted
    assert full >= {6, 7, 11, 12}


def test_a_budget_without_tokens_for_an_answer_is_rejected(tiny: Path) -> None:
    tokenizer = load_tokenizer(str(tiny))
    sampling = SamplingConfig(max_tokens=8, interrupt_after=5, interruption="===")
    with invalid("sampling.interrupt_after", 5):
        interruption_of(sampling, tokenizer)
    with invalid("sampling.interrupt_after", 8):
        SamplingConfig(max_tokens=8, interrupt_after=8)
    with invalid("sampling.interruption", " "):
        SamplingConfig(interruption=" ")
