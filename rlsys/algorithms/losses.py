"""Policy losses, per token.

In: `LossInputs` over N tokens (N may be 0). Out: the loss of each token [N], and metrics [N] that
are averaged over all tokens of the global batch. Aggregation comes afterwards, elsewhere.

Notation: A advantage, μ the policy that sampled, π_prox the trainer's policy at the start of the
optimizer step, π_θ the policy that is optimised; ρ = π_θ/μ, u = π_θ/π_prox, w = π_prox/μ; sg stops
the gradient.

Tokens come from μ, so an unbiased gradient carries ρ·A·∇log π_θ, once. `denominator` says what a
loss divides by, that is, which part of ρ = w·u it carries:

    "sampler"    all of it. Nothing else may weight by w.
    "proximal"   u; w is left to a correction: corrected(loss, tis(2.0)), see composed.py.
    "none"       nothing: right for tokens of π_θ itself, else also left to a correction.

The papers' π_old is both μ and π_prox, because their samplers and trainers are one. Where a paper
leaves the choice, the loss has it as a field, "sampler" unless said otherwise: with one optimizer
step per batch u is 1, and a clip on it never binds.

Constants that a paper publishes are the defaults. Every loss is a frozen dataclass that is called
like the function it is named after, so it can be printed, compared and sent to another process.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, get_args

import torch

from rlsys.algorithms.loss_inputs import LossInputs, TokenLoss
from rlsys.algorithms.parameters import parameters
from rlsys.algorithms.ratios import bounded_exp, check_cap, floored, log_ratio, ratio
from rlsys.algorithms.sequences import mean_over_rollout

Denominator = Literal["sampler", "proximal"]


@parameters
class reinforce:
    """−A · log π_θ: Williams (1992)."""

    denominator: ClassVar[str] = "none"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        return -inputs.advantages * floored(inputs.trainer_logprobs), {}


@parameters
class cross_entropy:
    """−log π_θ, the definition itself of maximum likelihood: supervised learning of completions
    that a dataset holds.
    """

    denominator: ClassVar[str] = "none"
    uses_advantages: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        return -floored(inputs.trainer_logprobs), {}


@parameters
class top_k_distill:
    """KL(π_θ ‖ π_teacher) at each sampled token, over the teacher's K likeliest tokens and all
    others as one: GKD, 2306.13649, with its reverse divergence at λ = 1.

    With K as large as the vocabulary it is the whole divergence, with fewer less than that. No
    gradient flows through the sampling, as in the paper, so that there is no ratio.
    """

    denominator: ClassVar[str] = "none"
    uses_advantages: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ("teacher_top_k",)
    candidates: ClassVar[str] = "teacher_top_k"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        student, teacher = inputs.candidate_logprobs, inputs.column(self.candidates)
        if student is not None and not len(student):  # a pass without tokens knows no K
            teacher = teacher.reshape(0, 2 * student.shape[1] + 1)
        if student is None or teacher.shape != (len(student), 2 * student.shape[1] + 1):
            raise ValueError(
                f"top_k_distill is given {tuple(teacher.shape)} values of teacher_top_k and "
                f"{None if student is None else tuple(student.shape)} log-probabilities of the "
                "student; let flow.infer(teacher, ..., top_k=K) write teacher_top_k."
            )
        student, by_teacher = floored(student), floored(teacher[:, student.shape[1] :])
        probs = student.exp()  # [N, K]
        divergence = (probs * (student - by_teacher[:, :-1])).sum(-1)
        rest = (1 - probs.sum(-1)).clamp(min=torch.finfo(probs.dtype).eps)  # [N]
        of_rest = rest * (rest.log() - by_teacher[:, -1])
        divergence = divergence + of_rest.where(teacher[:, -1] > -torch.inf, 0.0)  # where K < V
        return divergence, {"kl/teacher": divergence.detach()}


@parameters
class clipped_surrogate:
    """−min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A): PPO, 1707.06347, equation 7; r is ρ or u.

    `clip_high` > `clip_low`, 0.2 and 0.28, is DAPO's clip-higher (2503.14476, equation 10).
    `dual_clip` c > 1
    bounds the loss of a token with A < 0 by −c·A (1912.09729).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    denominator: Denominator = "sampler"

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)
        _check_denominator(self.denominator)
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(
                f"dual_clip={self.dual_clip} would cut tokens that the policy has not moved; "
                "use more than 1, such as 3."
            )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        r = bounded_exp(_moved(inputs, self.denominator))
        return _clipped(r, inputs.advantages, self.clip_low, self.clip_high, self.dual_clip)


