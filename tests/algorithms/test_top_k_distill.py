"""Distillation from a teacher's likeliest tokens, against the divergence itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rlsys.algorithms import entropy_bonus, top_k_distill
from rlsys.algorithms.loss_inputs import LossInputs, candidates_of, needs_of, uses_advantages
from tests.errors import invalid


def inputs_of(student: torch.Tensor, teacher: torch.Tensor, top_k: int) -> LossInputs:
    """Logits [N, V] of both, the student's with gradient."""
    by_teacher = torch.log_softmax(teacher, -1)
    best = by_teacher.topk(top_k)
    others = by_teacher.scatter(-1, best.indices, -math.inf).logsumexp(-1, keepdim=True)
    told = torch.cat((best.indices.to(student.dtype), best.values, others), -1)
    logprobs = torch.log_softmax(student, -1)
    nothing = torch.zeros(len(student), dtype=student.dtype)
    return LossInputs(
        trainer_logprobs=logprobs[:, 0],
        proximal_logprobs=nothing,
        sampler_logprobs=nothing,
        advantages=nothing,
        entropy=nothing + 1,
        staleness=nothing.long(),
        row_index=nothing.long(),
        columns={"teacher_top_k": told},
        candidate_logprobs=logprobs.gather(-1, best.indices),
    )


def logits(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_all_tokens_give_the_divergence_and_its_gradient() -> None:
    student, teacher = logits(0, 5, 7).requires_grad_(), logits(1, 5, 7)
    losses, metrics = top_k_distill()(inputs_of(student, teacher, 7))
    p, log_p, log_q = student.softmax(-1), student.log_softmax(-1), teacher.log_softmax(-1)
    divergence = (p * (log_p - log_q)).sum(-1)
    assert losses.tolist() == pytest.approx(divergence.tolist(), abs=2e-5)
    assert torch.equal(metrics["kl/teacher"], losses.detach())
    (gradient,) = torch.autograd.grad(losses.sum(), student)
    expected = p * (log_p - log_q - divergence[:, None])
    assert (gradient - expected).abs().max() < 3e-5


def test_all_other_tokens_count_as_one() -> None:
    # Teacher 1/2, 1/4, 1/8, 1/8; student 1/4 each: 2 · 1/4 · log(...) and 1/2 against 1/4.
    teacher = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    losses, _ = top_k_distill()(inputs_of(torch.zeros(1, 4, dtype=torch.float64), teacher, 2))
    expected = 0.25 * math.log(0.5) + 0.25 * math.log(1) + 0.5 * math.log(2)
    assert losses.tolist() == pytest.approx([expected])


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_the_loss_is_never_negative_and_zero_for_the_teacher_itself(top_k: int) -> None:
    same = logits(2, 4, 6)
    assert top_k_distill()(inputs_of(same, same, top_k))[0].tolist() == pytest.approx([0.0] * 4)
    assert (top_k_distill()(inputs_of(logits(3, 4, 6), same, top_k))[0] > 0).all()


def test_a_certain_teacher_says_how_unlikely_all_others_are() -> None:
    """All but one token have 1e-9 to 1e-11 of its probability, beyond what float32 leaves of 1."""
    teacher = torch.tensor([[0.0, -20.0, -21.0, -24.0, -25.0]])
    student = logits(4, 1, 5).float().requires_grad_()
    losses, _ = top_k_distill()(inputs_of(student, teacher, 3))
    (gradient,) = torch.autograd.grad(losses.sum(), student)
    exact = student.detach().double().requires_grad_()
    p, q = exact.softmax(-1), teacher.double().softmax(-1)
    p, q = (torch.cat((x[:, :3], x[:, 3:].sum(-1, keepdim=True)), -1) for x in (p, q))
    (expected,) = torch.autograd.grad((p * (p / q).log()).sum(), exact)
    assert (gradient - expected).abs().max() < 1e-5


def test_certain_and_impossible_tokens_stay_finite() -> None:
    sure = torch.tensor([[60.0, 0.0, -60.0], [-60.0, 60.0, 0.0]])
    for student, teacher in ((sure, sure.flip(0)), (sure, sure), (sure.flip(0), sure)):
        student = student.clone().requires_grad_()
        losses, _ = top_k_distill()(inputs_of(student, teacher, 2))
        (gradient,) = torch.autograd.grad(losses.sum(), student)
        assert losses.isfinite().all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("told", [torch.zeros(0), torch.zeros(0, 5)])
def test_a_pass_without_tokens_has_no_loss(told: torch.Tensor) -> None:
    """Such as a rank has that is given no rows: nothing there says how many tokens the teacher
    told. It takes part in the backward pass of the others."""
    inputs = inputs_of(logits(0, 3, 4), logits(1, 3, 4), 2)
    student = torch.zeros(0, told.shape[-1] // 2, requires_grad=True)
    nothing = torch.zeros(0, requires_grad=True)
    inputs = replace(
        inputs,
        trainer_logprobs=nothing,
        columns={"teacher_top_k": told},
        candidate_logprobs=student,
    )
    losses, metrics = top_k_distill()(inputs)
    assert losses.shape == metrics["kl/teacher"].shape == (0,)
    losses.sum().backward()


def test_it_needs_only_the_likeliest_tokens() -> None:
    loss = entropy_bonus(top_k_distill(), 0.1)
    assert candidates_of(loss) == "teacher_top_k"
    assert needs_of(loss) == ("teacher_top_k",)
    assert not uses_advantages(loss)
    inputs = inputs_of(logits(0, 3, 4), logits(1, 3, 4), 2)
    plain, _ = top_k_distill()(inputs)
    assert torch.allclose(loss(inputs)[0], plain - 0.1)
    with invalid("teacher_top_k"):
        loss(replace(inputs, candidate_logprobs=None))
