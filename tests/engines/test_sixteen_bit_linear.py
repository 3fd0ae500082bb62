"""16-bit products through float32, on CPUs with instructions for them too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rlsys.engines import onednn_linear, sixteen_bit_linear
from rlsys.engines.sixteen_bit_linear import (
    linear_function,
    rounded_linear,
    use_float32_products,
    wants_float32,
)
from tests.engines.torch_engine_harness import build_model
from tests.engines.training_harness import make_engine, make_rows

DTYPES = [torch.bfloat16, torch.float16]
ROWS_FOR_FLOAT32 = sixteen_bit_linear._rows_for_float32.__wrapped__  # not remembered


def let_float32_begin(
    monkeypatch: pytest.MonkeyPatch, *, bfloat16: int | None, float16: int | None
) -> None:
    """At so many rows; None: never."""
    rows = {torch.bfloat16: bfloat16, torch.float16: float16}
    monkeypatch.setattr(sixteen_bit_linear, "_rows_for_float32", rows.__getitem__)


@pytest.fixture(autouse=True)
def _lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    let_float32_begin(monkeypatch, bfloat16=0, float16=0)


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


def test_what_a_cpu_multiplies_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    let_float32_begin(monkeypatch, bfloat16=None, float16=0)
    tensors = {dtype: torch.ones(2, 2, dtype=dtype) for dtype in (*DTYPES, torch.float32)}
    wanting = [dtype for dtype, one in tensors.items() if wants_float32(one, one)]
    assert wanting == [torch.float16]
    assert not wants_float32(tensors[torch.float32], tensors[torch.float16])
    let_float32_begin(monkeypatch, bfloat16=None, float16=None)
    layer = nn.Linear(8, 4)
    use_float32_products(layer)
    assert type(layer) is nn.Linear


def test_few_rows_are_left_to_torch_where_it_has_the_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_float32_begin(monkeypatch, bfloat16=64, float16=None)
    weight = torch.ones(2, 4, dtype=torch.bfloat16)
    wanting = [
        wants_float32(torch.ones(*shape, 4, dtype=torch.bfloat16), weight)
        for shape in ((63,), (64,), (9, 7), (8, 8), ())
    ]
    assert wanting == [False, True, False, True, False]


@pytest.mark.parametrize(
    ("supported", "amx", "onednn", "rows"),
    [
        pytest.param(False, False, False, 0, id="no instructions"),
        pytest.param(True, True, False, None, id="AMX"),
        pytest.param(True, False, True, None, id="AVX-512 BF16, AMD"),
        pytest.param(True, False, False, 64, id="AVX-512 BF16, Intel"),
    ],
)
def test_the_cpu_decides_from_how_many_rows_on(
    supported: bool, amx: bool, onednn: bool, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sixteen_bit_linear, "_rows_for_float32", ROWS_FOR_FLOAT32)
    monkeypatch.setattr(sixteen_bit_linear, "_multiplies", lambda dtype: supported)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(onednn_linear, "is_faster", lambda: onednn)
    assert ROWS_FOR_FLOAT32(torch.bfloat16) == rows
    assert ROWS_FOR_FLOAT32(torch.float16) == (None if supported else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 63, 64])
def test_a_layer_of_the_sampler_takes_either_way(
    num_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_float32_begin(monkeypatch, bfloat16=64, float16=None)
    torch.manual_seed(0)
    weight, bias = torch.randn(40, 24).to(dtype), torch.randn(40).to(dtype)
    x = torch.randn(num_rows, 24).to(dtype)
    found = linear_function(weight, bias)(x)
    assert found.dtype is dtype
    exact = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=0.02)


def test_no_rows_give_no_rows() -> None:
    weight = torch.ones(3, 2, dtype=torch.float16)
    assert rounded_linear(torch.empty(0, 5, 2, dtype=torch.float16), weight, None).shape == (
        0,
        5,
        3,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_either_product_trains_alike(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    path = build_model(tmp_path, "llama")
    rows = make_rows(3)
    through_float32 = make_engine(path, dtype=dtype).infer(rows)
    let_float32_begin(monkeypatch, bfloat16=None, float16=None)
    by_torch = make_engine(path, dtype=dtype).infer(rows)
    tolerance = 40 * torch.finfo(getattr(torch, dtype)).eps
    for one, other in zip(through_float32, by_torch, strict=True):
        assert one == pytest.approx(other, abs=tolerance)