@parameters
class gspo:
    """−min(s·A, clip(s)·A), s = exp(mean_t log r) of the whole rollout, r is ρ or u: GSPO,
    2507.18071, equations 5 and 7.

    Every token carries its rollout's s; aggregate with `sequence_mean`, as the paper does. Its
    clips are tiny: 3e-4 and 4e-4.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    denominator: Denominator = "sampler"

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)
        _check_denominator(self.denominator)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        s = bounded_exp(mean_over_rollout(_moved(inputs, self.denominator), inputs.row_index))
        return _clipped(s, inputs.advantages, self.clip_low, self.clip_high, None)


@parameters
class gmpo:
    """−s·A, s = exp(mean_t of log r, clipped where it moved too far): GMPO, 2507.20673;
    r is ρ or u.

    The geometric mean of the rollout's token ratios in the place of PPO's arithmetic one. The clip
    acts on each token, one-sided: log r at most `log_clip` for A > 0, at least −log_clip for A < 0;
    the paper's (e^−0.4, e^0.4) is far wider than PPO's. Every token carries its rollout's s;
    aggregate with `sequence_mean`.
    """

    log_clip: float = 0.4
    denominator: Denominator = "sampler"

    def __post_init__(self) -> None:
        _check_denominator(self.denominator)
        if not self.log_clip > 0:
            raise ValueError(
                f"log_clip={self.log_clip} leaves no room for the policy to move; use a positive "
                "bound of log ratios, such as 0.4."
            )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        moved = _moved(inputs, self.denominator)
        good, bad = moved.clamp(max=self.log_clip), moved.clamp(min=-self.log_clip)
        bounded = torch.where(inputs.advantages > 0, good, bad)
        s = bounded_exp(mean_over_rollout(bounded, inputs.row_index))
        metrics = {"ratio/mean": s.detach(), "ratio/clipped_frac": (bounded != moved).to(s.dtype)}
        return -s * inputs.advantages, metrics


@parameters
class cispo:
    """−sg(clip(ρ, min_ratio, max_ratio)) · A · log π_θ: MiniMax-M1, 2506.13585, equation 4; used by
    ScaleRL.

    No token loses its gradient; a large ratio only stops to grow. The paper sets no lower bound
    (0); max_ratio is 4 to 8.
    """

    max_ratio: float = 5.0
    min_ratio: float = 0.0
    denominator: ClassVar[Denominator] = "sampler"

    def __post_init__(self) -> None:
        check_cap("max_ratio", self.max_ratio)
        if not 0 <= self.min_ratio < self.max_ratio:
            raise ValueError(
                f"min_ratio={self.min_ratio} is not below max_ratio={self.max_ratio}; use 0 for no "
                "lower bound."
            )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        return _truncated_importance(inputs, self.max_ratio, self.min_ratio)


@parameters
class aipo:
    """Gradient min(ρ, max_ratio) · A · ∇log π_θ: LlamaRL, 2505.24034.

    Token by token and one-sided, without PPO's clip; max_ratio is 2 to 10. It was stated before
    CISPO and is the same function: two papers that correct for asynchronous sampling, one rule.
    """

    max_ratio: float
    denominator: ClassVar[Denominator] = "sampler"

    def __post_init__(self) -> None:
        check_cap("max_ratio", self.max_ratio)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        return _truncated_importance(inputs, self.max_ratio)


@parameters
class sapo_soft:
    """−(4/τ) · σ(τ(r − 1)) · A: Soft Adaptive Policy Optimization, 2511.20347; r is ρ or u.

    A smooth gate in the clip's place: the gradient's weight is 1 at r = 1 and fades on both sides,
    faster with a larger τ. The paper takes 1.0 for A > 0 and 1.05 otherwise. (Not the swarm
    algorithm of the same short name.)
    """

    temperature_positive: float = 1.0
    temperature_negative: float = 1.05
    denominator: Denominator = "sampler"

    def __post_init__(self) -> None:
        _check_denominator(self.denominator)
        for name in ("temperature_positive", "temperature_negative"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} is no temperature; use about 1.")

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        r = bounded_exp(_moved(inputs, self.denominator))
        tau = torch.where(
            inputs.advantages > 0, self.temperature_positive, self.temperature_negative
        )
        gate = torch.sigmoid(tau * (r - 1))
        metrics = {"ratio/mean": r.detach(), "ratio/gate": (4 * gate * (1 - gate)).detach()}
        return -(4 / tau) * gate * inputs.advantages, metrics


@parameters
class dppo_mask:
    """−sg(min(ρ, max_ratio)) · A · log π_θ, without the tokens whose probability has moved too far
    in the advantage's direction: DPPO with the binary total-variation mask, 2602.04879.

    A token is dropped if π_θ − μ > max_rise with A > 0, or π_θ − μ < −max_fall with A < 0.
    Differences of probabilities, not of logarithms: a rare token may multiply its probability, a
    frequent one may not. Usual values: 0.2. The mask does not bound ρ of a rare token, so it is
    truncated, at 20 as in verl.
    """

    max_rise: float = 0.2
    max_fall: float = 0.2
    max_ratio: float = 20.0
    denominator: ClassVar[Denominator] = "sampler"

    def __post_init__(self) -> None:
        for name in ("max_rise", "max_fall"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} is no difference of probabilities; "
                    "use a value from 0 to 1, such as 0.2."
                )
        check_cap("max_ratio", self.max_ratio)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        with torch.no_grad():
            moved = inputs.trainer_logprobs.exp() - inputs.sampler_logprobs.exp()
            dropped = torch.where(
                inputs.advantages > 0, moved > self.max_rise, moved < -self.max_fall
            )
        loss, metrics = _truncated_importance(inputs, self.max_ratio)
        masked = {"ratio/masked_frac": dropped.to(loss.dtype)}
        return loss.masked_fill(dropped, 0.0), metrics | masked


def _moved(inputs: LossInputs, denominator: Denominator) -> torch.Tensor:
    """Log ρ or log u, [N]."""
    base = inputs.sampler_logprobs if denominator == "sampler" else inputs.proximal_logprobs
    return log_ratio(inputs.trainer_logprobs, base)


def _clipped(
    r: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    objective = torch.minimum(r * advantages, r.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        floor = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        objective = torch.maximum(objective, floor)
    too_far = torch.where(advantages > 0, r > 1 + clip_high, r < 1 - clip_low)
    metrics = {
        "ratio/mean": r.detach(),
        "ratio/clipped_frac": (too_far & (advantages != 0)).to(r.dtype),
    }
    return -objective, metrics


def _truncated_importance(
    inputs: LossInputs, max_ratio: float, min_ratio: float = 0.0
) -> TokenLoss:
    rho = ratio(inputs.trainer_logprobs.detach(), inputs.sampler_logprobs)
    weight = rho.clamp(min_ratio, max_ratio)
    loss = -weight * inputs.advantages * floored(inputs.trainer_logprobs)
    return loss, {"ratio/mean": rho, "ratio/clipped_frac": (rho != weight).to(rho.dtype)}


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not (0 < clip_low <= 1 and clip_high > 0):
        raise ValueError(
            f"clip_low={clip_low}, clip_high={clip_high} leave no room for the policy to move; "
            "use 0 < clip_low <= 1 and clip_high > 0, such as 0.2 and 0.28."
        )


def _check_denominator(denominator: str) -> None:
    if denominator not in get_args(Denominator):
        raise ValueError(
            f'denominator={denominator!r} names no policy of a ratio; use "sampler" (π_θ/μ) or '
            '"proximal" (π_θ/π_prox).'
        )
