"""Policy losses, per token.

In: `LossInputs` over N tokens (N may be 0). Out: the loss of each token [N], and metrics [N] that
are averaged over all tokens of the global batch. The engine aggregates the losses (aggregation.py).

Notation: A advantage, μ the policy that sampled, π_prox the trainer's policy at the start of the
optimizer step, π_θ the policy that is optimised; ρ = π_θ/μ, u = π_θ/π_prox, w = π_prox/μ; sg stops
the gradient.

Tokens come from μ, so an unbiased gradient is ρ·A·∇log π_θ, with ρ once. The attribute
`denominator` is the policy that a loss divides by. It decides which part of ρ = w·u the loss has:

    "sampler"    all of it. Nothing else may weight by w.
    "proximal"   u. A correction adds w: corrected(loss, tis(2.0)), see composed.py.
    "none"       nothing. Right for tokens of π_θ itself; for others a correction adds w.

The papers' π_old is both μ and π_prox, because their samplers and trainers are one. A loss whose
paper leaves the choice has it as a field. The default is "sampler": with one optimizer step per
batch u is 1, and a clip on it never binds.

The defaults are the constants that the papers publish. Every loss is a frozen dataclass that is
called like a function, so it can be printed, compared and sent to another process.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, get_args

import torch

from rlsys.algorithms.loss_inputs import LossInputs, TokenLoss
from rlsys.algorithms.parameters import parameters, require_field
from rlsys.algorithms.ratios import bounded_exp, check_cap, floored, log_ratio, ratio
from rlsys.algorithms.sequences import mean_over_rollout
from rlsys.errors import InvalidValue

Denominator = Literal["sampler", "proximal"]


@parameters
class reinforce:
    """−A · log π_θ: Williams (1992)."""

    denominator: ClassVar[str] = "none"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        return -inputs.advantages * floored(inputs.trainer_logprobs), {}


@parameters
class cross_entropy:
    """−log π_θ: the definition itself of maximum likelihood, for completions of a dataset."""

    denominator: ClassVar[str] = "none"
    uses_advantages: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        return -floored(inputs.trainer_logprobs), {}


@parameters
class top_k_distill:
    """KL(π_θ ‖ π_teacher) at each token, over K + 1 classes: GKD, 2306.13649, reverse KL at λ = 1.

    The classes are the teacher's K likeliest tokens, and all other tokens as one. If K is the size
    of the vocabulary, it is the exact divergence; a smaller K gives a lower bound. As in the paper,
    no gradient flows through the sampling, so there is no ratio.
    """

    denominator: ClassVar[str] = "none"
    uses_advantages: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ("teacher_top_k",)
    candidates: ClassVar[str] = "teacher_top_k"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        student, teacher = inputs.candidate_logprobs, inputs.column(self.candidates)
        if student is not None and not len(student):  # without tokens, the column has no K
            teacher = teacher.reshape(0, 2 * student.shape[1] + 1)
        if student is None or teacher.shape != (len(student), 2 * student.shape[1] + 1):
            raise InvalidValue(
                "teacher_top_k",
                tuple(teacher.shape),
                rule="the shape does not fit the student's log-probabilities "
                f"{None if student is None else tuple(student.shape)}",
                fix="Let flow.infer(teacher, ..., top_k=K) write teacher_top_k.",
            )
        student, teacher_logprobs = floored(student), floored(teacher[:, student.shape[1] :])
        probs = student.exp()  # [N, K]
        divergence = (probs * (student - teacher_logprobs[:, :-1])).sum(-1)
        rest = (1 - probs.sum(-1)).clamp(min=torch.finfo(probs.dtype).eps)  # [N]
        rest_divergence = rest * (rest.log() - teacher_logprobs[:, -1])
        has_rest = teacher[:, -1] > -torch.inf  # K < V
        divergence = divergence + rest_divergence.where(has_rest, 0.0)
        return divergence, {"kl/teacher": divergence.detach()}


@parameters
class clipped_surrogate:
    """−min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A): PPO, 1707.06347, equation 7; r is ρ or u.

    `clip_high` > `clip_low`, such as 0.28 and 0.2, is DAPO's clip-higher (2503.14476, equation 10).
    `dual_clip` c > 1 bounds the loss of a token with A < 0 by −c·A (1912.09729).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    denominator: Denominator = "sampler"

    def __post_init__(self) -> None:
        _check_clip(self, self.clip_low, self.clip_high)
        _check_denominator(self, self.denominator)
        require_field(
            self,
            "dual_clip",
            self.dual_clip is None or self.dual_clip > 1,
            rule="must be above 1, or it clips tokens that have not changed",
            fix="Use such as 3.",
        )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        r = bounded_exp(_log_ratio(inputs, self.denominator))
        return _clipped(r, inputs.advantages, self.clip_low, self.clip_high, self.dual_clip)


