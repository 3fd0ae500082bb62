"""Constrained decoding by vLLM's structured outputs, on its CPU wheel."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlsys.config import RolloutConfig
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.launcher.tiny_models import build_tiny_model, build_tokenizer
from rlsys.types import INJECTED, FinishReason, Generation, GenerationRequest, SamplingParams
from tests.engines.structures import CHOICE, PROMPT, SCHEMA, json_structure, structure
from tests.engines.vllm_harness import (
    TIMEOUT_S,
    collect_all,
    hf_logprobs,
    load,
    make_requests,
    running_engine,
)
from tests.errors import invalid

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

NUM = 4


def requests() -> list[GenerationRequest]:
    """Return constrained (choice, schema), free and greedy requests."""
    prompts = [list(PROMPT)] * NUM
    made = [
        *make_requests(prompts, "choice", max_tokens=40, structure=structure(CHOICE)),
        *make_requests(prompts, "free", max_tokens=12),
        *make_requests(prompts, "schema", max_tokens=80, structure=json_structure(SCHEMA)),
    ]
    greedy = SamplingParams(temperature=0.0, max_tokens=40, structure=structure(CHOICE))
    made.append(
        GenerationRequest(request_id="cold-0", prompt_token_ids=PROMPT, sampling=greedy, seed=0)
    )
    return made


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def made(path: Path) -> dict[str, Generation]:
    async def run() -> dict[str, Generation]:
        async with running_engine(path) as engine:
            with invalid("request 'bad-0': structure"):
                engine.submit(
                    make_requests([PROMPT], "bad", structure=json_structure({"type": "bogus"}))
                )
            engine.submit(requests())
            return {one.request_id: one for one in await collect_all(engine, 3 * NUM + 1)}

    return asyncio.run(run())


def text_of(one: Generation) -> str:
    assert one.finish_reason is FinishReason.STOP
    text: str = build_tokenizer().decode(one.token_ids.tolist()[:-1])
    return text


def test_completions_have_the_structure(made: dict[str, Generation]) -> None:
    for i in range(NUM):
        assert json.loads(text_of(made[f"choice-{i}"]))["choice"] in ("yes", "no", "never")
        assert isinstance(json.loads(text_of(made[f"schema-{i}"]))["ok"], bool)
    assert "choice" in json.loads(text_of(made["cold-0"]))


def test_log_probabilities_are_the_trainers(made: dict[str, Generation], path: Path) -> None:
    """Check that the importance ratio is 1 at equal weights."""
    model = load(path)
    for name, one in made.items():
        of_one_version = replace(one, policy_versions=np.zeros_like(one.policy_versions))
        expected = hf_logprobs([model], PROMPT, of_one_version)
        assert np.abs(np.exp(one.sampler_logprobs - expected) - 1).max() < 1e-5, name


def test_the_torch_engine_samples_and_marks_the_same(
    made: dict[str, Generation], path: Path
) -> None:
    async def run() -> dict[str, Generation]:
        engine = TorchEngine(path, RolloutConfig(kv_cache_gib=0.05), dtype="float32")
        await engine.start()
        try:
            asked = requests()[:-1]
            engine.submit(asked)
            found: dict[str, Generation] = {}
            while len(found) < len(asked):
                found |= {one.request_id: one for one in await engine.collect()}
        finally:
            await engine.close()
        return found

    for name, one in asyncio.run(run()).items():
        assert one.token_ids.tolist() == made[name].token_ids.tolist(), name
        assert one.policy_versions.tolist() == made[name].policy_versions.tolist(), name
        assert (INJECTED in one.policy_versions) == (not name.startswith("free")), name
