"""Constrained decoding in the torch engine: legal texts, unconstrained log-probabilities."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.common.structural_tags import check_structure
from rlsys.config import RolloutConfig
from rlsys.engines.generation.constraint import Grammars, forced_tokens
from rlsys.engines.generation.continuation import continued, merged
from rlsys.engines.generation.interruption import InterruptingEngine, Interruption
from rlsys.engines.generation.sampling import Allowed, draw
from rlsys.engines.generation.torch.continuous_batch import ContinuousBatch
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.launcher.tiny_models import EOS, build_tokenizer
from rlsys.types import INJECTED, FinishReason, Generation, GenerationRequest
from tests.engines.structures import CHOICE, PROMPT, SCHEMA, json_structure, structure
from tests.engines.torch_engine_harness import batch_of, build_model, request, run, trainer_logprobs
from tests.errors import invalid

pytest.importorskip("xgrammar")

TOKENIZER = build_tokenizer()
END = TOKENIZER.convert_tokens_to_ids(EOS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    return load_causal_lm(path, dtype="float32")


@pytest.fixture
def batch(path: Path, model: Any) -> ContinuousBatch:
    return new_batch(path, model)


def new_batch(path: Path, model: Any) -> ContinuousBatch:
    grammars = Grammars(path, model.config.vocab_size)
    return batch_of(model, stop_token_ids=(END,), grammars=grammars)


def constrained(name: str, format: Any = CHOICE, **options: Any) -> GenerationRequest:
    return request(name, PROMPT, **{"max_tokens": 64, "structure": structure(format), **options})


def text_of(generation: Generation) -> str:
    token_ids = generation.token_ids.tolist()
    assert token_ids[-1] == END
    text: str = TOKENIZER.decode(token_ids[:-1])
    return text


def test_completions_have_the_structure_and_end(batch: ContinuousBatch) -> None:
    requests = [constrained(f"c{i}", seed=i) for i in range(8)]
    requests += [request(f"free{i}", PROMPT, seed=i, max_tokens=16) for i in range(4)]
    made = run(batch, requests)
    for i in range(8):
        one = made[f"c{i}"]
        assert one.finish_reason is FinishReason.STOP
        assert json.loads(text_of(one))["choice"] in ("yes", "no", "never")


def test_log_probabilities_are_the_trainers(batch: ContinuousBatch, model: Any) -> None:
    """Check that the importance ratio is 1 at equal weights."""
    made = run(batch, [constrained(f"c{i}", seed=i, temperature=0.7) for i in range(6)])
    completions = [made[f"c{i}"].token_ids.tolist() for i in range(6)]
    expected = trainer_logprobs(model, [PROMPT] * 6, completions, temperature=0.7)
    for i in range(6):
        ratio = torch.from_numpy(made[f"c{i}"].sampler_logprobs) - expected[i]
        assert float(ratio.exp().sub(1).abs().max()) < 1e-5


def test_tokens_without_an_alternative_are_not_trained(batch: ContinuousBatch) -> None:
    made = run(batch, [constrained(f"c{i}", seed=i) for i in range(6)])
    for one in made.values():
        text = text_of(one)
        free = [TOKENIZER.decode([t]) for t in one.token_ids[one.policy_versions != INJECTED]]
        if text == '{"choice":"yes"}':
            assert free == ["y"]  # or "n"
        else:  # "n" is followed by "o" or "e"
            assert free == ["n", text[len('{"choice":"n')]]


def test_the_sampled_distribution_is_the_models_among_the_allowed_tokens(
    path: Path, model: Any
) -> None:
    """Compare frequencies of the first free token with probabilities renormalised by hand."""
    num = 1500
    format = {"type": "regex", "pattern": '"(a|b)"'}
    grammars = Grammars(path, model.config.vocab_size)
    batch = batch_of(
        model, stop_token_ids=(END,), grammars=grammars, max_running=256, kv_cache_gib=0.1
    )
    made = run(batch, [constrained(f"c{i}", format, seed=i) for i in range(num)])
    counts = Counter(text_of(one) for one in made.values())
    quote, a, b = (TOKENIZER.convert_tokens_to_ids(one) for one in '"ab')
    rows = trainer_logprobs(model, [PROMPT] * 2, [[quote, a], [quote, b]], temperature=1.0)
    chance_a, chance_b = (float(row[1].exp()) for row in rows)
    expected = chance_a / (chance_a + chance_b)
    error = (expected * (1 - expected) / num) ** 0.5
    assert abs(counts['"a"'] / num - expected) < 5 * error


def test_unconstrained_requests_are_sampled_as_before(path: Path, model: Any) -> None:
    free = [request(f"free{i}", PROMPT, seed=i, max_tokens=12) for i in range(3)]
    alone = run(new_batch(path, model), free)
    mixed = run(new_batch(path, model), [*free, constrained("c", seed=9)])
    for name, one in alone.items():
        assert one.token_ids.tolist() == mixed[name].token_ids.tolist()
        assert one.sampler_logprobs.tolist() == mixed[name].sampler_logprobs.tolist()


@pytest.mark.slow
def test_a_continued_completion_equals_an_uninterrupted_one(path: Path, model: Any) -> None:
    asked = constrained("c", seed=3)
    whole = run(new_batch(path, model), [asked])["c"]
    batch = new_batch(path, model)
    batch.submit([asked])
    for _ in range(5):
        assert not batch.step()
    (prior,) = batch.progress()
    rest = run(new_batch(path, model), [continued(asked, prior)])["c"]
    both = merged(prior, rest)
    assert both.token_ids.tolist() == whole.token_ids.tolist()
    assert both.policy_versions.tolist() == whole.policy_versions.tolist()


def test_marks_found_afterwards_equal_those_of_sampling(path: Path, model: Any) -> None:
    """Mark tokens as the vLLM engine does."""
    grammars = Grammars(path, model.config.vocab_size)
    made = run(new_batch(path, model), [constrained(f"c{i}", seed=i) for i in range(4)])
    for one in made.values():
        matcher = grammars.matcher(structure(CHOICE), [END])
        forced = forced_tokens(matcher, one.token_ids.tolist())
        assert forced.tolist() == (one.policy_versions == INJECTED).tolist()


def test_json_of_a_schema(batch: ContinuousBatch) -> None:
    asked = [
        request(f"c{i}", PROMPT, seed=i, max_tokens=100, structure=json_structure(SCHEMA))
        for i in range(6)
    ]
    for one in run(batch, asked).values():
        value = json.loads(text_of(one))
        assert isinstance(value["ok"], bool)
        assert value["kind"] in ("a", "b")


def test_any_of_several_end_tokens_ends_only_what_is_complete(path: Path, model: Any) -> None:
    """Use an end token that is text to the tokenizer, too."""
    other = TOKENIZER.convert_tokens_to_ids("x")
    format = {"type": "regex", "pattern": "[ax]{2,3}"}
    asked = [
        constrained(f"c{i}", format, seed=i, stop_token_ids=(other,), max_tokens=20)
        for i in range(16)
    ]
    made = run(new_batch(path, model), asked)
    texts = {TOKENIZER.decode(one.token_ids.tolist()) for one in made.values()}
    assert texts <= {"aax", f"aa{EOS}", "aaax", f"aaa{EOS}"}
    assert any(text.endswith("x") for text in texts)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("{", ""),
        (json_structure({"type": "bogus"}), "bogus"),
        (json_structure({"$ref": "#/$defs/x"}), "x"),
    ],
)
def test_an_invalid_structure_is_rejected(batch: ContinuousBatch, given: str, named: str) -> None:
    with invalid("request 'r': structure") as refusal:
        batch.check(request("r", PROMPT, structure=given))
    assert named in refusal.value.rule
    with pytest.raises(ValueError):  # noqa: PT011 - the type is all there is to it
        check_structure(given)


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with invalid("structured output") as found:
        check_structure(structure(CHOICE))
    assert "rlsys[structured]" in found.value.fix


def test_a_model_without_an_end_cannot_be_constrained(path: Path, model: Any) -> None:
    batch = batch_of(model, grammars=Grammars(path, model.config.vocab_size))
    with invalid("request 'c': structure"):
        batch.check(constrained("c"))


def test_restricted_draws_never_leave_the_allowed_tokens() -> None:
    """Include rows in which all allowed tokens have a probability that underflows."""
    logits = torch.zeros(3, 70)
    logits[:, :2] = -200.0
    logprobs = logits.log_softmax(-1)
    masks = np.zeros((2, 3), np.int32)
    masks[:, 0] = 0b11
    masks[1, 2] = 1 << 5  # token 69
    allowed = Allowed.of(torch.tensor([0, 2]), torch.from_numpy(masks), 70)
    drawn = {
        tuple(draw(logprobs, torch.full((3,), u), allowed=allowed)[[0, 2]].tolist())
        for u in np.linspace(0, 0.99999, 41, dtype=np.float32).tolist()
    }
    assert {row for row, _ in drawn} == {0, 1}
    assert {row for _, row in drawn} == {69}


def test_an_interruption_leaves_constrained_completions_alone(path: Path) -> None:
    async def sample() -> Generation:
        engine = InterruptingEngine(
            TorchEngine(path, RolloutConfig(kv_cache_gib=0.01), dtype="float32"),
            Interruption(after=3, phrase=(5, 6), closed_by="never", decode=TOKENIZER.decode),
        )
        await engine.start()
        try:
            engine.submit([constrained("c")])
            (made,) = await engine.collect()
        finally:
            await engine.close()
        return made

    assert "choice" in json.loads(text_of(asyncio.run(sample())))
