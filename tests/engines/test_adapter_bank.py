"""Adapters of several policies in one batch of the torch engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rlsys.config import RolloutConfig
from rlsys.engines.generation.generation_protocol import AdapterEngine
from rlsys.engines.generation.torch.adapter_bank import AdapterBank
from rlsys.engines.generation.torch.continuous_batch import ContinuousBatch
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.engines.models.adapter_files import LayerFactors
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.types import Generation, GenerationRequest
from tests.engines.test_speculation import always
from tests.engines.torch_engine_harness import (
    batch_of,
    build_model,
    prompt,
    request,
    run,
    trainer_logprobs,
)
from tests.errors import invalid

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCALING = 4.0  # alpha / rank


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


def write_adapter(
    model_path: Path,
    directory: Path,
    *,
    seed: int,
    rank: int,
    layers: Sequence[str] = ALL,
    scale: float = 0.3,
) -> Any:
    """Write a random adapter as PEFT does, and return the model with it merged."""
    model = load_causal_lm(model_path, dtype="float32")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in layers:
            outputs, inputs = module.weight.shape
            a = torch.randn(rank, inputs, generator=generator) * scale * inputs**-0.5
            b = torch.randn(outputs, rank, generator=generator) * scale
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            with torch.no_grad():
                module.weight += SCALING * b @ a
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"r": rank, "lora_alpha": SCALING * rank}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return model


def add(batch: ContinuousBatch, number: int, directory: Path) -> None:
    bank = batch.open_adapters()
    bank.add(number, bank.read(directory))


def of(number: int, name: str, asked: Sequence[int], **options: Any) -> GenerationRequest:
    return dataclasses.replace(request(name, asked, **options), adapter=number)


def check(ended: Generation, asked: Sequence[int], model: Any, version: int) -> None:
    """Check the log-probabilities against a model with merged weights."""
    tokens = ended.token_ids.tolist()
    (expected,) = trainer_logprobs(model, [asked], [tokens], temperature=1.0)
    np.testing.assert_allclose(ended.sampler_logprobs, expected, atol=2e-5)
    assert set(ended.policy_versions.tolist()) == {version}


@pytest.mark.parametrize("fused", [True, False])
def test_each_row_of_a_batch_is_sampled_by_its_own_adapter(
    model_path: Path, tmp_path: Path, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks and layers differ, prompts are shared, and one request has no adapter."""
    if not fused:
        monkeypatch.setattr(
            "rlsys.engines.generation.torch.backbone.is_llama_like", lambda model: False
        )
    models = {
        0: load_causal_lm(model_path, dtype="float32"),
        3: write_adapter(model_path, tmp_path / "3", seed=3, rank=4),
        5: write_adapter(model_path, tmp_path / "5", seed=5, rank=8),
        6: write_adapter(model_path, tmp_path / "6", seed=6, rank=2, layers=("q_proj", "v_proj")),
    }
    batch = batch_of(load_causal_lm(model_path, dtype="float32"), max_running=6)
    for number in (3, 5, 6):
        add(batch, number, tmp_path / str(number))
    asked = [prompt(5 + number % 3, seed=number // 8) for number in range(12)]
    numbers = [list(models)[number % 4] for number in range(12)]
    requests = [
        of(number, str(index), asked[index], seed=index // 4, max_tokens=6 + index)
        for index, number in enumerate(numbers)
    ]
    ended = run(batch, requests)
    for index, number in enumerate(numbers):
        check(ended[str(index)], asked[index], models[number], number)
    # Equal prompts and seeds: the adapters made the difference.
    assert len({tuple(ended[str(index)].token_ids.tolist()) for index in range(4)}) > 1
    alone = run(batch, [requests[5]])["5"]
    assert alone.token_ids.tolist() == ended["5"].token_ids.tolist()


def test_drafts_of_adapters_change_no_token(model_path: Path, tmp_path: Path) -> None:
    """Rows of different adapters draft in one pass with a row without an adapter."""
    models = {
        0: load_causal_lm(model_path, dtype="float32"),
        3: write_adapter(model_path, tmp_path / "3", seed=3, rank=4),
        5: write_adapter(model_path, tmp_path / "5", seed=5, rank=8),
    }
    policy = always()
    batches = [
        batch_of(load_causal_lm(model_path, dtype="float32"), max_running=6, **options)
        for options in ({}, {"draft_policy": policy})
    ]
    asked = (5, 9, 11, 5, 9, 11, 5, 9, 11, 5, 9)
    requests = [of(number, str(number), asked, temperature=0.4, max_tokens=60) for number in models]
    for batch in batches:
        for number in (3, 5):
            add(batch, number, tmp_path / str(number))
    plain, drafted = (run(batch, requests) for batch in batches)
    for name, expected in plain.items():
        assert np.array_equal(drafted[name].token_ids, expected.token_ids)
        tokens = expected.token_ids.tolist()
        (own,) = trainer_logprobs(models[int(name)], [asked], [tokens], temperature=0.4)
        np.testing.assert_allclose(drafted[name].sampler_logprobs, own, atol=2e-5)
    assert policy.num_accepted > 0


def test_keys_and_values_are_reused_by_the_same_adapter_only(
    model_path: Path, tmp_path: Path
) -> None:
    models = {
        number: write_adapter(model_path, tmp_path / str(number), seed=number, rank=4)
        for number in (1, 2)
    }
    batch = batch_of(load_causal_lm(model_path, dtype="float32"))
    for number in models:
        add(batch, number, tmp_path / str(number))
    asked = prompt(20)
    first = run(batch, [of(1, "first", asked, max_tokens=30)])["first"]
    longer = [*asked, *first.token_ids.tolist(), 7, 8, 9]
    for number, reused in ((2, False), (1, True)):
        before = batch.num_reused_tokens
        found = run(batch, [of(number, f"second {number}", longer)])[f"second {number}"]
        check(found, longer, models[number], number)
        assert (batch.num_reused_tokens > before) == reused


def test_an_adapter_that_overflows_harms_no_other_row(model_path: Path, tmp_path: Path) -> None:
    good = write_adapter(model_path, tmp_path / "1", seed=1, rank=4)
    write_adapter(model_path, tmp_path / "2", seed=2, rank=4, scale=1e30)
    batch = batch_of(load_causal_lm(model_path, dtype="float32"))
    for number in (1, 2):
        add(batch, number, tmp_path / str(number))
    bank = batch.open_adapters()
    bank.select(np.array([1, 2, 0]), np.array([1, 2, 0]), num_rows=3)
    name = "model.layers.0.self_attn.q_proj"
    layer = load_causal_lm(model_path, dtype="float32").get_submodule(name)
    x = torch.ones(3, layer.in_features)
    with torch.no_grad():
        found = bank.add_to((name,), x, torch.zeros(3, layer.out_features))
        expected = good.get_submodule(name)(x[:1]) - layer(x[:1])
    assert not torch.isfinite(found[1]).all()
    torch.testing.assert_close(found[:1], expected, atol=1e-4, rtol=1e-4)
    assert not found[2].any()


def test_a_number_that_is_used_again_has_the_new_adapter(model_path: Path, tmp_path: Path) -> None:
    models = [
        write_adapter(model_path, tmp_path / str(seed), seed=seed, rank=4) for seed in range(2)
    ]
    batch = batch_of(load_causal_lm(model_path, dtype="float32"))
    asked = prompt(6)
    for seed, model in enumerate(models):
        add(batch, 9, tmp_path / str(seed))
        name = f"request {seed}"
        check(run(batch, [of(9, name, asked)])[name], asked, model, 9)
    batch.open_adapters().remove(9)
    with invalid("request 'late': adapter", 9):
        batch.check(of(9, "late", asked))


class Projections(nn.Module):
    """Layers with the same input, without a head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(1024, 1024), nn.Linear(1024, 512), nn.Linear(1024, 512)

    def get_output_embeddings(self) -> None:
        return None

    def factors(self, seed: int, rank: int) -> dict[str, LayerFactors]:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: LayerFactors(
                a=torch.randn(rank, layer.in_features, generator=generator) / 32,
                b=torch.randn(layer.out_features, rank, generator=generator),
                scaling=1.0,
                is_turned=False,
            )
            for name, layer in self.named_children()
            if isinstance(layer, nn.Linear)
        }


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several threads divide the sums of a product by its number of rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("others", [(8, 4), (64, 8), (1, 1)])
@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_an_adapter_has_the_bits_among_others_that_it_has_alone(
    rank: int, others: tuple[int, int], num_tokens: int
) -> None:
    model = Projections()
    numbers = np.array([1] * 3 + [2, 3, 0] * 2)
    x = torch.randn(16, num_tokens, 1024, generator=torch.Generator().manual_seed(0))
    found = []
    for banked in ((rank, *others), (rank,)):
        bank = AdapterBank(model)
        group = bank.group([model.q, model.k, model.v])
        for number, one in enumerate(banked, 1):
            bank.add(number, model.factors(number, one))
        rows = numbers if len(banked) > 1 else numbers[:3]
        bank.select(rows, rows, num_rows=16)
        with torch.no_grad():
            found.append(bank.add_to(group, x, torch.zeros(16, num_tokens, 2048))[:3])
    assert torch.equal(found[0], found[1])


def test_an_adapter_of_the_head_is_refused(model_path: Path, tmp_path: Path) -> None:
    write_adapter(model_path, tmp_path / "head", seed=0, rank=4, layers=("lm_head",))
    batch = batch_of(load_causal_lm(model_path, dtype="float32"))
    with invalid("adapter", str(tmp_path / "head")):
        add(batch, 1, tmp_path / "head")


def test_adapters_that_do_not_fit_are_refused(model_path: Path, tmp_path: Path) -> None:
    other = build_model(tmp_path / "other", "qwen3", width=64)
    write_adapter(other, tmp_path / "wide", seed=0, rank=4)
    write_adapter(model_path, tmp_path / "nan", seed=0, rank=4, scale=float("nan"))
    batch = batch_of(load_causal_lm(model_path, dtype="float32"))
    for name in ("wide", "nan"):
        with invalid("adapter", str(tmp_path / name)):
            add(batch, 1, tmp_path / name)
    (tmp_path / "nan" / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="nan"):
        add(batch, 1, tmp_path / "nan")
    with invalid("request 'x': adapter", 1):
        batch.check(of(1, "x", prompt(3)))


def test_the_engine_loads_adapters_while_it_samples(model_path: Path, tmp_path: Path) -> None:
    models = {
        number: write_adapter(model_path, tmp_path / str(number), seed=number, rank=4)
        for number in (1, 2)
    }
    asked = prompt(8)

    async def main() -> dict[str, Generation]:
        config = RolloutConfig(max_running=16, kv_cache_gib=0.05)
        engine = TorchEngine(model_path, config, dtype="float32", stop_token_ids=())
        assert isinstance(engine, AdapterEngine)
        await engine.start()
        try:
            ended: dict[str, Generation] = {}
            for number in models:
                await engine.add_adapter(number, tmp_path / str(number))
                engine.submit([of(number, str(number), asked, max_tokens=60)])
            while len(ended) < 2:
                ended |= {one.request_id: one for one in await engine.collect()}
            await engine.drop_adapter(1)
            with invalid("request 'again': adapter", 1):
                engine.submit([of(1, "again", asked)])
            return ended
        finally:
            await engine.close()

    ended = asyncio.run(main())
    for number, model in models.items():
        check(ended[str(number)], asked, model, number)
