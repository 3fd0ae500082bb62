"""What a loss is: a function of the inputs that the training engine makes for each forward pass of
a trained model, and calls the loss with.

    LossInputs    a policy: log-probabilities of tokens            one loss a token, [N]
    ValueInputs   a critic: values of tokens                       one loss a token, [N]
    ScoreInputs   a reward model: scores of whole rollouts         one loss a row, [R]

Beside the loss it returns metrics by name, one value a token (or row), or a `MeanOver`.

Shape legend: N completion tokens with loss mask 1, R rows (rollouts), of one pass.

A loss may say what it asks for, as attributes; the engine and the graph read them with the
functions of the same names:

    needs              columns, beside the fields, that `columns` must hold       default ()
    uses_advantages    whether it reads `advantages`                              default True
    whole_groups       whether all rows of a group must lie in one pass           default False
    of_pairs           whether its value is that of a pair, and so to be      default False
                       aggregated as one
    candidates         column that names tokens, K ids and K values at each       default None
                       token, whose log-probabilities by the trainer are
                       `candidate_logprobs`

A loss that wraps others asks for what it and they ask for; a functools.partial, for what its
function asks for. The functions raise ValueError for an attribute of another type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlsys.common.user_functions import attribute_of, name_of
from rlsys.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Flat tensors over the N completion tokens, with loss mask 1, of one forward pass.

    All tokens of a rollout lie in the same pass. N may be 0: a rank without rows takes part in the
    collectives of the others. A log-probability may be −inf; `rlsys.algorithms.ratios` has what
    stays finite there.

    `columns` holds what the loss needs beyond the fields: [N] each, a scalar of a row repeated over
    its tokens. Names that losses of this package ask for:

        reference_logprobs   by the reference policy
        teacher_logprobs     by the teacher, of the student's tokens
        importance_weights   π_prox/μ, made over a whole batch
        preference           1 for the chosen rollout of a pair, −1 for the rejected one
        teacher_top_k        [N, 2K + 1]: the K likeliest tokens by the teacher, then their
                             log-probabilities by it, then that of all others together
    """

    trainer_logprobs: torch.Tensor  # [N] float32, carries the gradient
    proximal_logprobs: torch.Tensor  # [N] the trainer's policy at the start of the step, detached
    sampler_logprobs: torch.Tensor  # [N]
    advantages: torch.Tensor  # [N]
    entropy: torch.Tensor  # [N] exact, of the trainer's distribution, in nats; carries its gradient
    staleness: torch.Tensor  # [N] int64: policy_version of the trainer less that of the token
    row_index: torch.Tensor  # [N] int64, 0 <= row_index < N: which rollout a token belongs to
    group_index: torch.Tensor | None = None  # [N] int64, which group; None where rows have none
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    # [N, K] of the tokens that the loss's `candidates` names; carries the gradient.
    candidate_logprobs: torch.Tensor | None = None

    def column(self, name: str) -> torch.Tensor:
        return _column(self.columns, name)


@dataclass(frozen=True, kw_only=True)
class ValueInputs:
    """Flat tensors over the N completion tokens, with loss mask 1, of one pass of a critic.

    Columns: `values`, by the critic when the batch was prepared, and `returns`, its targets.
    """

    values: torch.Tensor  # [N] float32, carries the gradient: of the text before the token
    row_index: torch.Tensor  # [N] int64
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def column(self, name: str) -> torch.Tensor:
        return _column(self.columns, name)


@dataclass(frozen=True, kw_only=True)
class ScoreInputs:
    """One score a row, of one pass of a reward model over whole rollouts. R may be 0."""

    scores: torch.Tensor  # [R] float32, carries the gradient
    group_index: torch.Tensor  # [R] int64: rows of one prompt share it; any numbers
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)  # [R] each

    def column(self, name: str) -> torch.Tensor:
        return _column(self.columns, name)


@dataclass(frozen=True)
class MeanOver:
    """A metric that is no mean over tokens (or rows): one over these, whatever they are, of all
    passes of the global batch.
    """

    values: torch.Tensor  # [K], such as one for each pair; K may be 0


# Per-token loss [N], and metrics by name: tensors [N], which are averaged over the tokens of the
# global batch, or MeanOver.
TokenLoss = tuple[torch.Tensor, dict[str, Any]]
LossFn = Callable[[LossInputs], TokenLoss]
ValueLossFn = Callable[[ValueInputs], TokenLoss]
# Of rows: [R] each. The engine aggregates them as rollouts of one token.
ScoreLossFn = Callable[[ScoreInputs], TokenLoss]


def needs_of(loss: object) -> tuple[str, ...]:
    """Names of the columns that a loss or a correction asks for, that of candidates among them."""
    needs = attribute_of(loss, "needs", ())
    if not isinstance(needs, tuple | list) or not all(map(_is_name, needs)):
        raise InvalidValue(
            f"{name_of(loss)}: needs",
            needs,
            rule="must be a tuple of column names",
            fix='Use one such as needs = ("reference_logprobs",).',
        )
    candidates = candidates_of(loss)
    return tuple(dict.fromkeys(needs if candidates is None else (*needs, candidates)))


def uses_advantages(loss: object) -> bool:
    """Whether a policy's loss reads `advantages`; where it does not, any will do."""
    return _said(loss, "uses_advantages", True)


def whole_groups(loss: object) -> bool:
    """Whether all rows of a group must lie in one pass, as the two rows of a pair."""
    return _said(loss, "whole_groups", False)


def of_pairs(loss: object) -> bool:
    """Whether each place has the value of its pair, whose weight must not grow with its length."""
    return _said(loss, "of_pairs", False)


def candidates_of(loss: object) -> str | None:
    """Name of the column with the tokens whose log-probabilities a policy's loss asks for."""
    candidates: str | None = attribute_of(loss, "candidates", None)
    if candidates is not None and not _is_name(candidates):
        raise InvalidValue(
            f"{name_of(loss)}: candidates",
            candidates,
            rule="must be the name of a column",
            fix='Use one such as candidates = "teacher_top_k".',
        )
    return candidates


def check_said(loss: object) -> None:
    """Raise ValueError for an attribute of another type than those functions read."""
    for read in (needs_of, uses_advantages, whole_groups, of_pairs):
        read(loss)


def _said(loss: object, name: str, default: bool) -> bool:
    value = attribute_of(loss, name, default)
    if not isinstance(value, bool):
        raise InvalidValue(
            f"{name_of(loss)}: {name}", value, rule="must be True or False", fix="Use one of these."
        )
    return value


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name)


def _column(columns: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    found = columns.get(name)
    if found is None:
        raise ValueError(
            f"the loss reads column {name!r}, but the pass has {sorted(columns)}; give the train "
            "stage that column, and before it a stage that writes it."
        )
    return found
