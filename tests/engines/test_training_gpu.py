"""The training engine on one GPU, against the same engine on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.engines.models.causal_lm import Head, load_causal_lm
from tests.engines.torch_engine_harness import FAMILIES, build_model
from tests.engines.training_harness import (
    VOCABULARY,
    accumulate,
    assert_same,
    gradients,
    make_engine,
    make_rows,
    save,
    tiny_model,
    weights,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("gpu") / "qwen3")


def test_float32_trains_as_on_the_cpu(model_path: Path) -> None:
    engines = [make_engine(model_path, device=device) for device in ("cpu", "cuda")]
    for engine in engines:
        accumulate(engine, [make_rows(12), []])
    expected, found = (gradients(engine) for engine in engines)
    assert_same({n: g.cpu() for n, g in found.items()}, expected, rtol=1e-3, atol=1e-4)
    cpu, gpu = (engine.optimizer_step() for engine in engines)
    assert gpu.metrics == pytest.approx(cpu.metrics, rel=1e-3, abs=1e-5)
    assert_same(weights(engines[1]), weights(engines[0]), rtol=1e-2, atol=1e-3)


def test_bfloat16_trains_close_to_float32(model_path: Path, tmp_path: Path) -> None:
    exact = make_engine(model_path)
    options = {"gradient_checkpointing": "full", "optimizer_state": "cpu_bfloat16"}
    engine = make_engine(model_path, device="cuda", dtype="bfloat16", **options)
    for each in (exact, engine):
        accumulate(each, [make_rows(12)])
    loss = exact.optimizer_step().metrics["loss"]
    assert engine.optimizer_step().metrics["loss"] == pytest.approx(loss, rel=0.05)
    assert {tensor.dtype for tensor in weights(engine).values()} == {torch.bfloat16}

    save(engine, tmp_path / "saved")
    again = make_engine(model_path, device="cuda", dtype="bfloat16", optimizer_state="bfloat16")
    again.load(tmp_path / "saved")
    rows = make_rows(3)
    for one, other in zip(engine.infer(rows), again.infer(rows), strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    engine.export(tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").is_file()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_attention_in_blocks_trains_as_on_the_cpu(
    family: Any, checkpointing: str, tmp_path: Path
) -> None:
    """Use windows and soft caps, on rows with and without shared prefixes."""
    path = build_model(tmp_path, family)
    options = {"gradient_checkpointing": checkpointing}
    engines = [make_engine(path, device=device, **options) for device in ("cpu", "cuda")]
    for engine in engines:
        accumulate(engine, [make_rows(12), make_rows(5, seed=1)])
    expected, found = (gradients(engine) for engine in engines)
    assert_same({n: g.cpu() for n, g in found.items()}, expected, rtol=1e-3, atol=1e-4)


def test_a_16_bit_heads_product_and_gradients_are_float32_sums(model_path: Path) -> None:
    model = load_causal_lm(model_path, dtype="bfloat16", device="cuda")
    head = Head(model)
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        weight.mul_(100)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, generator=generator).cuda().bfloat16()
    grad = torch.randn(64, VOCABULARY, generator=generator).cuda().bfloat16().float()
    expected = hidden.double() @ weight.double().T
    with torch.no_grad():
        torch.testing.assert_close(head(hidden).double(), expected, rtol=1e-5, atol=1e-4)
    chunked = head.for_chunks()
    logits = torch.cat([chunked(part) for part in hidden.split(2)])
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)
    logits.backward(grad)
    exact = grad.double().T @ hidden.double()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_released_memory_is_free_and_comes_back(model_path: Path, dtype: str) -> None:
    engine, expected = (make_engine(model_path, device="cuda", dtype=dtype) for _ in range(2))
    for step in range(2):
        for one in (engine, expected):
            accumulate(one, [make_rows(6, seed=step)])
            one.optimizer_step()
        held = torch.cuda.memory_allocated()
        engine.release()
        assert held - torch.cuda.memory_allocated() >= sum(
            tensor.numel() * 12 for tensor in weights(expected).values()
        )
        engine.take_back()
    assert_same(weights(engine), weights(expected), rtol=0, atol=0)
