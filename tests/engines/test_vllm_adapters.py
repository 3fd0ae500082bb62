"""Adapters that vLLM gets unmerged: versions, prefixes, drafts, layers that it cannot adapt."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsys.algorithms import cross_entropy
from rlsys.config import RolloutConfig
from rlsys.config.lora import Lora
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.engines.generation.shared_engine import PolicyView, views_of
from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    TrainRow,
    WeightManifest,
)
from tests.engines.distribution import p_value
from tests.engines.published import read_all
from tests.engines.training_harness import accumulate, make_engine, make_rows
from tests.engines.vllm_harness import (
    TIMEOUT_S,
    build_variant,
    collect_all,
    generate,
    hf_logprobs,
    load,
    make_requests,
    update,
)
from tests.errors import invalid

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
pytest.importorskip("peft")

LORA = "r6a18"  # vLLM allocates rank 8
REPEATED = [5, 9, 11] * 14
PROMPTS = [REPEATED, list(range(3, 50)), [17, 17, 17, 17], [7, 8] * 9]


class Policy:
    """A trainer whose adapters are published unmerged, and its merged models by version."""

    def __init__(self, path: Path, directory: Path, lora: str = LORA, name: str = "") -> None:
        self.engine: FSDPEngine = make_engine(
            path,
            lora=lora,
            sends_adapters=True,
            loss=cross_entropy(),
            temperature=1.0,
            learning_rate=3e-2,
        )
        self._directory, self._name = directory, name
        self.models = [load(path)]

    def step(self) -> WeightManifest:
        """Train a step, and publish its version."""
        accumulate(self.engine, [make_rows(6, seed=len(self.models) + 100 * len(self._name))])
        self.engine.optimizer_step()
        merged = self._directory / f"merged{self._name}-{len(self.models)}"
        self.engine.export(merged)
        self.models.append(load(merged))
        return self.publish()

    def publish(self) -> WeightManifest:
        manifest = self.engine.publish()
        assert manifest is not None
        return manifest

    def gap(self, prompts: Sequence[Sequence[int]], sampled: Sequence[Generation]) -> float:
        """Return the largest difference to the trainer's own log-probabilities."""
        rows = [
            TrainRow(
                prompt_token_ids=np.asarray(prompt, np.int32),
                token_ids=one.token_ids,
                policy_versions=one.policy_versions,
                loss_mask=np.ones(len(one.token_ids), bool),
                columns={},
                group_id=0,
                group_size=1,
                group_num_tokens=1,
            )
            for prompt, one in zip(prompts, sampled, strict=True)
        ]
        own = self.engine.infer(rows)
        return max(
            float(np.abs(one.sampler_logprobs - theirs).max())
            for one, theirs in zip(sampled, own, strict=True)
        )


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    return build_tiny_model(tmp_path / "base", num_layers=2)


@pytest.fixture
def policy(model_path: Path, tmp_path: Path) -> Iterator[Policy]:
    made = Policy(model_path, tmp_path)
    yield made
    made.engine.close()


