"""Losses on preferences between two completions of a prompt.

For policies (DPO and similar), in: `LossInputs` whose rows are pairs (row_pairs.py), with the
column `preference` and, for losses with a reference, `reference_logprobs`. Out: at each token of
both rows the loss of the pair. `sequence_mean`, which gives every row the same weight, then
computes the mean over pairs. Advantages, μ and π_prox are not used.

For reward models, in: `ScoreInputs`. Out: the loss of the pair at both of its rows.

Metrics are means over pairs: `preference/incomplete_frac` over all pairs with at least one token,
`preference/accuracy` (the fraction with a positive margin) and `preference/margin` over complete
pairs.

Notation: c chosen, r rejected; a policy's log π(y) is the sum over the tokens of y;
h = (log π(c) − log π_ref(c)) − (log π(r) − log π_ref(r)); β > 0. Shape legend: P pairs.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch.nn.functional import logsigmoid

from rlsys.algorithms.loss_inputs import LossInputs, MeanOver, ScoreInputs, TokenLoss
from rlsys.algorithms.parameters import parameters, require_field
from rlsys.algorithms.ratios import check_coefficient, floored, log_ratio, with_slope
from rlsys.algorithms.row_pairs import Pairs, find_pairs

MAX_MEAN_LOGPROB = -1e-6  # ORPO's odds are infinite at 0


class PairLoss:
    """Attributes that the losses of this file have in common."""

    denominator: ClassVar[str] = "none"
    uses_advantages: ClassVar[bool] = False
    whole_groups: ClassVar[bool] = True
    of_pairs: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("preference", "reference_logprobs")


@parameters
class dpo(PairLoss):
    """−(1 − ε) log σ(βh) − ε log σ(−βh): DPO, 2305.18290, equation 7, at ε = 0.

    `label_smoothing` ε < ½ is the fraction of wrong labels: conservative DPO (Mitchell, 2023). With
    `robust` the loss is (… + ε log σ(−βh))/(1 − 2ε), which is unbiased under that noise:
    2403.00409.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    robust: bool = False

    def __post_init__(self) -> None:
        _check_positive(self, "beta")
        require_field(
            self,
            "label_smoothing",
            0 <= self.label_smoothing < 0.5,
            rule="must be at least 0 and below 0.5",
            fix="Use the fraction of wrong labels.",
        )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the pair's loss at each token [N] and metrics."""
        pairs, margin = _margins_from_reference(inputs)
        right, wrong = -logsigmoid(self.beta * margin), -logsigmoid(-self.beta * margin)
        noise = self.label_smoothing
        if self.robust:
            losses = ((1 - noise) * right - noise * wrong) / (1 - 2 * noise)
        else:
            losses = (1 - noise) * right + noise * wrong
        return _result(pairs, losses, self.beta * margin)


@parameters
class ipo(PairLoss):
    """(h − 1/(2β))²: IPO, 2310.12036, equation 17, whose τ is β.

    h is a sum over tokens, as in the paper; some implementations take means.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        _check_positive(self, "beta")

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the pair's loss at each token [N] and metrics."""
        pairs, margin = _margins_from_reference(inputs)
        return _result(pairs, (margin - 1 / (2 * self.beta)).square(), self.beta * margin)


@parameters
class slic(PairLoss):
    """max(0, 1 − βh): hinge loss of SLiC, 2305.10425, with a reference as in RSO, 2309.06657."""

    beta: float = 0.1

    def __post_init__(self) -> None:
        _check_positive(self, "beta")

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the pair's loss at each token [N] and metrics."""
        pairs, margin = _margins_from_reference(inputs)
        return _result(pairs, (1 - self.beta * margin).clamp(min=0), self.beta * margin)


