"""Speculation in vLLM: tokens and log-probabilities are the policy's, whatever was drafted."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine
from rlsys.engines.generation.vllm.vllm_speculation import PLACEHOLDER, verified
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.types import Generation
from tests.engines.distribution import p_value
from tests.engines.vllm_harness import (
    TIMEOUT_S,
    build_variant,
    collect_all,
    generate,
    hf_logprobs,
    load,
    make_requests,
    publish,
    running_engine,
    update,
)

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed"
)

REPEATED = [5, 9, 11] * 12
PROMPTS = [REPEATED, list(range(3, 50)), [17, 17, 17, 17], [7, 8] * 9]
TEMPERATURE = 0.6


def check(
    rows: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[int]]:
    tokens = torch.tensor([token for row in rows for token in row])
    inputs = torch.tensor([token for row in drafted for token in row], dtype=torch.long)
    accepted, places = verified(tokens, inputs, torch.tensor([len(row) for row in rows]))
    return accepted.tolist(), places.tolist()


def test_drafted_tokens_are_accepted_up_to_the_first_wrong_one() -> None:
    # Sampled after: the last token, then each drafted one.
    rows = [[4, 5, 6], [7], [1, 2, 3, 9], [8, 8]]
    drafted: list[list[int]] = [[4, 0], [], [1, 2, 3], [0]]
    accepted, places = check(rows, drafted)
    no = PLACEHOLDER
    assert accepted == [[4, 5, no, no], [7, no, no, no], [1, 2, 3, 9], [8, no, no, no]]
    by_request = np.array(places).reshape(4, 4)
    assert by_request[0, :2].tolist() == [0, 1]
    assert by_request[1, 0] == 3
    assert by_request[2].tolist() == [4, 5, 6, 7]
    assert by_request[3, 0] == 8


def test_a_right_token_after_a_wrong_one_is_not_accepted() -> None:
    accepted, _ = check([[4, 5, 6]], [[0, 5]])
    assert accepted == [[4, PLACEHOLDER, PLACEHOLDER]]


def test_requests_without_drafts_get_one_token_each() -> None:
    accepted, places = check([[4], [5]], [[], []])
    assert (accepted, places) == ([[4], [5]], [0, 1])


def build_target(directory: Path, seed: int) -> Path:
    return build_tiny_model(directory, family="qwen3", width=128, num_layers=4, seed=seed)


def build_eagle_head(directory: Path, target: Path) -> Path:
    """Write an EAGLE-3 head with random weights for a model of width 128 with four layers."""
    from safetensors.torch import save_file

    width, head_dim, num_heads, num_kv_heads, mlp = 128, 32, 4, 2, 128
    theirs = json.loads((target / "config.json").read_text())
    shapes = {
        "fc.weight": (width, 3 * width),
        "midlayer.self_attn.q_proj.weight": (num_heads * head_dim, 2 * width),
        "midlayer.self_attn.k_proj.weight": (num_kv_heads * head_dim, 2 * width),
        "midlayer.self_attn.v_proj.weight": (num_kv_heads * head_dim, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, num_heads * head_dim),
        "midlayer.mlp.gate_proj.weight": (mlp, width),
        "midlayer.mlp.up_proj.weight": (mlp, width),
        "midlayer.mlp.down_proj.weight": (width, mlp),
        "lm_head.weight": (theirs["vocab_size"], width),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    tensors |= {f"midlayer.{name}.weight": torch.ones(width) for name in norms}
    tensors["norm.weight"] = torch.ones(width)
    layers = [1, 2, 3]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "vocab_size": theirs["vocab_size"],
        "draft_vocab_size": theirs["vocab_size"],
        "max_position_embeddings": theirs["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": layers,
            "use_aux_hidden_state": True,
        },
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def build_with_mtp(directory: Path, seed: int) -> Path:
    """Write a mixture of experts with a layer that predicts the token after the next."""
    from safetensors.torch import load_file, save_file

    options = {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
    build_variant(
        directory,
        seed,
        model_type="ernie4_5_moe",
        tied=True,
        moe_intermediate_size=64,
        num_nextn_predict_layers=1,
        **options,
    )
    tensors = load_file(directory / "model.safetensors")
    width, head_dim, mlp = 128, 32, 128
    shapes: dict[str, tuple[int, ...]] = {
        "mtp_block.0.self_attn.q_proj": (width, width),
        "mtp_block.0.self_attn.k_proj": (2 * head_dim, width),
        "mtp_block.0.self_attn.v_proj": (2 * head_dim, width),
        "mtp_block.0.self_attn.o_proj": (width, width),
        "mtp_block.0.mlp.gate_proj": (mlp, width),
        "mtp_block.0.mlp.up_proj": (mlp, width),
        "mtp_block.0.mlp.down_proj": (width, mlp),
        "mtp_block.0.input_layernorm": (width,),
        "mtp_block.0.post_attention_layernorm": (width,),
        "mtp_emb_norm.0": (width,),
        "mtp_hidden_norm.0": (width,),
        "mtp_linear_proj.0": (width, 2 * width),
    }
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        tensors[f"model.{name}.weight"] = torch.randn(shape, generator=generator) * 0.1
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def without_an_update(engine: VLLMEngine) -> list[Generation]:
    """Return completions of all kinds that have the same tokens without speculation."""
    plain: dict[str, Any] = {"temperature": TEMPERATURE, "max_tokens": 48}
    kinds: list[dict[str, Any]] = [
        {},
        {"stop": ("e", "a", "\n")},  # several tokens of a pass may follow the string
        {"top_k": 20, "top_p": 0.9},
        {"temperature": 0.0, "max_tokens": 120},
    ]
    found = []
    for i, options in enumerate(kinds):
        found += await generate(engine, make_requests(PROMPTS, f"kind{i}", **plain | options))
    return found


async def with_an_update(
    engine: VLLMEngine, new: Any
) -> tuple[list[Generation], list[Generation], list[Generation]]:
    """Return completions before, over and after an update of the weights."""
    sampling: dict[str, Any] = {"temperature": TEMPERATURE, "max_tokens": 48}
    before = await without_an_update(engine)
    engine.submit(make_requests(PROMPTS, "over", **sampling | {"max_tokens": 200}))
    async with asyncio.timeout(TIMEOUT_S):
        while len(await engine.progress()) < len(PROMPTS):  # noqa: ASYNC110
            await asyncio.sleep(0)
    await update(engine, publish(new, 1))
    over = await collect_all(engine, len(PROMPTS))
    after = await generate(engine, make_requests(PROMPTS, "after", **sampling))
    return before, over, after


async def run(
    path: Path, new: Any, speculation: dict[str, Any]
) -> tuple[list[Generation], list[Generation], list[Generation], int, int]:
    async with running_engine(path, speculation=speculation) as engine:
        generations = await with_an_update(engine, new)
        await engine.progress()  # reads the counts
        stats = engine.stats()
        return *generations, stats.num_drafted_tokens, stats.num_accepted_tokens


METHODS = ["ngram", "draft_model", "eagle3", "mtp"]


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("method", METHODS)
def test_tokens_and_log_probabilities_are_the_policys(method: str, tmp_path: Path) -> None:
    build = build_with_mtp if method == "mtp" else build_target
    old, new = build(tmp_path / "old", 0), build(tmp_path / "new", 1)
    models = [load(old), load(new)]
    speculation: dict[str, Any] = {"method": method, "num_tokens": 2}
    if method == "draft_model":
        speculation["model"] = str(old)
    if method == "eagle3":
        speculation["model"] = str(build_eagle_head(tmp_path / "head", old))

    async def both() -> tuple[list[Generation], Any]:
        async with running_engine(old) as engine:
            plain = await without_an_update(engine)
        return plain, await run(old, models[1], speculation)

    plain, (before, over, after, drafted, accepted) = asyncio.run(both())
    for one, expected in zip(before, plain, strict=True):
        assert np.array_equal(one.token_ids, expected.token_ids)
        assert one.finish_reason == expected.finish_reason
        np.testing.assert_allclose(one.sampler_logprobs, expected.sampler_logprobs, atol=1e-4)
    before = before[: len(PROMPTS)]  # the other kinds have another temperature or truncation
    spans = [(before, {0}), (over, {0, 1}), (after, {1})]
    for generations, versions in spans:
        for prompt, one in zip(PROMPTS, generations, strict=True):
            assert set(one.policy_versions.tolist()) <= versions
            assert np.all(np.diff(one.policy_versions) >= 0)
            exact = hf_logprobs(models, prompt, one, temperature=TEMPERATURE)
            np.testing.assert_allclose(one.sampler_logprobs, exact, atol=1e-4)
    assert any(len(set(one.policy_versions.tolist())) == 2 for one in over)
    assert drafted > 0
    assert 0 <= accepted <= drafted
    if method not in ("eagle3", "mtp"):  # whose layers are random
        assert accepted > 0


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(4 * TIMEOUT_S)
def test_tokens_have_the_distribution_of_the_policy(tmp_path: Path) -> None:
    """Compare 50,000 tokens of each of ten seeds with exact probabilities.

    Without attention the model is a Markov chain, which repeats itself, so that drafts are
    accepted.
    """
    path = build_target(tmp_path / "model", 0)
    model = load(path)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    model.save_pretrained(path)
    prompts = [[3 + i % 50, 4 + i // 50, *REPEATED] for i in range(270)]
    sampling: dict[str, Any] = {"temperature": 0.2, "max_tokens": 200}

    async def sampled() -> tuple[list[list[Generation]], int]:
        async with running_engine(path, speculation={"method": "ngram"}) as engine:
            found = []
            for seed in range(10):
                requests = make_requests(prompts, f"seed{seed}", **sampling)
                seeded = [replace(one, seed=1000 * seed + one.seed) for one in requests]
                found.append(await generate(engine, seeded))
            await engine.progress()  # reads the counts
            return found, engine.stats().num_accepted_tokens

    found, num_accepted = asyncio.run(sampled())
    num_tokens = [sum(len(one.token_ids) for one in of_seed) for of_seed in found]
    assert min(num_tokens) >= 50_000
    assert num_accepted > sum(num_tokens) / 10
    for seed, generations in enumerate(found):
        assert p_value(model, prompts, generations, temperature=0.2, seed=seed) > 0.01