@asynccontextmanager
async def running(
    path: Path, *, lora: str = LORA, others: Mapping[str, str] | None = None, **options: Any
) -> AsyncIterator[VLLMEngine]:
    sizes: dict[str, Any] = {"max_running": 64, "kv_cache_gib": 0.125}
    rollout = RolloutConfig(engine="vllm", vllm={"enable_lora": True}, **(sizes | options))
    engine = VLLMEngine(
        str(path),
        rollout,
        dtype="float32",
        lora=Lora.parse(lora),
        others={name: Lora.parse(one) for name, one in (others or {}).items()},
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def over_an_update(
    engine: GenerationEngine, policy: Policy, **sampling: Any
) -> tuple[list[Generation], list[Generation]]:
    """Return completions that an update interrupts, and later ones of the same prompts."""
    engine.submit(make_requests(PROMPTS, "over", **{"max_tokens": 200} | sampling))
    async with asyncio.timeout(TIMEOUT_S):
        while len(await engine.progress()) < len(PROMPTS):  # noqa: ASYNC110
            await asyncio.sleep(0)
    await update(engine, policy.step())
    over = await collect_all(engine, len(PROMPTS))
    after = await generate(engine, make_requests(PROMPTS, "after", **{"max_tokens": 48} | sampling))
    return over, after


def check(models: Sequence[Any], found: Sequence[Generation], temperature: float = 1.0) -> None:
    """Compare log-probabilities with those of the merged model of each token's version."""
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert np.all(np.diff(one.policy_versions) >= 0)
        exact = hf_logprobs(models, prompt, one, temperature=temperature)
        np.testing.assert_allclose(one.sampler_logprobs, exact, atol=1e-4)


def versions(found: Sequence[Generation]) -> set[int]:
    return {version for one in found for version in one.policy_versions.tolist()}


KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3, tensor parallel": {"tensor_parallel": 2},
    "qwen2, with biases": {},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2, with biases": {"model_type": "qwen2", "tied": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_is_an_adapter(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "base"
    if kind in VARIANTS:
        build_variant(path, 0, **VARIANTS[kind])
    else:
        build_tiny_model(path, num_layers=2)
    policy = Policy(path, tmp_path)
    asked = {"max_tokens": 24}

    async def scenario() -> tuple[list[list[Generation]], list[int]]:
        async with running(path, **KINDS[kind]) as engine:
            reused = [0]

            async def completions(name: str) -> list[Generation]:
                found = await generate(engine, make_requests(PROMPTS, name, **asked))
                reused.append(engine.stats().num_reused_tokens)
                return found

            found = [await completions("base")]
            await update(engine, policy.step())
            found += [await completions("first"), await completions("again")]
            found += await over_an_update(engine, policy)
            assert list(await engine._llm.list_loras()) == [1]
            return found, reused

    (base, first, again, over, after), reused = asyncio.run(scenario())
    for found, expected in [(base, {0}), (first, {1}), (again, {1}), (over, {1, 2}), (after, {2})]:
        assert versions(found) == expected
        check(policy.models, found)
    assert any(len(set(one.policy_versions.tolist())) == 2 for one in over)
    assert any(len(one.token_ids) for one in first)
    # Versions share no prefixes; requests of one version do.
    assert reused[2] == reused[1]
    assert reused[3] > reused[2]
    assert policy.gap(PROMPTS, after) <= 1e-4
    factors = read_all(policy.publish())
    assert {name.rpartition(".lora_")[2] for name in factors} == {"A.weight", "B.weight"}
    merged = sum(one.numel() for one in policy.models[0].parameters())
    assert sum(one.numel() for one in factors.values()) < merged / 5
    policy.engine.close()


async def together(
    views: Sequence[PolicyView], requests: Sequence[GenerationRequest]
) -> list[list[Generation]]:
    """Run the same requests for each policy, in one batch from the first step on."""
    await views[0].pause()
    for view in views:
        view.submit(requests)
    await views[0].resume()
    return [await collect_all(view, len(requests)) for view in views]


OTHER = "r3a12:q_proj,o_proj,down_proj"  # of another rank, scale and other layers


@pytest.mark.parametrize("options", [{}, {"tensor_parallel": 2}], ids=["one rank", "two ranks"])
def test_two_policies_share_an_engine(
    options: dict[str, Any], model_path: Path, policy: Policy, tmp_path: Path
) -> None:
    """Expect of each policy the numbers of its own merged model and its own versions."""
    rival = Policy(model_path, tmp_path, OTHER, name="rival")
    requests = make_requests(PROMPTS, "both", max_tokens=24)
    rival.step()  # so that versions and models of one number differ

    async def scenario() -> tuple[list[list[Generation]], dict[str, int]]:
        async with running(model_path, others={"rival": OTHER}, **options) as engine:
            views = views_of(engine, 2)
            mine, theirs = views
            found = await together(views, requests)
            await asyncio.gather(update(mine, policy.step()), update(theirs, rival.step()))
            found += await together(views, requests)
            assert sorted(await engine._llm.list_loras()) == [1, 2]

            # An update of one policy keeps the prefixes of the other.
            reused: dict[str, int] = {}

            async def reusing(name: str, view: PolicyView) -> list[Generation]:
                before = engine.stats().num_reused_tokens
                completions = await generate(view, requests)
                reused[name] = engine.stats().num_reused_tokens - before
                return completions

            found += [await reusing("own", mine), await reusing("rival's", theirs)]
            await update(theirs, rival.step())
            found += [await reusing("own again", mine), await reusing("rival's new", theirs)]

            # Requests of both run over an update of one.
            theirs.submit(make_requests(PROMPTS, "other", max_tokens=200))
            over, after = await over_an_update(mine, policy)
            found += [over, await collect_all(theirs, len(PROMPTS)), after]
            assert (mine.stats().policy_version, theirs.stats().policy_version) == (2, 3)
            return found, reused

    found, reused = asyncio.run(scenario())
    base, rivals_base, one, two, own, rivals, own_again, new, over, others, after = found
    for completions, number in [(base, {0}), (one, {1}), (own, {1}), (own_again, {1})]:
        assert versions(completions) == number
        check(policy.models, completions)
    for completions, number in [(rivals_base, {0}), (two, {2}), (rivals, {2}), (new, {3})]:
        assert versions(completions) == number
        check(rival.models, completions)
    assert reused["own"] > 0
    assert reused["own again"] == reused["own"] == reused["rival's"]
    assert reused["rival's new"] == 0
    assert versions(over) == {1, 2}
    assert versions(after) == {2}
    assert versions(others) == {3}
    assert FinishReason.ABORTED not in {one.finish_reason for one in others}
    assert max(len(one.token_ids) for one in others) == 200
    check(policy.models, over)
    check(policy.models, after)
    check(rival.models, others)
    # The numbers are not those of the other policy.
    with pytest.raises(AssertionError):
        check(rival.models, own)
    rival.engine.close()


TEMPERATURE = 0.2
MANY = [[5 + i % 7, 9, 11 + i % 5] * 5 for i in range(450)]


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_of_an_adapted_policy(method: str, model_path: Path, policy: Policy) -> None:
    """Expect the tokens of plain sampling with the same adapters, before and over an update.

    With a draft model, compare 50,000 tokens with exact probabilities too.
    """
    speculation: dict[str, Any] = {"method": method, "num_tokens": 2}
    if method == "draft_model":
        speculation["model"] = str(model_path)  # without adapters
    many = MANY if method == "draft_model" else []
    # The random model is almost uniform at 0.6, where no draft is often right.
    sampling: dict[str, Any] = {"temperature": TEMPERATURE}
    first = policy.step()

    async def scenario() -> tuple[list[list[Generation]], int, int]:
        requests = make_requests(PROMPTS, "plain", max_tokens=48, **sampling)
        async with running(model_path) as engine:
            await update(engine, first)
            found = [await generate(engine, requests)]
        async with running(model_path, speculation=speculation) as engine:
            await update(engine, first)
            found.append(await generate(engine, requests))
            found.append(
                await generate(engine, make_requests(many, "many", max_tokens=200, **sampling))
            )
            found += await over_an_update(engine, policy, **sampling)
            await engine.progress()  # reads the counts
            stats = engine.stats()
            return found, stats.num_drafted_tokens, stats.num_accepted_tokens

    (plain, drafted, long, over, after), num_drafted, num_accepted = asyncio.run(scenario())
    for one, expected in zip(drafted, plain, strict=True):
        assert np.array_equal(one.token_ids, expected.token_ids)
        np.testing.assert_allclose(one.sampler_logprobs, expected.sampler_logprobs, atol=1e-4)
    for found, expected_versions in [(drafted, {1}), (over, {1, 2}), (after, {2})]:
        assert versions(found) == expected_versions
        check(policy.models, found, temperature=TEMPERATURE)
    assert any(len(set(one.policy_versions.tolist())) == 2 for one in over)
    assert num_drafted > 0
    if many:
        num_tokens = sum(len(one.token_ids) for one in long)
        assert num_tokens >= 50_000
        assert num_accepted > num_tokens / 20
        base, adapted = policy.models[:2]
        assert p_value(adapted, many, long, temperature=TEMPERATURE, seed=0) > 0.01
        # The test finds the distribution of the base model wrong.
        assert p_value(base, many, long, temperature=TEMPERATURE, seed=0) < 1e-6


def test_a_model_for_which_vllm_has_no_adapters(tmp_path: Path) -> None:
    path = build_variant(tmp_path / "model", 0, model_type="stablelm", tied=False)

    async def scenario() -> None:
        async with running(path):
            pass

    with invalid("rollout.vllm.enable_lora", True):
        asyncio.run(scenario())
