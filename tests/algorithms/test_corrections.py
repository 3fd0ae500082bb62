import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlsys.algorithms.composed import (
    corrected,
    decoupled_clipped_surrogate,
    entropy_bonus,
    interpolate_proximal,
)
from rlsys.algorithms.corrections import Correction, icepop, sequence_icepop, sequence_tis, tis
from rlsys.algorithms.loss_inputs import LossFn, LossInputs, TokenLoss
from rlsys.algorithms.losses import (
    aipo,
    cispo,
    clipped_surrogate,
    dppo_mask,
    gspo,
    reinforce,
    sapo_soft,
)
from rlsys.algorithms.masks import opsm
from rlsys.errors import NOT_GIVEN
from tests.algorithms.loss_inputs import three_policies
from tests.errors import invalid


def make_inputs(ratios: list[float]) -> LossInputs:
    """Two rollouts of two tokens, a good one and a bad one; π_θ = π_prox = ratio · μ."""
    sampler = torch.full((4,), math.log(0.1))
    trainer = (sampler + torch.tensor(ratios).log()).requires_grad_()
    return LossInputs(
        trainer_logprobs=trainer,
        proximal_logprobs=trainer.detach(),
        sampler_logprobs=sampler,
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        entropy=torch.zeros(4),
        staleness=torch.zeros(4, dtype=torch.int64),
        row_index=torch.tensor([0, 0, 1, 1]),
    )


@pytest.mark.parametrize(
    ("correction", "ratios", "weights"),
    [
        (tis(2.0), [0.5, 1.0, 2.0, 8.0], [0.5, 1.0, 2.0, 2.0]),
        (tis(2.0, floor=0.75), [0.5, 1.0, 2.0, 8.0], [0.75, 1.0, 2.0, 2.0]),
        (sequence_tis(5.0, geometric_mean=False), [2.0, 2.0, 4.0, 2.0], [4.0, 4.0, 5.0, 5.0]),
        (sequence_tis(5.0, geometric_mean=True), [4.0, 1.0, 0.25, 1.0], [2.0, 2.0, 0.5, 0.5]),
        (icepop(0.5, 5.0), [0.4, 0.6, 4.8, 6.0], [0.0, 0.6, 4.8, 0.0]),
        # mean log(μ/π) = ½ log 4 = 0.69 in both rollouts; only the bad one is dropped.
        (opsm(0.5), [0.25, 1.0, 0.25, 1.0], [1.0, 1.0, 0.0, 0.0]),
        (opsm(0.7), [0.25, 1.0, 0.25, 1.0], [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_weights_by_hand(correction: Correction, ratios: list[float], weights: list[float]) -> None:
    inputs = make_inputs(ratios)
    found, metrics = correction(inputs)
    assert found.tolist() == pytest.approx(weights, rel=1e-5)
    assert not found.requires_grad
    assert metrics
    assert all(metric.shape == (4,) for metric in metrics.values())
    assert pickle.loads(pickle.dumps(correction)) == correction


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (tis(2.5), [2.0, 0.5, 2.5, 1.0]),
        (sequence_tis(3.0), [1.0, 1.0, 3.0, 3.0]),
        (sequence_tis(3.0, geometric_mean=True), [1.0, 1.0, 2.0, 2.0]),
        (icepop(0.6, 3.0), [2.0, 0.0, 0.0, 1.0]),
        (sequence_icepop(0.5, 3.0, geometric_mean=False), [1.0, 1.0, 0.0, 0.0]),
        (sequence_icepop(0.5, 1.5), [1.0, 1.0, 0.0, 0.0]),
    ],
)
def test_weights_are_the_proximal_policys_over_the_samplers(
    correction: Correction, weights: list[float]
) -> None:
    inputs = three_policies(w=[2.0, 0.5, 4.0, 1.0], rho=[3.0, 3.0, 0.25, 0.75], rows=[0, 0, 1, 1])
    assert correction(inputs)[0].tolist() == pytest.approx(weights)


def test_a_corrected_loss_is_weighted_and_reports_both() -> None:
    inputs = make_inputs([0.4, 1.0, 2.0, 6.0])
    loss, metrics = corrected(corrected(reinforce(), icepop(0.5, 5.0)), opsm(9.0))(inputs)
    (gradient,) = torch.autograd.grad(loss.sum(), inputs.trainer_logprobs)
    assert gradient.tolist() == pytest.approx([0.0, -1.0, 2.0, 0.0])
    assert metrics.keys() == {
        "correction/weight",
        "correction/masked_frac",
        "correction/opsm_masked_frac",
    }


def test_a_hopeless_token_is_zeroed_and_not_infinite() -> None:
    weights, _ = icepop(0.5, 5.0)(make_inputs([1e38, 1.0, 1.0, 1.0]))
    assert weights.tolist() == pytest.approx([0.0, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    "correction",
    [tis(2.0), icepop(0.5, 5.0), sequence_tis(2.0, geometric_mean=True)],
)
@pytest.mark.parametrize(
    "loss",
    [
        clipped_surrogate(0.2, 0.28),
        gspo(3e-4, 4e-4),
        cispo(5.0),
        aipo(4.0),
        sapo_soft(1.0, 1.05),
        dppo_mask(0.2, 0.2),
        decoupled_clipped_surrogate(0.2, 0.2, 2.0),
        interpolate_proximal(decoupled_clipped_surrogate(0.2, 0.2, 2.0)),
        corrected(reinforce(), tis(2.0)),
        corrected(corrected(reinforce(), tis(2.0)), opsm(0.5)),
        entropy_bonus(cispo(5.0), 0.01),
    ],
)
def test_a_weight_that_would_count_twice_is_refused(loss: LossFn, correction: Correction) -> None:
    with invalid("corrected: loss", loss):
        corrected(loss, correction)
    corrected(loss, opsm(0.5))  # a mask is no weight


def test_the_weight_must_use_the_proximal_policy_of_the_ratio() -> None:
    clipped = clipped_surrogate(0.2, 0.2, denominator="proximal")
    with invalid("corrected: loss", interpolate_proximal(clipped)):
        corrected(interpolate_proximal(clipped), tis(2.0))
    interpolate_proximal(corrected(clipped, tis(2.0)))


def test_a_users_loss_must_name_the_policy_it_divides_by() -> None:
    def own(inputs: LossInputs) -> TokenLoss:
        return -inputs.advantages * inputs.trainer_logprobs, {}

    with invalid("own: denominator", NOT_GIVEN):
        corrected(own, tis(2.0))
    with invalid("own: denominator", NOT_GIVEN):
        corrected(entropy_bonus(own, 0.1), tis(2.0))
    own.denominator = "smapler"  # type: ignore[attr-defined]
    with invalid("own: denominator", "smapler"):
        corrected(entropy_bonus(own, 0.1), tis(2.0))
    own.denominator = "none"  # type: ignore[attr-defined]
    found, _ = corrected(entropy_bonus(own, 0.1), tis(2.0))(make_inputs([1.0] * 4))
    assert found.shape == (4,)


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (lambda: tis(0.0), "tis: cap", 0.0),
        (lambda: tis(2.0, floor=-0.5), "tis: floor", -0.5),
        (lambda: tis(2.0, floor=1.5), "tis: floor", 1.5),
        (lambda: sequence_tis(-1.0, geometric_mean=True), "sequence_tis: cap", -1.0),
        (lambda: icepop(5.0, 0.5), "icepop: (low, high)", (5.0, 0.5)),
    ],
)
def test_impossible_bounds_are_refused(
    make: Callable[[], Correction], field: str, value: Any
) -> None:
    with invalid(field, value):
        make()
