"""The training engine on one GPU, against the same engine on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlsys.engines.models.causal_lm import Head, load_causal_lm
from rlsys.reallocation.transport.shared_memory import SharedMemory
from rlsys.reallocation.transport.tensor_copies import copy_parts
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
    train_step,
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
            train_step(one, make_rows(6, seed=step))
        held = torch.cuda.memory_allocated()
        engine.release()
        assert held - torch.cuda.memory_allocated() >= sum(
            tensor.numel() * 12 for tensor in weights(expected).values()
        )
        engine.take_back()
    assert_same(weights(engine), weights(expected), rtol=0, atol=0)


def test_copies_between_host_and_device_are_exact() -> None:
    on_device = torch.randn(5000, 3001, device="cuda")  # four pieces, the last one smaller
    in_host = torch.empty(5000, 3001, dtype=torch.bfloat16)
    copy_parts([(in_host, on_device)])
    assert torch.equal(in_host, on_device.cpu().bfloat16())

    in_rows = torch.empty(5000, 3001, device="cuda", dtype=torch.bfloat16)
    in_columns = torch.empty(3001, 5000, device="cuda").t()
    scalar = torch.empty((), device="cuda")
    copy_parts([(in_rows, in_host), (in_columns, in_host), (scalar, torch.tensor(2.5))])
    assert torch.equal(in_rows.cpu(), in_host)
    assert torch.equal(in_columns.cpu(), in_host.float())
    assert scalar.item() == 2.5

    other = torch.empty(3001, 5000, device="cuda", dtype=torch.bfloat16).t()
    copy_parts([(other, in_columns.t()[:, :5000].t())])
    with torch.cuda.stream(torch.cuda.Stream()):  # the copy has finished
        assert torch.equal(other, in_rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_published_version_has_the_exported_weights(
    model_path: Path, dtype: str, tmp_path: Path
) -> None:
    engine = make_engine(model_path, device="cuda", dtype=dtype)
    for step in range(2):
        train_step(engine, make_rows(6, seed=step))
        published = weights(engine)
        engine.export(tmp_path / str(step))
        exported = load_file(tmp_path / str(step) / "model.safetensors")
        assert exported.keys() <= published.keys()
        for name, tensor in exported.items():
            assert torch.equal(published[name], tensor), name


def test_a_snapshot_restores_weights_and_moments(model_path: Path) -> None:
    engine = make_engine(model_path, device="cuda", dtype="bfloat16")
    train_step(engine, make_rows(6))
    owner = SharedMemory("rlsys-snapshots", engine.snapshot_bytes(2), purpose="a test")
    file = engine.open_snapshots(owner.path, owner.name)
    engine.snapshot(file)
    restored = make_engine(model_path, device="cuda", dtype="bfloat16")
    restored.restore(restored.open_snapshots(owner.path, owner.name), 1)
    assert_same(weights(restored), weights(engine), rtol=0, atol=0)
    for one in (engine, restored):
        train_step(one, make_rows(6, seed=1))
    assert_same(weights(restored), weights(engine), rtol=0, atol=0)
    owner.close()
