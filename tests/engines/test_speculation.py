"""n-gram speculation in the torch engine: the same tokens as without it, fewer passes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlsys.config.speculation import Speculation
from rlsys.engines.generation.torch.continuous_batch import ContinuousBatch
from rlsys.engines.generation.torch.draft_policy import DraftPolicy
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.types import Generation, GenerationRequest
from tests.engines.distribution import p_value
from tests.engines.torch_engine_harness import FAMILIES, batch_of, build_model, prompt, request

NGRAM = Speculation(method="ngram", num_tokens=4, min_match=1, max_match=4)


class Always:
    """Draft in every pass."""

    speedup = None

    def drafts(self, num_running: int) -> bool:
        return True

    def observe(self, num_running: int, *, drafted: bool, num_tokens: int, seconds: float) -> None:
        pass


def always(speculation: Speculation = NGRAM) -> DraftPolicy:
    return DraftPolicy(speculation, clock=lambda: 0.0, pace=Always())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("models")
    return {
        family: load_causal_lm(build_model(root / family, family), dtype="float32")
        for family in FAMILIES
    }


REPETITIVE = (5, 9, 11, 5, 9, 11, 5, 9, 11, 5, 9)


def requests(**sampling: Any) -> list[GenerationRequest]:
    prompts = [REPETITIVE, prompt(6), prompt(19, seed=1), (7,) * 12]
    return [
        request(f"r{i}", one, seed=i, **{"max_tokens": 24, "temperature": 0.4, **sampling})
        for i, one in enumerate(prompts)
    ]


def run_in_passes(
    batch: ContinuousBatch, wanted: Sequence[GenerationRequest]
) -> tuple[dict[str, Generation], int]:
    batch.submit(wanted)
    ended: dict[str, Generation] = {}
    num_passes = 0
    while batch.has_work:
        ended |= {one.request_id: one for one in batch.step()}
        num_passes += 1
    return ended, num_passes


def assert_equal(found: Generation, expected: Generation) -> None:
    assert found.finish_reason == expected.finish_reason
    for name in ("token_ids", "sampler_logprobs", "policy_versions", "routed_experts"):
        a, b = getattr(found, name), getattr(expected, name)
        assert (a is None) == (b is None)
        assert a is None or np.array_equal(a, b), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0, "top_k": 5}, {"top_p": 0.7}, {"stop": ("\x09",)}, {"max_tokens": 8}],
)
def test_tokens_and_log_probabilities_are_those_of_plain_sampling(
    models: dict[str, Any], family: str, sampling: dict[str, Any]
) -> None:
    wanted = requests(**sampling)
    plain, num_plain = run_in_passes(batch_of(models[family]), wanted)
    policy = always()
    drafted, num_drafted = run_in_passes(batch_of(models[family], draft_policy=policy), wanted)
    for name, expected in plain.items():
        assert_equal(drafted[name], expected)
    assert policy.num_drafted > 0
    assert num_drafted <= num_plain
    if not sampling:
        assert policy.num_accepted > 0


def test_a_draft_of_the_right_tokens_is_accepted_whole(models: dict[str, Any]) -> None:
    """Sample greedily, then continue a prompt that has the completion in it."""
    model = models["llama"]
    first = request("a", REPETITIVE, temperature=1e-6, max_tokens=30)
    plain, _ = run_in_passes(batch_of(model), [first])
    cycle = plain["a"].token_ids.tolist()
    tail = request("b", (*REPETITIVE, *cycle), temperature=1e-6, max_tokens=16)
    policy = always()
    found, num_passes = run_in_passes(batch_of(model, draft_policy=policy), [tail])
    expected, num_plain = run_in_passes(batch_of(model), [tail])
    assert_equal(found["b"], expected["b"])
    assert num_passes <= num_plain


def test_each_token_has_the_version_of_the_pass_that_sampled_it(models: dict[str, Any]) -> None:
    """Change the version before each pass; the weights stay, so that plain tokens are expected."""
    batch = batch_of(models["llama"], draft_policy=always())
    batch.submit(requests(max_tokens=60))
    known: dict[str, int] = {}
    num_several = 0
    for version in range(1, 100):
        batch.policy_version = version
        for one in [*batch.step(), *batch.progress()]:
            new = one.policy_versions[known.get(one.request_id, 0) :]
            if len(new):
                assert set(new.tolist()) == {version}
                num_several += len(new) > 2  # a first pass samples twice
                known[one.request_id] = len(one.policy_versions)
        if not batch.has_work:
            break
    assert not batch.has_work
    assert num_several > 0


def test_the_memory_for_keys_and_values_is_not_exceeded(models: dict[str, Any]) -> None:
    """One request is at its limit while others draft."""
    wanted = [
        request("long", prompt(40), max_tokens=24, temperature=0.4),
        *(replace(one, request_id=f"s{i}") for i, one in enumerate(requests(max_tokens=60))),
    ]
    batch = batch_of(models["qwen3"], draft_policy=always(), max_running=5)
    found, _ = run_in_passes(batch, wanted)
    expected, _ = run_in_passes(batch_of(models["qwen3"], max_running=5), wanted)
    for name in expected:
        assert_equal(found[name], expected[name])


def test_a_rejected_request_rests_and_an_accepted_one_drafts_more() -> None:
    from rlsys.engines.generation.torch.slots import Slots

    slots = Slots(context=200, stop_token_ids=(), decode_text=lambda ids: "")
    for i in range(2):
        slots.add(request(f"r{i}", REPETITIVE, max_tokens=100))
    policy = always(replace(NGRAM, num_tokens=8))

    def once(accepted: list[int]) -> list[int]:
        drafts = policy.propose(slots)
        assert drafts is not None
        policy.observe(slots, drafts, np.array(accepted))
        counts: list[int] = np.bincount(drafts.slots, minlength=2).tolist()
        return counts

    assert once([4, 0]) == [4, 4]
    assert once([8, 0]) == [8, 1]
    assert once([8, 0]) == [8, 0]  # it rests for two passes
    assert once([2, 0]) == [8, 0]
    assert once([2, 0]) == [2, 1]
    assert (policy.num_drafted, policy.num_accepted) == (36, 24)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_tokens_have_the_distribution_of_the_policy(models: dict[str, Any], seed: int) -> None:
    """Compare 50,000 tokens with exact probabilities.

    Without attention the model is a Markov chain, which repeats itself, so that most drafts are
    accepted.
    """
    model, policy = copy.deepcopy(models["llama"]), always()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    prompts = [(*prompt(5, seed=i), *REPETITIVE) for i in range(250)]
    wanted = [
        request(f"r{i}", one, seed=1000 * seed + i, max_tokens=200, temperature=0.2)
        for i, one in enumerate(prompts)
    ]
    batch = batch_of(model, draft_policy=policy, max_running=64, kv_cache_gib=0.1)
    ended, _ = run_in_passes(batch, wanted)
    found = [ended[one.request_id] for one in wanted]
    num_tokens = sum(len(one.token_ids) for one in found)
    assert num_tokens >= 50_000
    assert policy.num_accepted > num_tokens / 3
    assert p_value(model, prompts, found, temperature=0.2, seed=seed) > 0.01