@parameters
class simpo(PairLoss):
    """−log σ(β · (mean_t log π(c) − mean_t log π(r)) − γ): SimPO, 2405.14734, equation 6.

    It needs no reference.
    """

    beta: float = 2.0
    gamma: float = 1.0
    needs: ClassVar[tuple[str, ...]] = ("preference",)

    def __post_init__(self) -> None:
        _check_positive(self, "beta")

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the pair's loss at each token [N] and metrics."""
        pairs = _pairs(inputs)
        chosen, rejected = pairs.means(floored(inputs.trainer_logprobs))
        margin = self.beta * (chosen - rejected)
        return _result(pairs, -logsigmoid(margin - self.gamma), margin)


@parameters
class orpo(PairLoss):
    """−mean_t log π(c) − weight · log σ(log odds(c) − log odds(r)): ORPO, 2403.07691.

    odds = p/(1 − p) with p = exp(mean_t log π). The loss combines supervised training on the chosen
    row with the preference. It needs no reference.
    """

    weight: float = 0.1
    needs: ClassVar[tuple[str, ...]] = ("preference",)

    def __post_init__(self) -> None:
        _check_positive(self, "weight")

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the pair's loss at each token [N] and metrics."""
        pairs = _pairs(inputs)
        chosen, rejected = pairs.means(floored(inputs.trainer_logprobs))
        margin = _log_odds(chosen) - _log_odds(rejected)
        return _result(pairs, -chosen - self.weight * logsigmoid(margin), margin)


@parameters
class bradley_terry:
    """−log σ(s(c) − s(r)): loss of a reward model, 2203.02155, equation 1, with two completions.

    The loss depends only on the difference of the scores. `centre` adds centre · (s(c) + s(r))²,
    which keeps the scores around 0 (2312.09244).
    """

    centre: float = 0.0
    needs: ClassVar[tuple[str, ...]] = ("preference",)
    whole_groups: ClassVar[bool] = True
    of_pairs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_coefficient(self, "centre")

    def __call__(self, inputs: ScoreInputs) -> TokenLoss:
        """Return the pair's loss at each row [R] and metrics."""
        rows = torch.arange(len(inputs.scores), device=inputs.scores.device)
        pairs = find_pairs(inputs.group_index, inputs.column("preference"), rows)
        chosen, rejected = pairs.sums(inputs.scores)
        losses = -logsigmoid(chosen - rejected) + self.centre * (chosen + rejected).square()
        return _result(pairs, losses, chosen - rejected)


def _pairs(inputs: LossInputs) -> Pairs:
    return find_pairs(inputs.group_index, inputs.column("preference"), inputs.row_index)


def _margins_from_reference(inputs: LossInputs) -> tuple[Pairs, torch.Tensor]:
    """Return the pairs and their h [P]."""
    pairs = _pairs(inputs)
    reference = inputs.column("reference_logprobs")
    chosen, rejected = pairs.sums(log_ratio(inputs.trainer_logprobs, reference))
    return pairs, chosen - rejected


def _log_odds(mean_logprobs: torch.Tensor) -> torch.Tensor:
    """Return log p/(1 − p) of the mean log-probability of each row, with p bounded below 1.

    The derivative 1/(1 − p) uses the same bounded p. It does not vanish beyond the bound, because
    training must lower the probability of a rejected completion also if it is 1.
    """
    bounded = mean_logprobs.detach().clamp(max=MAX_MEAN_LOGPROB)
    rest = -torch.expm1(bounded)  # 1 − p
    return with_slope(bounded - torch.log(rest), 1 / rest, mean_logprobs)


def _result(pairs: Pairs, losses: torch.Tensor, margins: torch.Tensor) -> TokenLoss:
    """Return the losses at each token (or row) of the pairs, and metrics of the pairs."""
    margins = margins.detach()[pairs.complete]
    return pairs.spread(losses), {
        "preference/accuracy": MeanOver((margins > 0).to(margins.dtype)),
        "preference/margin": MeanOver(margins),
        "preference/incomplete_frac": MeanOver((~pairs.complete).to(margins.dtype)),
    }


def _check_positive(owner: object, name: str) -> None:
    require_field(
        owner,
        name,
        0 < getattr(owner, name) < math.inf,
        rule="must be positive and finite",
        fix="Use such as 0.1.",
    )
