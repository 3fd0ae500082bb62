"""Sign and size of each gradient on both sides of each bound, against the formula by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithms.composed import corrected, decoupled_clipped_surrogate, kl_cov, with_kl
from rlsys.algorithms.corrections import icepop, tis
from rlsys.algorithms.kl import Estimator, estimate, k2, k3, unbiased_k3
from rlsys.algorithms.loss_inputs import LossFn, LossInputs, ValueInputs
from rlsys.algorithms.losses import (
    aipo,
    cispo,
    clipped_surrogate,
    dppo_mask,
    gmpo,
    gspo,
    reinforce,
    sapo_soft,
)
from rlsys.algorithms.masks import reject
from rlsys.algorithms.preferences import orpo, slic
from rlsys.algorithms.values import clipped_value_loss
from rlsys.tinker_server.api_losses import loss_of
from tests.errors import invalid
from tests.tiers import rest_slow

# Beyond every bound of this package on both sides, and both e^±20 and 13.6, where k3 is bounded.
LOG_RATIOS = [-25.0, -19.0, -11.5, -3.0, -2.0, -0.5, -0.1, 0.0, 0.1, 0.2, 0.5, 1.2, 2.0, 3.0, 12.0]
BEYOND = [*LOG_RATIOS, 19.0, 21.0, 25.0]
BOUND_OF_K3 = math.exp(2.610868638149876)  # e^y where e^y − 1 − y = 10


def gradient(loss: LossFn, log_ratio: float, advantage: float, proximal: float | None) -> float:
    """Return d loss/d log π_θ of one token with log π_θ/μ = `log_ratio`.

    `proximal` is log π_prox/μ; None: π_prox = π_θ.
    """
    trainer = torch.tensor([-30.0 + log_ratio], dtype=torch.float64, requires_grad=True)
    base = trainer.detach()
    values, _ = loss(
        LossInputs(
            trainer_logprobs=trainer,
            proximal_logprobs=base if proximal is None else torch.full_like(base, -30.0 + proximal),
            sampler_logprobs=torch.full_like(base, -30.0),
            advantages=torch.full_like(base, advantage),
            entropy=torch.zeros_like(base),
            staleness=torch.zeros(1, dtype=torch.int64),
            row_index=torch.zeros(1, dtype=torch.int64),
            columns={"sequence_ratio_mask": torch.ones_like(base)},
        )
    )
    (found,) = torch.autograd.grad(values.sum(), trainer)
    return float(found)


def clip(r: float, low: float, high: float) -> float:
    return min(max(r, low), high)


def ppo(low: float, high: float, dual: float = math.inf) -> Callable[[float, float], float]:
    """−r·A inside the clip, 0 where the clip holds, and beyond e^20 (ratios.py)."""

    def slope(r: float, a: float) -> float:
        held = r > high if a > 0 else r < low or r > dual
        return 0.0 if held or r > math.exp(20) else -r * a

    return slope


def soft(r: float, a: float) -> float:
    gate = 1 / (1 + math.exp(-min(r - 1, 700)))
    return 0.0 if r > math.exp(20) else -4 * gate * (1 - gate) * r * a


BY_HAND: list[tuple[LossFn, Callable[[float, float], float]]] = [
    (reinforce(), lambda r, a: -a),
    (clipped_surrogate(0.2, 0.28), ppo(0.8, 1.28)),
    (clipped_surrogate(0.2, 0.28, dual_clip=3.0), ppo(0.8, 1.28, 3.0)),
    (gspo(0.2, 0.28), ppo(0.8, 1.28)),
    (gmpo(0.4), ppo(math.exp(-0.4), math.exp(0.4))),
    (cispo(5.0, 0.5), lambda r, a: -clip(r, 0.5, 5.0) * a),
    (aipo(4.0), lambda r, a: -min(r, 4.0) * a),
    (dppo_mask(0.2, 0.2), lambda r, a: -min(r, 20.0) * a),
    (sapo_soft(1.0, 1.0), soft),
    (corrected(reinforce(), tis(2.0)), lambda r, a: -min(r, 2.0) * a),
    (corrected(reinforce(), tis(2.0, floor=0.5)), lambda r, a: -clip(r, 0.5, 2.0) * a),
    (corrected(reinforce(), icepop(0.5, 5.0)), lambda r, a: -r * a if 0.5 <= r <= 5 else 0.0),
    # π_prox = π_θ: u = 1 is inside the clip, and w = r is truncated.
    (decoupled_clipped_surrogate(0.2, 0.2, 2.0), lambda r, a: -min(r, 2.0) * a),
    (loss_of("importance_sampling", {}), ppo(0.0, math.inf)),
    (loss_of("ppo", {}), ppo(0.8, 1.2)),
    (loss_of("cispo", {}), lambda r, a: -min(r, 4.0) * a),
    (loss_of("gspo", {}), ppo(0.9997, 1.0004)),
    (loss_of("dro", {"beta": 0.5}), lambda r, a: -a + 0.5 * math.log(r)),
]


@pytest.mark.parametrize(("loss", "by_hand"), BY_HAND, ids=[str(loss)[:40] for loss, _ in BY_HAND])
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_policy_losses_have_the_stated_gradient_on_both_sides_of_each_bound(
    loss: LossFn, by_hand: Callable[[float, float], float], advantage: float
) -> None:
    for log_ratio in BEYOND:
        found = gradient(loss, log_ratio, advantage, None)
        assert found == pytest.approx(by_hand(math.exp(log_ratio), advantage), abs=1e-12), log_ratio


def test_the_clip_of_decoupled_ppo_is_on_the_step_from_the_proximal_policy() -> None:
    loss = decoupled_clipped_surrogate(0.2, 0.2, 2.0)  # w = e, truncated to 2
    for moved in LOG_RATIOS:
        u = math.exp(moved)
        for advantage in (1.0, -1.0):
            expected = 2 * ppo(0.8, 1.2)(u, advantage)
            assert gradient(loss, 1 + moved, advantage, 1.0) == pytest.approx(expected)


def slope_of(name: Estimator, x: float, rho: float) -> float:
    """Return the derivative of the estimate by log π_θ as kl.py states it."""
    if name == "k1":
        return 1.0
    if name == "k2":
        return x
    if name == "k3":
        return 1 - min(math.exp(-x), BOUND_OF_K3)
    return rho * clip(x, -20, 20)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "unbiased_k3"])
@pytest.mark.parametrize("rho", [0.1, 1.0, 7.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_estimators_have_the_stated_gradient_on_both_sides_of_each_bound(
    name: Estimator, rho: float, dtype: torch.dtype
) -> None:
    for x in BEYOND:
        policy = torch.tensor([-30.0], dtype=dtype, requires_grad=True)
        found = estimate(name, policy, policy.detach() - x, policy.detach() - math.log(rho))
        (slope,) = torch.autograd.grad(found.sum(), policy)
        assert float(slope) == pytest.approx(slope_of(name, x, rho), rel=1e-5, abs=1e-6), x


@given(x=st.floats(-2.61, 10.5), log_rho=st.floats(-2, 2))
def test_inside_the_bounds_the_gradient_is_that_of_the_formula(x: float, log_rho: float) -> None:
    reference = torch.zeros(1, dtype=torch.float64)

    def plain(policy: torch.Tensor) -> torch.Tensor:
        return torch.exp(-(policy - reference)) - 1 + policy - reference

    def weighted(policy: torch.Tensor) -> torch.Tensor:
        return torch.exp(policy - (x - log_rho)) * plain(policy)

    formulas: list[tuple[Estimator, Callable[[torch.Tensor], torch.Tensor]]] = [
        ("k3", plain),
        ("unbiased_k3", weighted),
    ]
    for name, formula in formulas:
        policy = torch.tensor([x], dtype=torch.float64, requires_grad=True)
        found = estimate(name, policy, reference, policy.detach() - log_rho)
        expected = formula(policy)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(
            torch.autograd.grad(found.sum(), policy),
            torch.autograd.grad(expected.sum(), policy),
            rtol=1e-7,
            atol=1e-9,
        )


@given(x=st.floats(-60, 60).filter(lambda x: abs(x) > 1e-6))
def test_no_penalty_pushes_a_token_away_from_the_reference_or_leaves_it(x: float) -> None:
    for name in ("k2", "k3", "unbiased_k3"):
        policy = torch.tensor([-80.0], dtype=torch.float64, requires_grad=True)
        value = estimate(name, policy, policy.detach() - x, policy.detach())
        (slope,) = torch.autograd.grad(value.sum(), policy)
        assert math.copysign(1, float(slope)) == math.copysign(1, x)
        assert abs(float(slope)) > 0.6 * min(abs(x), 1 - 1 / math.e)


def test_the_gradient_of_kl_cov_returns_to_the_proximal_policy_from_any_distance() -> None:
    loss = kl_cov(reinforce(), min_covariance=-math.inf)
    for moved in BEYOND:
        expected = min(math.exp(moved), BOUND_OF_K3) - 1
        assert gradient(loss, moved, 0.0, 0.0) == pytest.approx(expected)


@pytest.mark.parametrize("name", rest_slow(["k2", "k3", "unbiased_k3"], only=("unbiased_k3",)))
@pytest.mark.parametrize(
    ("start", "reference"),
    rest_slow([(0.982, 0.5), (1 - 1e-4, 0.5), (0.5, 1e-5), (0.99, math.exp(-12))]),
)
def test_the_penalty_alone_takes_a_policy_of_two_actions_to_the_reference(
    name: Estimator, start: float, reference: float
) -> None:
    target = torch.tensor([reference, 1 - reference], dtype=torch.float64)
    logits = torch.tensor([start, 1 - start], dtype=torch.float64).log().requires_grad_()
    loss = with_kl(reinforce(), name, 1.0)
    for _ in range(4000):
        logprobs = torch.log_softmax(logits, -1)
        sampled = logprobs.detach()
        values, _ = loss(two_actions(logprobs, sampled, target.log()))
        (slope,) = torch.autograd.grad((sampled.exp() * values).sum(), logits)
        with torch.no_grad():
            logits -= 0.5 * slope
    assert float(torch.softmax(logits.detach(), -1)[0]) == pytest.approx(reference, abs=2e-3)


def test_the_unbiased_penalty_takes_it_there_with_tokens_of_an_old_policy_too() -> None:
    target = torch.tensor([0.5, 0.5], dtype=torch.float64)
    sampled = torch.tensor([0.9, 0.1], dtype=torch.float64).log()
    logits = torch.tensor([0.982, 0.018], dtype=torch.float64).log().requires_grad_()
    for _ in range(2000):
        logprobs = torch.log_softmax(logits, -1)
        values = unbiased_k3(logprobs, target.log(), sampled)
        (slope,) = torch.autograd.grad((sampled.exp() * values).sum(), logits)
        with torch.no_grad():
            logits -= 0.5 * slope
    assert float(torch.softmax(logits.detach(), -1)[0]) == pytest.approx(0.5, abs=1e-3)


def two_actions(
    logprobs: torch.Tensor, sampled: torch.Tensor, reference: torch.Tensor
) -> LossInputs:
    return LossInputs(
        trainer_logprobs=logprobs,
        proximal_logprobs=sampled,
        sampler_logprobs=sampled,
        advantages=torch.zeros_like(sampled),
        entropy=torch.zeros_like(sampled),
        staleness=torch.zeros(2, dtype=torch.int64),
        row_index=torch.arange(2),
        columns={"reference_logprobs": reference},
    )


def test_an_excluded_token_has_no_gradient() -> None:
    for estimator in (k2, k3, lambda p, q: unbiased_k3(p, q, torch.zeros(1))):
        policy = torch.tensor([-math.inf], requires_grad=True)
        (slope,) = torch.autograd.grad(estimator(policy, torch.zeros(1)).sum(), policy)
        assert slope.tolist() == [0.0]


def test_an_unbiased_penalty_is_not_weighted_a_second_time() -> None:
    with invalid("corrected: loss", with_kl(reinforce(), "unbiased_k3", 0.1)):
        corrected(with_kl(reinforce(), "unbiased_k3", 0.1), tis(2.0))
    corrected(with_kl(reinforce(), "k3", 0.1), tis(2.0))
    with_kl(corrected(reinforce(), tis(2.0)), "unbiased_k3", 0.1)


def test_rejection_by_k3_compares_the_unbounded_value() -> None:
    """exp(3) − 1 − 3 = 16.1 and exp(3.5) − 4.5 = 28.6: a limit of 20 separates them."""
    gap = torch.tensor([3.0, 3.5, 100.0], dtype=torch.float64)
    inputs = LossInputs(
        trainer_logprobs=gap - 200,
        proximal_logprobs=gap - 200,
        sampler_logprobs=torch.full_like(gap, -200),
        advantages=torch.ones_like(gap),
        entropy=torch.zeros_like(gap),
        staleness=torch.zeros(3, dtype=torch.int64),
        row_index=torch.arange(3),
    )
    assert reject("k3", high=20.0)(inputs)[0].tolist() == [1.0, 0.0, 0.0]


def pair_gradient(loss: LossFn, chosen: float, rejected: float) -> list[float]:
    """Return the gradient of a pair's loss by log π of its two rows of one token."""
    trainer = torch.tensor([chosen, rejected], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(2, dtype=torch.float64)
    values, _ = loss(
        LossInputs(
            trainer_logprobs=trainer,
            proximal_logprobs=zeros,
            sampler_logprobs=zeros,
            advantages=zeros,
            entropy=zeros,
            staleness=torch.zeros(2, dtype=torch.int64),
            row_index=torch.arange(2),
            group_index=torch.zeros(2, dtype=torch.int64),
            columns={
                "preference": torch.tensor([1.0, -1.0], dtype=torch.float64),
                "reference_logprobs": torch.full_like(zeros, -5.0),
            },
        )
    )
    (found,) = torch.autograd.grad(values[0], trainer)
    return [float(value) for value in found]


def test_orpo_lowers_a_rejected_completion_of_probability_one() -> None:
    """Odds of e^-1e-6 and more count as 1e6; their gradient stays, as does its sign."""
    weight, chosen = 0.5, -2.0
    odds_of_chosen = math.exp(chosen) / (1 - math.exp(chosen))
    for rejected in (-1.0, -1e-3, -1e-6, -1e-7, -1e-9):
        rest = -math.expm1(min(rejected, -1e-6))
        ratio = odds_of_chosen / ((1 - rest) / rest)
        wrong = 1 / (1 + ratio)  # σ(−margin)
        expected = [-1 - weight * wrong / (1 - math.exp(chosen)), weight * wrong / rest]
        assert pair_gradient(orpo(weight), chosen, rejected) == pytest.approx(expected, rel=1e-6)


def test_the_hinge_of_slic_ends_at_its_margin() -> None:
    assert pair_gradient(slic(0.1), -2.0, -11.9) == pytest.approx([-0.1, 0.1])
    assert pair_gradient(slic(0.1), -2.0, -12.1) == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize(
    ("value", "target", "expected"),
    [
        (0.1, 5.0, -4.9),  # inside the clip
        (0.3, 5.0, 0.0),  # moved by more than 0.2 towards its target
        (-0.3, 5.0, -5.3),  # moved away from it: keeps the whole gradient
        (-0.3, -5.0, 0.0),
        (0.3, 0.1, 0.2),  # beyond the target, which the clipped value is as far from
    ],
)
def test_the_clip_of_values_on_both_sides(value: float, target: float, expected: float) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    columns = {"values": torch.zeros(1), "returns": torch.tensor([target], dtype=torch.float64)}
    loss, _ = clipped_value_loss(0.2)(
        ValueInputs(values=values, row_index=torch.zeros(1, dtype=torch.int64), columns=columns)
    )
    (found,) = torch.autograd.grad(loss.sum(), values)
    assert float(found) == pytest.approx(expected)