@parameters
class gspo:
    """−min(s·A, clip(s)·A), s = exp(mean_t log r) of a rollout: GSPO, 2507.18071, equations 5, 7.

    r is ρ or u. Every token has its rollout's s; aggregate with `sequence_mean`, as the paper does.
    The paper's clips are tiny: 3e-4 and 4e-4.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    denominator: Denominator = "sampler"

    def __post_init__(self) -> None:
        _check_clip(self, self.clip_low, self.clip_high)
        _check_denominator(self, self.denominator)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        s = bounded_exp(mean_over_rollout(_log_ratio(inputs, self.denominator), inputs.row_index))
        return _clipped(s, inputs.advantages, self.clip_low, self.clip_high, None)


@parameters
class gmpo:
    """−s·A, s = exp(mean_t of clipped log r) over a rollout: GMPO, 2507.20673.

    r is ρ or u. s is the geometric mean of the rollout's token ratios; PPO has the arithmetic mean.
    The clip acts on each token, on one side: log r is at most `log_clip` for A > 0, and at least
    −log_clip for A < 0. The paper's (e^−0.4, e^0.4) is far wider than PPO's. Every token has its
    rollout's s; aggregate with `sequence_mean`.
    """

    log_clip: float = 0.4
    denominator: Denominator = "sampler"

    def __post_init__(self) -> None:
        _check_denominator(self, self.denominator)
        require_field(
            self,
            "log_clip",
            self.log_clip > 0,
            rule="must be positive",
            fix="Use a bound of log ratios such as 0.4.",
        )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        log_r = _log_ratio(inputs, self.denominator)
        good, bad = log_r.clamp(max=self.log_clip), log_r.clamp(min=-self.log_clip)
        bounded = torch.where(inputs.advantages > 0, good, bad)
        s = bounded_exp(mean_over_rollout(bounded, inputs.row_index))
        metrics = {"ratio/mean": s.detach(), "ratio/clipped_frac": (bounded != log_r).to(s.dtype)}
        return -s * inputs.advantages, metrics


@parameters
class cispo:
    """−sg(clip(ρ, min_ratio, max_ratio)) · A · log π_θ: MiniMax-M1, 2506.13585, equation 4.

    No token loses its gradient; only the weight of a large ratio is bounded. The paper sets no
    lower bound (0). max_ratio is 4 to 8. ScaleRL uses this loss.
    """

    max_ratio: float = 5.0
    min_ratio: float = 0.0
    denominator: ClassVar[Denominator] = "sampler"

    def __post_init__(self) -> None:
        check_cap(self, "max_ratio")
        require_field(
            self,
            "min_ratio",
            0 <= self.min_ratio < self.max_ratio,
            rule=f"must be at least 0 and below max_ratio={self.max_ratio}",
            fix="Use 0 for no lower bound.",
        )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        return _truncated_importance(inputs, self.max_ratio, self.min_ratio)


@parameters
class aipo:
    """Loss with the gradient −min(ρ, max_ratio) · A · ∇log π_θ: LlamaRL, 2505.24034.

    The bound acts on each token, on one side, without PPO's clip. max_ratio is 2 to 10. It is the
    same function as cispo, which was published later.
    """

    max_ratio: float
    denominator: ClassVar[Denominator] = "sampler"

    def __post_init__(self) -> None:
        check_cap(self, "max_ratio")

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        return _truncated_importance(inputs, self.max_ratio)


@parameters
class sapo_soft:
    """−(4/τ) · σ(τ(r − 1)) · A: Soft Adaptive Policy Optimization, 2511.20347.

    r is ρ or u. A smooth gate replaces the clip: the gradient's weight is 1 at r = 1 and decreases
    on both sides, faster with a larger τ. The paper has τ = 1.0 for A > 0 and 1.05 otherwise. (The
    swarm algorithm SAPO is unrelated.)
    """

    temperature_positive: float = 1.0
    temperature_negative: float = 1.05
    denominator: Denominator = "sampler"

    def __post_init__(self) -> None:
        _check_denominator(self, self.denominator)
        for name in ("temperature_positive", "temperature_negative"):
            require_field(
                self,
                name,
                0 < getattr(self, name) < math.inf,
                rule="must be positive and finite",
                fix="Use about 1.",
            )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        r = bounded_exp(_log_ratio(inputs, self.denominator))
        tau = torch.where(
            inputs.advantages > 0, self.temperature_positive, self.temperature_negative
        )
        gate = torch.sigmoid(tau * (r - 1))
        metrics = {"ratio/mean": r.detach(), "ratio/gate": (4 * gate * (1 - gate)).detach()}
        return -(4 / tau) * gate * inputs.advantages, metrics


@parameters
class dppo_mask:
    """−sg(min(ρ, max_ratio)) · A · log π_θ with DPPO's total-variation mask: 2602.04879.

    A token is dropped if π_θ − μ > max_rise with A > 0, or π_θ − μ < −max_fall with A < 0. These
    are differences of probabilities, not of logarithms: the probability of a rare token may
    multiply, that of a frequent one may not. Usual values are 0.2. The mask does not bound ρ of a
    rare token, so ρ is truncated, at 20 as in verl.
    """

    max_rise: float = 0.2
    max_fall: float = 0.2
    max_ratio: float = 20.0
    denominator: ClassVar[Denominator] = "sampler"

    def __post_init__(self) -> None:
        for name in ("max_rise", "max_fall"):
            require_field(
                self,
                name,
                0 <= getattr(self, name) <= 1,
                rule="must be a difference of probabilities, from 0 to 1",
                fix="Use such as 0.2.",
            )
        check_cap(self, "max_ratio")

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        with torch.no_grad():
            change = inputs.trainer_logprobs.exp() - inputs.sampler_logprobs.exp()
            dropped = torch.where(
                inputs.advantages > 0, change > self.max_rise, change < -self.max_fall
            )
        loss, metrics = _truncated_importance(inputs, self.max_ratio)
        masked = {"ratio/masked_frac": dropped.to(loss.dtype)}
        return loss.masked_fill(dropped, 0.0), metrics | masked


def _log_ratio(inputs: LossInputs, denominator: Denominator) -> torch.Tensor:
    """Return log ρ or log u [N]."""
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


def _check_clip(owner: object, clip_low: float, clip_high: float) -> None:
    require_field(
        owner,
        "clip_low",
        0 < clip_low <= 1,
        rule="must be above 0 and at most 1",
        fix="Use such as 0.2.",
    )
    require_field(
        owner, "clip_high", clip_high > 0, rule="must be positive", fix="Use such as 0.28."
    )


def _check_denominator(owner: object, denominator: str) -> None:
    require_field(
        owner,
        "denominator",
        denominator in get_args(Denominator),
        rule="is unknown",
        fix='Use "sampler" (π_θ/μ) or "proximal" (π_θ/π_prox).',
    )
