"""Pairs of rows of a micro-batch: one chosen and one rejected completion of a prompt.

In, for N entries (tokens or rows): `group_index` [N], the same number for both rows of a pair;
`preference` [N], 1 for the chosen and −1 for the rejected row; `row_index` [N]. A group is one
pair. The losses set `whole_groups`, so both rows are in the same micro-batch. A group with no entry
on one side, such as an empty completion, is incomplete and has no loss.

Shape legend: N entries, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlsys.algorithms.sequences import max_over_rollout
from rlsys.errors import InvalidValue


@dataclass(frozen=True)
class Pairs:
    """P pairs of a micro-batch, as `find_pairs` returns them."""

    pair: torch.Tensor  # [N] int64, 0 <= pair < P: pair of each entry
    chosen: torch.Tensor  # [N] bool
    complete: torch.Tensor  # [P] bool: both sides have entries
    num_chosen: torch.Tensor  # [P] number of entries of the chosen side
    num_rejected: torch.Tensor  # [P] number of entries of the rejected side

    def sums(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of [N] over the chosen and the rejected row of each pair [P], [P]."""
        zeros = values.new_zeros(len(self.complete))
        return (
            zeros.index_add(0, self.pair, torch.where(self.chosen, values, 0.0)),
            zeros.index_add(0, self.pair, torch.where(self.chosen, 0.0, values)),
        )

    def means(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the means of [N] over both rows of each pair [P], [P], 0 without entries."""
        chosen, rejected = self.sums(values)
        return chosen / self.num_chosen.clamp(min=1), rejected / self.num_rejected.clamp(min=1)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return at each entry [N] the value [P] of its pair, 0 for an incomplete pair."""
        return torch.where(self.complete, values, 0.0)[self.pair]


def find_pairs(
    group_index: torch.Tensor | None, preference: torch.Tensor, row_index: torch.Tensor
) -> Pairs:
    """Return the pairs of N entries.

    Raises:
        InvalidValue: There are no groups, or a group does not have one row for each preference.
    """
    if group_index is None:
        raise InvalidValue(
            "group_index",
            None,
            rule="a loss of pairs needs rows with groups",
            fix="Train on rows whose two completions of a prompt share a group.",
        )
    groups, pair = torch.unique(group_index, return_inverse=True)
    chosen = preference > 0
    counts = torch.zeros(2, len(groups), dtype=torch.int64, device=pair.device)
    num_chosen = counts[0].index_add(0, pair, chosen.long())
    num_rejected = counts[1].index_add(0, pair, (~chosen).long())
    # A side has several rows if its largest row number is not its smallest.
    side = pair * 2 + chosen
    _, side = torch.unique(side, return_inverse=True)
    several = max_over_rollout(row_index, side) != -max_over_rollout(-row_index, side)
    if bool(several.any()) or bool((preference == 0).any()):
        raise InvalidValue(
            "group_index",
            int(group_index[several | (preference == 0)][0]),
            rule="the group is not a pair",
            fix="Give each prompt one row with preference 1 and one with preference -1.",
        )
    return Pairs(pair, chosen, (num_chosen > 0) & (num_rejected > 0), num_chosen, num_rejected)
