"""The fused update equals torch's AdamW, and its rounding is right on average."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlsys.engines.training.fused_adamw import AdamWCoefficients, _compiled, adamw, update


def coefficients(step: int, **changes: float) -> AdamWCoefficients:
    usual = {"rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    return AdamWCoefficients(**{**usual, **changes}, step=step)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_float32_moments_give_torchs_update(weight_decay: float) -> None:
    torch.manual_seed(0)
    weights = torch.randn(33)
    parameter = nn.Parameter(weights.clone())
    theirs = torch.optim.AdamW(
        [parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=weight_decay, eps=1e-8
    )
    first, second = torch.zeros(33), torch.zeros(33)
    for step in range(1, 6):
        gradient = torch.randn(33)
        parameter.grad = gradient.clone()
        theirs.step()
        numbers = coefficients(step, weight_decay=weight_decay).on(weights.device)
        update(weights, gradient, first, second, numbers, torch.tensor(step))
        torch.testing.assert_close(weights, parameter.detach(), rtol=1e-6, atol=1e-7)
    state = theirs.state[parameter]
    torch.testing.assert_close(first, state["exp_avg"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(second, state["exp_avg_sq"], rtol=1e-5, atol=1e-7)


def test_bfloat16_moments_are_neighbours_and_right_on_average() -> None:
    num = 200_000
    gradient = torch.full((num,), 1.0 + 0.3 * 2**-7)  # 0.3 of the way between two numbers
    first, second = (torch.zeros(num, dtype=torch.bfloat16) for _ in range(2))
    numbers = coefficients(1, beta1=0.0, beta2=0.0).on(gradient.device)
    update(torch.zeros(num), gradient, first, second, numbers, torch.tensor(7))
    assert first.unique().tolist() == [1.0, 1.0 + 2**-7]
    share = float((first > 1).double().mean())
    assert share == pytest.approx(0.3, abs=5 * (0.3 * 0.7 / num) ** 0.5)
    # The two moments are rounded independently.
    up = (first > 1).double(), (second > 1).double()
    correlation = torch.corrcoef(torch.stack(up))[0, 1]
    assert abs(float(correlation)) < 5 / num**0.5


def test_rounding_depends_on_the_seed() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(1000)
    moments = []
    for seed in (3, 3, 11):
        first, second = (torch.zeros(1000, dtype=torch.bfloat16) for _ in range(2))
        numbers = coefficients(1).on(gradient.device)
        update(torch.zeros(1000), gradient, first, second, numbers, torch.tensor(seed))
        moments.append(first)
    assert torch.equal(moments[0], moments[1])
    assert not torch.equal(moments[0], moments[2])


@pytest.mark.slow
def test_the_compiled_update_is_the_same() -> None:
    """Compiled as on a GPU, for pieces of two sizes and both precisions."""
    for dtype in (torch.float32, torch.bfloat16):
        for num in (100, 257):
            torch.manual_seed(num)
            weights, gradient = torch.randn(num), torch.randn(num)
            first, second = (torch.rand(num).to(dtype) for _ in range(2))
            found = [one.clone() for one in (weights, first, second)]
            numbers = coefficients(3).on(weights.device)
            adamw(weights, gradient, first, second, numbers, torch.tensor(5))
            _compiled()(found[0], gradient, *found[1:], numbers, torch.tensor(5))
            torch.testing.assert_close(found[0], weights, rtol=1e-6, atol=1e-7)
            for one, expected in zip(found[1:], (first, second), strict=True):
                # The compiler may contract products and sums, which may change a rounding.
                torch.testing.assert_close(one, expected, rtol=2**-7, atol=1e-6)
                assert float((one != expected).double().mean()) < 0.05
