from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.models.rms_norm import fused_rms_norm, rms_norm, use_fast_norms
from tests.engines.torch_engine_harness import FAMILIES, build_model
from tests.tiers import rest_slow


def test_one_row_by_hand() -> None:
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    # mean(x²) = 12.5, and 12.5 + 3.5 = 4².
    assert rms_norm(x, weight, 3.5).tolist() == [[0.75, 2.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_norm_rounds_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, grad = torch.randn(7, 33), torch.randn(33), torch.randn(7, 33)
    x, weight, grad = (one.to(dtype) for one in (x, weight, grad))
    exact = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = rms_norm(exact[0], exact[1], 1e-6)
    expected.backward(grad.double())
    found = x.requires_grad_(), weight.requires_grad_()
    normed = fused_rms_norm(found[0], found[1], 1e-6)
    normed.backward(grad)
    precision = 2**-8 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(normed.double(), expected, rtol=precision, atol=1e-6)
    for one, wanted in zip(found, exact, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), wanted.grad, rtol=precision, atol=precision)


@pytest.mark.parametrize("family", rest_slow(FAMILIES))
def test_a_model_computes_the_same_with_fused_norms(family: Any, tmp_path: Path) -> None:
    path = build_model(tmp_path, family)
    token_ids = torch.arange(12).view(2, 6)
    logits = []
    for fused in (False, True):
        model = load_causal_lm(path, dtype="float32")
        use_fast_norms(model, fused=fused)
        with torch.no_grad():
            logits.append(model(input_ids=token_ids, use_cache=False).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_definition() -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 0.1), (x, weight))


@pytest.mark.parametrize("family", rest_slow(FAMILIES))
def test_a_model_computes_the_same(family: Any, tmp_path: Path) -> None:
    model = load_causal_lm(build_model(tmp_path, family), dtype="float32")
    token_ids = torch.arange(12).view(2, 6)
    results = []
    for fast in (False, True):
        if fast:
            use_fast_norms(model)
            norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
            assert norms
            assert all(type(norm).__name__.startswith("Fast") for norm in norms)
        model.zero_grad()
        logits = model(input_ids=token_ids, use_cache=False).logits
        logits.square().mean().backward()
        results.append([logits, *(parameter.grad.clone() for parameter in model.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-5)


def test_other_formulas_and_precisions_are_not_replaced() -> None:
    class OddRMSNorm(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 0.5

    model = nn.Sequential(OddRMSNorm(4, eps=1e-6), nn.RMSNorm(4, eps=1e-6))
    use_fast_norms(model)
    assert type(model[0]) is OddRMSNorm
    assert type(model[1]).__name__ == "FastRMSNorm"
    half = model[1].to(torch.bfloat16)
    assert half(torch.ones(2, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16
