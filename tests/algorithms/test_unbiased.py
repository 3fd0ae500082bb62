"""Over every token that a toy policy can sample, weighted by how often the sampler does, a loss has
the gradient of the expected advantage: Σ_a μ(a) ∇loss(a) = −Σ_a π(a) A(a) ∇log π(a)."""

import pytest
import torch

from rlsys.algorithms.composed import (
    corrected,
    decoupled_clipped_surrogate,
    interpolate_proximal,
    m2po,
    observed,
)
from rlsys.algorithms.corrections import icepop, sequence_icepop, sequence_tis, tis
from rlsys.algorithms.loss_inputs import LossFn, LossInputs
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
from rlsys.algorithms.masks import opsm
from tests.errors import invalid

MU = torch.tensor([0.35, 0.30, 0.23, 0.12], dtype=torch.float64)
PI = torch.tensor([0.30, 0.28, 0.28, 0.14], dtype=torch.float64)  # ρ from 0.86 to 1.22
ADVANTAGES = torch.tensor([1.0, -0.5, 0.25, -2.0], dtype=torch.float64)


def make_inputs(logits: torch.Tensor, *, proximal: torch.Tensor | None, age: int) -> LossInputs:
    logprobs = torch.log_softmax(logits, -1)
    return LossInputs(
        trainer_logprobs=logprobs,
        proximal_logprobs=logprobs.detach() if proximal is None else proximal.log(),
        sampler_logprobs=MU.log(),
        advantages=ADVANTAGES,
        entropy=torch.zeros(4, dtype=torch.float64),
        staleness=torch.full((4,), age),
        row_index=torch.arange(4),  # rollouts of one token: sequence ratios are token ratios
    )


def expected_gradient(
    loss: LossFn, *, proximal: torch.Tensor | None = None, age: int = 1
) -> torch.Tensor:
    logits = PI.log().requires_grad_()
    values, _ = loss(make_inputs(logits, proximal=proximal, age=age))
    (gradient,) = torch.autograd.grad((MU * values).sum(), logits)
    return gradient


def exact_gradient() -> torch.Tensor:
    logits = PI.log().requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    (gradient,) = torch.autograd.grad(-(PI * ADVANTAGES * logprobs).sum(), logits)
    return gradient


WIDE = (0.9, 9.0)  # clips that do not bind

CARRYING_THE_WEIGHT_ONCE = [
    clipped_surrogate(*WIDE),
    gspo(*WIDE),
    cispo(5.0),
    aipo(5.0),
    dppo_mask(1.0, 1.0),
    gmpo(2.0),
    m2po(4.0),
    observed(cispo(5.0)),
    corrected(gmpo(2.0, denominator="proximal"), sequence_icepop(0.1, 9.0)),
    corrected(clipped_surrogate(*WIDE), opsm(9.0)),
    decoupled_clipped_surrogate(*WIDE, max_weight=5.0),
    corrected(gspo(*WIDE, denominator="proximal"), sequence_tis(5.0, geometric_mean=True)),
    corrected(clipped_surrogate(*WIDE, denominator="proximal"), icepop(0.5, 5.0)),
]


@pytest.mark.parametrize("loss", CARRYING_THE_WEIGHT_ONCE)
@pytest.mark.parametrize("proximal", [None, [0.25, 0.25, 0.25, 0.25]])
def test_losses_that_carry_the_weight_once_are_unbiased(
    loss: LossFn, proximal: list[float] | None
) -> None:
    """With one optimizer step per batch (π_prox = π_θ), and with several (another π_prox)."""
    given = None if proximal is None else torch.tensor(proximal, dtype=torch.float64)
    torch.testing.assert_close(expected_gradient(loss, proximal=given), exact_gradient())


@pytest.mark.parametrize("age", [0, 1, 3])
def test_the_interpolated_decoupled_loss_is_unbiased_at_every_age(age: int) -> None:
    loss = interpolate_proximal(decoupled_clipped_surrogate(*WIDE, max_weight=5.0))
    torch.testing.assert_close(expected_gradient(loss, age=age), exact_gradient())


@pytest.mark.parametrize("correction", [tis(5.0), icepop(0.5, 5.0)])
def test_corrected_reinforce_is_unbiased_at_the_first_step_and_bare_reinforce_is_not(
    correction: tis | icepop,
) -> None:
    torch.testing.assert_close(
        expected_gradient(corrected(reinforce(), correction)), exact_gradient()
    )
    assert relative_error(expected_gradient(reinforce())) > 0.05


def test_soft_gate_is_unbiased_where_nothing_has_moved() -> None:
    loss = corrected(sapo_soft(1.0, 1.05, denominator="proximal"), tis(5.0))
    torch.testing.assert_close(expected_gradient(loss), exact_gradient())


def test_the_weight_counted_twice_is_biased_which_is_why_it_is_refused() -> None:
    clipped = clipped_surrogate(*WIDE)

    def twice(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weight, _ = tis(5.0)(inputs)
        return weight * clipped(inputs)[0], {}

    assert relative_error(expected_gradient(twice)) > 0.05
    with invalid("corrected: loss", clipped):
        corrected(clipped, tis(5.0))


def relative_error(gradient: torch.Tensor) -> float:
    exact = exact_gradient()
    return float((gradient - exact).norm() / exact.norm())
