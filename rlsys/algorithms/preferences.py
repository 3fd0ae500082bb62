"""Losses of preferences: which of two completions of a prompt is better.

For policies (DPO and its kin), in: `LossInputs` whose rows are pairs (row_pairs.py), with columns
`preference` and, where the loss compares with a reference, `reference_logprobs`. Out: the loss of
the pair at each of its tokens, of both rows, so that `sequence_mean`, which gives every row the
same weight, makes the mean over pairs of it. Advantages, μ and π_prox are not used.

For reward models, in: `ScoreInputs`. Out: the loss of the pair at both of its rows.

Metrics are means over pairs: `preference/incomplete_frac` over all of which any token is there,
`preference/accuracy` (the part with a positive margin) and `preference/margin` over complete ones.

Notation: c chosen, r rejected; a policy's log π(y) is the sum over the tokens of y;
h = (log π(c) − log π_ref(c)) − (log π(r) − log π_ref(r)); β > 0.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch.nn.functional import logsigmoid

from rlsys.algorithms.loss_inputs import LossInputs, MeanOver, ScoreInputs, TokenLoss
from rlsys.algorithms.parameters import parameters
from rlsys.algorithms.ratios import floored, log_ratio, with_slope
from rlsys.algorithms.row_pairs import Pairs, find_pairs

MAX_MEAN_LOGPROB = -1e-6  # ORPO's odds are infinite at 0


class PairLoss:
    """What the losses of this page have in common, for the engine and the graph."""

    denominator: ClassVar[str] = "none"
    uses_advantages: ClassVar[bool] = False
    whole_groups: ClassVar[bool] = True
    of_pairs: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("preference", "reference_logprobs")


@parameters
class dpo(PairLoss):
    """−(1 − ε) log σ(βh) − ε log σ(−βh): DPO, 2305.18290, equation 7, at ε = 0.

    `label_smoothing` ε < ½ is the part of the labels that is wrong: conservative DPO (Mitchell,
    2023). With `robust` the loss is (… + ε log σ(−βh))/(1 − 2ε), unbiased under that noise:
    2403.00409.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    robust: bool = False

    def __post_init__(self) -> None:
        _check_positive("beta", self.beta)
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} takes labels for noise; use 0 to 0.5."
            )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
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
        _check_positive("beta", self.beta)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        pairs, margin = _margins_from_reference(inputs)
        return _result(pairs, (margin - 1 / (2 * self.beta)).square(), self.beta * margin)


@parameters
class slic(PairLoss):
    """max(0, 1 − βh): the hinge of SLiC (2305.10425), normalised by the reference as in RSO,
    2309.06657.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        _check_positive("beta", self.beta)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        pairs, margin = _margins_from_reference(inputs)
        return _result(pairs, (1 - self.beta * margin).clamp(min=0), self.beta * margin)


@parameters
class simpo(PairLoss):
    """−log σ(β · (mean_t log π(c) − mean_t log π(r)) − γ): SimPO, 2405.14734, equation 6.

    Without a reference.
    """

    beta: float = 2.0
    gamma: float = 1.0
    needs: ClassVar[tuple[str, ...]] = ("preference",)

    def __post_init__(self) -> None:
        _check_positive("beta", self.beta)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        pairs = _pairs(inputs)
        chosen, rejected = pairs.means(floored(inputs.trainer_logprobs))
        margin = self.beta * (chosen - rejected)
        return _result(pairs, -logsigmoid(margin - self.gamma), margin)


@parameters
class orpo(PairLoss):
    """−mean_t log π(c) − weight · log σ(log odds(c) − log odds(r)), odds = p/(1 − p) with
    p = exp(mean_t log π): ORPO, 2403.07691.

    Supervised training on the chosen row and a preference in one; without a reference.
    """

    weight: float = 0.1
    needs: ClassVar[tuple[str, ...]] = ("preference",)

    def __post_init__(self) -> None:
        _check_positive("weight", self.weight)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        pairs = _pairs(inputs)
        chosen, rejected = pairs.means(floored(inputs.trainer_logprobs))
        margin = _log_odds(chosen) - _log_odds(rejected)
        return _result(pairs, -chosen - self.weight * logsigmoid(margin), margin)


@parameters
class bradley_terry:
    """−log σ(s(c) − s(r)): a reward model's loss; 2203.02155, equation 1, with two completions.

    `centre` adds centre · (s(c) + s(r))², which keeps the scores around 0 (2312.09244): the loss
    knows their differences alone.
    """

    centre: float = 0.0
    needs: ClassVar[tuple[str, ...]] = ("preference",)
    whole_groups: ClassVar[bool] = True
    of_pairs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.centre < math.inf:
            raise ValueError(f"centre={self.centre} pushes scores apart; use 0 or more.")

    def __call__(self, inputs: ScoreInputs) -> TokenLoss:
        rows = torch.arange(len(inputs.scores), device=inputs.scores.device)
        pairs = find_pairs(inputs.group_index, inputs.column("preference"), rows)
        chosen, rejected = pairs.sums(inputs.scores)
        losses = -logsigmoid(chosen - rejected) + self.centre * (chosen + rejected).square()
        return _result(pairs, losses, chosen - rejected)


def _pairs(inputs: LossInputs) -> Pairs:
    return find_pairs(inputs.group_index, inputs.column("preference"), inputs.row_index)


def _margins_from_reference(inputs: LossInputs) -> tuple[Pairs, torch.Tensor]:
    """The pairs, and h of each, [P]."""
    pairs = _pairs(inputs)
    reference = inputs.column("reference_logprobs")
    chosen, rejected = pairs.sums(log_ratio(inputs.trainer_logprobs, reference))
    return pairs, chosen - rejected


def _log_odds(mean_logprobs: torch.Tensor) -> torch.Tensor:
    """Return log p/(1 − p) of the mean log-probability of each row, with p bounded below 1.

    The derivative 1/(1 − p) takes the same bounded p. It does not vanish beyond the bound: a
    rejected completion of probability 1 must lose some.
    """
    bounded = mean_logprobs.detach().clamp(max=MAX_MEAN_LOGPROB)
    rest = -torch.expm1(bounded)  # 1 − p
    return with_slope(bounded - torch.log(rest), 1 / rest, mean_logprobs)


def _result(pairs: Pairs, losses: torch.Tensor, margins: torch.Tensor) -> TokenLoss:
    """Losses at each token (or row) of the pairs, and metrics of the pairs."""
    margins = margins.detach()[pairs.complete]
    return pairs.give_back(losses), {
        "preference/accuracy": MeanOver((margins > 0).to(margins.dtype)),
        "preference/margin": MeanOver(margins),
        "preference/incomplete_frac": MeanOver((~pairs.complete).to(margins.dtype)),
    }


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value} teaches no preference; use a positive number.")
