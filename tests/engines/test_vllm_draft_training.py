"""A head that is trained along, in vLLM: its drafts are those of the trainer's head."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from rlsys.config.speculation import Speculation
from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine
from rlsys.engines.models.eagle_head import (
    OUTPUT,
    PUBLISHED,
    TOKENS,
    HeadSizes,
    HeadWeights,
    drafted_tokens,
    new_config,
)
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.types import Generation, MicroBatch, TrainRow
from tests.engines.draft_reference import ReferenceHead
from tests.engines.published import read_all
from tests.engines.training_harness import make_engine
from tests.engines.vllm_harness import (
    TIMEOUT_S,
    generate,
    hf_logprobs,
    load,
    make_requests,
    running_engine,
    update,
)

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed"
)

PROMPTS = [[5, 9, 11] * 4, list(range(3, 20)), [17, 17, 17, 17], [7, 8] * 5]
NUM_TOKENS, LENGTH, LAYERS = 2, 64, (1, 2, 3)
OPTIONS = {"method": "eagle3", "trained_along": True, "num_tokens": NUM_TOKENS}


@torch.no_grad()
def predicted(
    policy: Any, head: Mapping[str, torch.Tensor], prompt: Sequence[int], completion: Sequence[int]
) -> tuple[int, int]:
    """Return how many tokens a head drafts, and how many of them are in a completion."""
    tokens = [*prompt, *completion]
    found = policy(torch.tensor([tokens]), output_hidden_states=True)
    states = torch.cat([found.hidden_states[n][0] for n in LAYERS], -1)
    embed = policy.get_input_embeddings().weight
    output = head.get(OUTPUT, policy.get_output_embeddings().weight)
    drafted_as = drafted_tokens(head.get(TOKENS, torch.zeros(len(output), dtype=torch.int64)))
    reference = ReferenceHead(head, head_dim=policy.config.head_dim)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    drafted = accepted = 0
    known = len(prompt) + 1
    while known < len(tokens):
        for position in range(len(keys), known - 1):
            read = head["fc.weight"] @ states[position]
            hidden, state = reference.step(
                position, embed[tokens[position + 1]], read, keys, values
            )
        past = list(keys), list(values)
        drafts = [int(drafted_as[(output @ hidden).argmax()])]
        for position in range(known - 1, known + NUM_TOKENS - 2):
            hidden, state = reference.step(position, embed[drafts[-1]], state, *past)
            drafts.append(int(drafted_as[(output @ hidden).argmax()]))
        right = 0
        while right < NUM_TOKENS and tokens[known + right : known + right + 1] == [drafts[right]]:
            right += 1
        drafted, accepted, known = drafted + NUM_TOKENS, accepted + right, known + right + 1
    return drafted, accepted


async def counted(engine: VLLMEngine, name: str) -> tuple[list[Generation], int, int]:
    """Return greedy completions, and the numbers of drafted and accepted tokens."""
    await engine.progress()
    before = engine.stats()
    requests = make_requests(PROMPTS, name, temperature=0.0, max_tokens=LENGTH)
    found = await generate(engine, requests)
    await engine.progress()
    after = engine.stats()
    return (
        found,
        after.num_drafted_tokens - before.num_drafted_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
    )


def train(trainer: FSDPEngine, completions: Sequence[Generation], num_steps: int) -> None:
    rows = [
        TrainRow(
            prompt_token_ids=np.array(prompt, np.int32),
            token_ids=one.token_ids,
            policy_versions=one.policy_versions,
            loss_mask=np.ones(len(one.token_ids), bool),
            columns={
                "sampler_logprobs": one.sampler_logprobs,
                "advantages": np.full(len(one.token_ids), (-1.0) ** number, np.float32),
            },
            group_id=0,
            group_size=len(PROMPTS),
            group_num_tokens=len(PROMPTS) * LENGTH,
        )
        for number, (prompt, one) in enumerate(zip(PROMPTS, completions, strict=True))
    ]
    for _ in range(num_steps):
        trainer.accumulate(MicroBatch(rows=rows))
        trainer.optimizer_step()


def build_head(directory: Path, policy: Path) -> Path:
    """Write a head with an output layer of its own, which lacks the last ten tokens."""
    config = AutoConfig.from_pretrained(policy)
    num = config.vocab_size - 10
    sizes = HeadSizes.of(new_config(config) | {"draft_vocab_size": num}, config)
    tensors = HeadWeights.new(config).tensors
    random = torch.Generator().manual_seed(1)
    tensors[OUTPUT] = torch.randn(num, sizes.width, generator=random) * sizes.width**-0.5
    tensors[TOKENS] = torch.zeros(num, dtype=torch.int64)
    HeadWeights(sizes, tensors).save(directory, torch.float32)
    return directory


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(4 * TIMEOUT_S)
@pytest.mark.parametrize("is_given", [False, True], ids=["new", "given"])
def test_drafts_follow_the_trained_head(is_given: bool, tmp_path: Path) -> None:
    path = build_tiny_model(tmp_path / "policy", family="qwen3", width=128, num_layers=4, seed=0)
    options: dict[str, Any] = {**OPTIONS, "learning_rate": 2e-3}
    if is_given:
        options["model"] = str(build_head(tmp_path / "head", path))
    speculation = Speculation.of(options, "vllm")
    trainer = make_engine(path, learning_rate=1e-4, speculation=speculation, temperature=1.0)

    def version(number: int) -> tuple[Any, Any, dict[str, torch.Tensor]]:
        """Publish a version; return its manifest, the policy and the head."""
        manifest = trainer.publish()
        assert manifest is not None
        assert manifest.version == number
        tensors = read_all(manifest)
        head = {n.removeprefix(PUBLISHED): t for n, t in tensors.items() if n.startswith(PUBLISHED)}
        policy = load(path)
        rest = {name: one for name, one in tensors.items() if not name.startswith(PUBLISHED)}
        policy.load_state_dict(rest, strict=False)
        return manifest, policy, head

    async def both() -> list[tuple[list[Generation], int, int, Any, Any]]:
        results = []
        async with running_engine(path, speculation=options) as engine:
            _, policy, head = version(0)
            first = await counted(engine, "first")
            results.append((*first, policy, head))
            await asyncio.to_thread(train, trainer, first[0], 60)
            manifest, policy, head = version(60)
            await update(engine, manifest)
            results.append((*await counted(engine, "second"), policy, head))
        return results

    results = asyncio.run(both())
    rates = []
    for number, (found, drafted, accepted, policy, head) in zip((0, 60), results, strict=True):
        rates.append(accepted / drafted)
        expected = [0, 0]
        for prompt, one in zip(PROMPTS, found, strict=True):
            assert set(one.policy_versions.tolist()) == {number}
            exact = hf_logprobs({number: policy}, prompt, one)  # type: ignore[arg-type]
            np.testing.assert_allclose(one.sampler_logprobs, exact, atol=1e-4)
            counts = predicted(policy, head, prompt, one.token_ids.tolist())
            expected = [total + count for total, count in zip(expected, counts, strict=True)]
        # The last pass of a request may draft beyond its end.
        assert abs(accepted - expected[1]) <= NUM_TOKENS * len(PROMPTS)
        assert abs(drafted - expected[0]) <= NUM_TOKENS * len(PROMPTS)
    assert rates[1] > rates[0] + 0.1, rates  # the policy moves meanwhile
    trainer.close()
