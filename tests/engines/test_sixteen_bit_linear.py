"""16-bit products through float32, also on CPUs with 16-bit instructions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rlsys.engines.devices import sixteen_bit_linear
from rlsys.engines.devices.sixteen_bit_linear import (
    rounded_linear,
    use_float32_products,
    wants_float32,
)
from tests.engines.torch_engine_harness import build_model
from tests.engines.training_harness import make_engine, make_rows

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sixteen_bit_linear, "_multiplies", lambda dtype: False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 3, 24), (0, 24)])
def test_products_are_rounded_once(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias).to(dtype)
    exact = nn.Linear(24, 40, bias=bias)
    exact.load_state_dict({name: tensor.float() for name, tensor in layer.state_dict().items()})
    x = torch.randn(shape).to(dtype).requires_grad_()
    y = x.detach().float().requires_grad_()
    use_float32_products(layer)
    found, expected = layer(x), exact(y)
    assert found.dtype is dtype
    assert found.shape == expected.shape
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(found.float(), expected, rtol=rounding, atol=1e-6)
    grad = torch.randn(expected.shape).to(dtype)
    found.backward(grad)
    expected.backward(grad.float())
    pairs = [(x, y), *zip(layer.parameters(), exact.parameters(), strict=True)]
    for one, other in pairs:
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=rounding, atol=1e-6)


def test_a_layer_keeps_its_name_and_takes_other_precisions() -> None:
    layer = nn.Linear(8, 4)
    use_float32_products(layer)
    use_float32_products(layer)  # once is enough
    assert type(layer).__mro__[2] is nn.Linear
    x = torch.randn(3, 8)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    output = layer.to(torch.float16)(x.half())
    output += 1  # as some models do
    output.sum().backward()


def test_precisions_of_the_cpu_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sixteen_bit_linear, "_multiplies", lambda dtype: dtype is torch.bfloat16)
    tensors = {dtype: torch.ones(2, 2, dtype=dtype) for dtype in (*DTYPES, torch.float32)}
    wanting = [dtype for dtype, one in tensors.items() if wants_float32(one, one)]
    assert wanting == [torch.float16]
    assert not wants_float32(tensors[torch.float32], tensors[torch.float16])
    monkeypatch.setattr(sixteen_bit_linear, "_multiplies", lambda dtype: True)
    layer = nn.Linear(8, 4)
    use_float32_products(layer)
    assert type(layer) is nn.Linear


def test_no_rows_give_no_rows() -> None:
    weight = torch.ones(3, 2, dtype=torch.float16)
    assert rounded_linear(torch.empty(0, 5, 2, dtype=torch.float16), weight, None).shape == (
        0,
        5,
        3,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_both_products_give_the_same_log_probabilities(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    path = build_model(tmp_path, "llama")
    rows = make_rows(3)
    through_float32 = make_engine(path, dtype=dtype).infer(rows)
    monkeypatch.setattr(sixteen_bit_linear, "_multiplies", lambda dtype: True)
    by_torch = make_engine(path, dtype=dtype).infer(rows)
    tolerance = 40 * torch.finfo(getattr(torch, dtype)).eps
    for one, other in zip(through_float32, by_torch, strict=True):
        assert one == pytest.approx(other, abs=tolerance)
