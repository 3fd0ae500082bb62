"""Inputs and attributes of loss functions.

For each micro-batch the training engine runs the model and calls the loss with the result:

    LossInputs    a policy: log-probabilities of tokens            returns a loss per token, [N]
    ValueInputs   a critic: values of tokens                       returns a loss per token, [N]
    ScoreInputs   a reward model: scores of whole rollouts         returns a loss per row, [R]

A loss also returns metrics by name, with one value per token (or row), or a `MeanOver`.

Shape legend: N completion tokens with loss mask 1, R rows (rollouts), K candidate tokens, of one
micro-batch.

A loss may have these attributes. The engine and the graph read them with functions of this file:

    needs              columns that `columns` must hold                           default ()
    uses_advantages    true if it reads `advantages`                              default True
    whole_groups       true if a micro-batch must have all rows of a group        default False
    of_pairs           true if each token has the loss of its pair, so that       default False
                       only `sequence_mean` may aggregate it
    candidates         column with K token ids and their values at each token;    default None
                       `candidate_logprobs` then has their log-probabilities
                       under the trained policy

A loss around other losses has the attributes of all of them. A functools.partial has those of its
function. The functions raise InvalidValue for an attribute of another type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlsys.common.user_functions import attribute_of, name_of
from rlsys.errors import InvalidValue, require


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Flat tensors over the N completion tokens with loss mask 1 of one micro-batch.

    All tokens of a rollout are in the same micro-batch. N may be 0: a rank without rows still takes
    part in the collectives. A log-probability may be −inf; the functions of
    `rlsys.algorithms.ratios` are finite there.

    `columns` holds the columns of `needs`, [N] each; a scalar of a row is repeated over its tokens.
    Columns that losses of this package need:

        reference_logprobs   log-probabilities under the reference policy
        teacher_logprobs     log-probabilities of the student's tokens under the teacher
        importance_weights   π_prox/μ, normalised over a whole batch
        preference           1 for the chosen rollout of a pair, −1 for the rejected one
        teacher_top_k        [N, 2K + 1]: the teacher's K likeliest tokens, their log-probabilities,
                             and the log-probability of all other tokens together
    """

    trainer_logprobs: torch.Tensor  # [N] float32, carries the gradient
    proximal_logprobs: torch.Tensor  # [N] the trainer's policy at the start of the step, detached
    sampler_logprobs: torch.Tensor  # [N]
    advantages: torch.Tensor  # [N]
    entropy: torch.Tensor  # [N] exact, of the trainer's distribution, in nats; carries its gradient
    staleness: torch.Tensor  # [N] int64: policy_version of the trainer minus that of the token
    row_index: torch.Tensor  # [N] int64, 0 <= row_index < N: rollout of the token
    group_index: torch.Tensor | None = None  # [N] int64: group of the token; None without groups
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    # [N, K] of the tokens in the column that `candidates` names; carries the gradient.
    candidate_logprobs: torch.Tensor | None = None

    def column(self, name: str) -> torch.Tensor:
        """Return a column that the loss needs.

        Raises:
            InvalidValue: The graph does not give the loss that column.
        """
        return _column(self.columns, name)


@dataclass(frozen=True, kw_only=True)
class ValueInputs:
    """Flat tensors over the N completion tokens with loss mask 1 of one micro-batch of a critic.

    Columns: `values`, the critic's at the start of the step, and `returns`, its targets.
    """

    values: torch.Tensor  # [N] float32, carries the gradient: value of the text before the token
    row_index: torch.Tensor  # [N] int64
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def column(self, name: str) -> torch.Tensor:
        """Return a column that the loss needs.

        Raises:
            InvalidValue: The graph does not give the loss that column.
        """
        return _column(self.columns, name)


@dataclass(frozen=True, kw_only=True)
class ScoreInputs:
    """Scores of the R rows of one micro-batch of a reward model over whole rollouts. R may be 0."""

    scores: torch.Tensor  # [R] float32, carries the gradient
    group_index: torch.Tensor  # [R] int64: rows of one prompt share it; any numbers
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)  # [R] each

    def column(self, name: str) -> torch.Tensor:
        """Return a column that the loss needs.

        Raises:
            InvalidValue: The graph does not give the loss that column.
        """
        return _column(self.columns, name)


@dataclass(frozen=True)
class MeanOver:
    """Metric that is a mean over its own values instead of tokens or rows.

    The mean runs over the values of all micro-batches of the global batch.
    """

    values: torch.Tensor  # [any number, also 0], such as one for each pair


# Per-token loss [N], and metrics by name: tensors [N], which are averaged over the tokens of the
# global batch, or MeanOver.
TokenLoss = tuple[torch.Tensor, dict[str, Any]]
LossFn = Callable[[LossInputs], TokenLoss]
ValueLossFn = Callable[[ValueInputs], TokenLoss]
# Per-row loss [R] and metrics [R]. The engine aggregates rows as rollouts of one token.
ScoreLossFn = Callable[[ScoreInputs], TokenLoss]


def needs_of(loss: object) -> tuple[str, ...]:
    """Return the names of the columns that a loss or a correction needs, with its candidates."""
    needs = attribute_of(loss, "needs", ())
    require(
        isinstance(needs, tuple | list) and all(map(_is_name, needs)),
        f"{name_of(loss)}: needs",
        needs,
        rule="must be a tuple of column names",
        fix='Use such as needs = ("reference_logprobs",).',
    )
    candidates = candidates_of(loss)
    return tuple(dict.fromkeys(needs if candidates is None else (*needs, candidates)))


def required_columns(loss: object) -> tuple[str, ...]:
    """Return the columns that every row of a policy's loss must have.

    Besides `needs` these are the two that advantages need: the advantages themselves, and the
    log-probabilities of the sampling policy, with which a ratio compares.
    """
    needs = needs_of(loss)
    return ("sampler_logprobs", "advantages", *needs) if uses_advantages(loss) else needs


def uses_advantages(loss: object) -> bool:
    """Return whether a policy's loss reads `advantages`."""
    return _flag(loss, "uses_advantages", True)


def whole_groups(loss: object) -> bool:
    """Return whether a micro-batch must have all rows of a group, such as both rows of a pair."""
    return _flag(loss, "whole_groups", False)


def of_pairs(loss: object) -> bool:
    """Return whether each token has the loss of its pair, so that length must not weigh it."""
    return _flag(loss, "of_pairs", False)


def candidates_of(loss: object) -> str | None:
    """Return the name of the column with the candidate tokens of a policy's loss, if any."""
    candidates: str | None = attribute_of(loss, "candidates", None)
    require(
        candidates is None or _is_name(candidates),
        f"{name_of(loss)}: candidates",
        candidates,
        rule="must be the name of a column",
        fix='Use such as candidates = "teacher_top_k".',
    )
    return candidates


def check_attributes(loss: object) -> None:
    """Raise InvalidValue for an attribute of a wrong type."""
    for read in (needs_of, uses_advantages, whole_groups, of_pairs):
        read(loss)


def _flag(loss: object, name: str, default: bool) -> bool:
    value = attribute_of(loss, name, default)
    if not isinstance(value, bool):
        raise InvalidValue(
            f"{name_of(loss)}: {name}",
            value,
            rule="must be True or False",
            fix=f"Set {name} = {default} for the default.",
        )
    return value


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name)


def _column(columns: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in columns:
        raise InvalidValue(
            "columns",
            sorted(columns),
            rule=f"the loss reads the column {name!r}, which the train stage does not have",
            fix="Pass it to flow.train, and add a stage that writes it.",
        )
    return columns[name]
