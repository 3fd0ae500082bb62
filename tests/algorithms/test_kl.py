import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithms.kl import k1, k2, k3, unbiased_k3

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)


def test_estimates_by_hand() -> None:
    p, q = torch.tensor([-1.0, -1.0]), torch.tensor([-3.0, -1.0])
    assert k1(p, q).tolist() == [2.0, 0.0]
    assert k2(p, q).tolist() == [2.0, 0.0]
    assert k3(p, q).tolist() == pytest.approx([math.exp(-2) - 1 + 2, 0.0])
    sampler = torch.tensor([-2.0, -1.0])
    assert unbiased_k3(p, q, sampler).tolist() == pytest.approx([math.e * (math.exp(-2) + 1), 0.0])


def test_unbiased_estimators_have_the_divergence_as_their_expectation() -> None:
    divergence = float((P * (P / Q).log()).sum())
    for estimate in (k1, k3):
        assert float((P * estimate(P.log(), Q.log())).sum()) == pytest.approx(divergence)
    # Sampled from another policy μ, only the corrected one is still unbiased.
    mu = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    assert float((mu * unbiased_k3(P.log(), Q.log(), mu.log())).sum()) == pytest.approx(divergence)
    assert float((mu * k3(P.log(), Q.log())).sum()) != pytest.approx(divergence, rel=1e-2)


def test_gradient_of_the_unbiased_penalty_is_that_of_the_divergence() -> None:
    logits = P.log().requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - Q.log())).sum(), logits)
    logprobs = torch.log_softmax(logits, -1)
    mu = logprobs.detach()
    penalty = (mu.exp() * unbiased_k3(logprobs, Q.log(), mu)).sum()
    torch.testing.assert_close(torch.autograd.grad(penalty, logits)[0], exact)


@pytest.mark.parametrize("p", [-math.inf, -200.0, -1.0, 0.0])
@pytest.mark.parametrize("q", [-math.inf, -200.0, -1.0, 0.0])
def test_estimates_of_excluded_tokens_are_finite_and_k3_is_bounded(p: float, q: float) -> None:
    for estimate in (k1, k2, k3, lambda p, q: unbiased_k3(p, q, q), lambda p, q: k3(q, p)):
        policy = torch.tensor([p], requires_grad=True)
        found = estimate(policy, torch.tensor([q]))
        (gradient,) = torch.autograd.grad(found.sum(), policy)
        assert found.isfinite().all()
        assert gradient.isfinite().all()
    assert 0 <= float(k3(torch.tensor(p), torch.tensor(q))) <= 10


def test_k3_is_cut_at_10() -> None:
    q = torch.zeros(3)
    found = k3(torch.tensor([-2.0, -3.0, 12.0]), q)  # e² − 1 − 2; e³ − 4 = 16 → 10; 11 → 10
    assert found.tolist() == pytest.approx([math.exp(2) - 3, 10.0, 10.0])


@given(x=st.floats(-5, 5), y=st.floats(-5, 5))
def test_k3_is_never_negative(x: float, y: float) -> None:
    p, q = torch.tensor([x], dtype=torch.float64), torch.tensor([y], dtype=torch.float64)
    assert float(k3(p, q)) >= 0
    assert float(k3(p, p)) == 0


def test_k3_keeps_its_digits_where_policies_nearly_agree() -> None:
    tiny = torch.tensor([1e-4])  # x²/2 = 5e-9, far below the rounding of exp(x) − 1 in float32
    assert float(k3(tiny, torch.zeros(1))) == pytest.approx(5e-9, rel=0.02)
