"""Which rows of a pass are a pair: one chosen and one rejected completion of a prompt.

In, for N entries (tokens, or rows): `group_index` [N], the same number for both rows of a pair;
`preference` [N], 1 for the chosen and −1 for the rejected; `row_index` [N]. A group is one pair.
Both rows must lie in the same pass (`whole_groups` of the losses asks the engine for that). A group
of which one side has no entry, such as an empty completion, is incomplete and has no loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlsys.algorithms.sequences import max_over_rollout


@dataclass(frozen=True)
class Pairs:
    """P pairs of a pass. Made by `find_pairs`."""

    pair: torch.Tensor  # [N] int64, 0 <= pair < P: that of each entry
    chosen: torch.Tensor  # [N] bool
    complete: torch.Tensor  # [P] bool: both sides are here
    num_chosen: torch.Tensor  # [P] entries, of each side
    num_rejected: torch.Tensor  # [P]

    def sums(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of [N], over the chosen and over the rejected row of each pair: [P], [P]."""
        zeros = values.new_zeros(len(self.complete))
        return (
            zeros.index_add(0, self.pair, torch.where(self.chosen, values, 0.0)),
            zeros.index_add(0, self.pair, torch.where(self.chosen, 0.0, values)),
        )

    def means(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, rejected = self.sums(values)
        return chosen / self.num_chosen.clamp(min=1), rejected / self.num_rejected.clamp(min=1)

    def give_back(self, of_pairs: torch.Tensor) -> torch.Tensor:
        """[P] -> [N]: to every entry what its pair has, 0 where the pair is incomplete."""
        return torch.where(self.complete, of_pairs, 0.0)[self.pair]


def find_pairs(
    group_index: torch.Tensor | None, preference: torch.Tensor, row_index: torch.Tensor
) -> Pairs:
    """Raises ValueError for groups that are no pairs."""
    if group_index is None:
        raise ValueError(
            "a loss of pairs got rows without groups; train on rows whose two completions of a "
            "prompt share a group."
        )
    groups, pair = torch.unique(group_index, return_inverse=True)
    chosen = preference > 0
    counts = torch.zeros(2, len(groups), dtype=torch.int64, device=pair.device)
    num_chosen = counts[0].index_add(0, pair, chosen.long())
    num_rejected = counts[1].index_add(0, pair, (~chosen).long())
    # Two rows on one side: the largest row number of a side is not the smallest.
    side = pair * 2 + chosen
    _, side = torch.unique(side, return_inverse=True)
    several = max_over_rollout(row_index, side) != -max_over_rollout(-row_index, side)
    if bool(several.any()) or bool((preference == 0).any()):
        group = int(group_index[several | (preference == 0)][0])
        raise ValueError(
            f"group {group} is no pair; give each prompt one row with preference 1 and one with "
            "preference -1."
        )
    return Pairs(pair, chosen, (num_chosen > 0) & (num_rejected > 0), num_chosen, num_rejected)
