"""16-bit attention through float32, on CPUs with a fast kernel for it too."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from rlsys.engines import sixteen_bit_attention
from rlsys.engines.sixteen_bit_attention import Attend, in_float32

ATTEND: Attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)


@pytest.fixture(autouse=True)
def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sixteen_bit_attention, "_is_slow", lambda dtype: True)


def heads(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value [B, H, T, D]: four heads over two of keys."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, n, 9, 16).to(dtype).requires_grad_() for n in (4, 2, 2))
    return query, key, value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_and_gradients_are_float32s_rounded_once(dtype: torch.dtype) -> None:
    inputs = heads(dtype)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    found, expected = in_float32(ATTEND, *inputs), ATTEND(exact[0], exact[1], exact[2])
    assert found.dtype is dtype
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=1e-5)
    grad = torch.randn(expected.shape).to(dtype)
    found.backward(grad)
    expected.backward(grad.double())
    for one, other in zip(inputs, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        # The result is kept in 16 bits, which the gradient goes by.
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=rounding, atol=8 * rounding)


def test_what_is_kept_is_16_bit_but_for_what_weights_go_by() -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    class Product(torch.autograd.Function):
        """Keeps a tensor of each kind."""

        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, x.logsumexp(-1))
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
            for tensor in ctx.saved_tensors:  # type: ignore[attr-defined]
                keep(tensor)
            return grad

    def attend(query: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Product.apply(query + 2**-12)  # bfloat16 has no room for it
        return result

    query = torch.ones(1, 1, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    in_float32(attend, query, query, query).sum().backward()
    assert [tensor.dtype for tensor in kept] == [torch.float32] * 2
    assert torch.equal(kept[0], torch.ones(1, 1, 2, 4)), "was rounded while it was kept"
    exact = torch.full((1, 1, 2, 4), 1 + 2**-12).logsumexp(-1)
    assert torch.equal(kept[1], exact)


def test_others_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        seen.append(query.dtype)
        return query

    in_float32(attend, *heads(torch.float64))
    in_float32(attend, *heads(torch.float32))
    monkeypatch.setattr(sixteen_bit_attention, "_is_slow", lambda dtype: False)
    in_float32(attend, *heads(torch.bfloat16))
    assert seen == [torch.float64, torch.float32, torch.bfloat16]
