"""What stands before each token of a rollout that is a tree.

    prompt   a b c                      path of branch 0    a b c d e f
    own      d e f │ x y │ u v w                    1       a b c d x y
    branches (3, -1, 3, 0) (2, 0, 4, 0) (3, -1, 0, 1)
                                                    2       u v w

A rollout's tokens are the own tokens of its branches, one branch after another. A branch goes on
behind the first tokens of an earlier one's path, or begins anew, and then its first token is
predicted from nothing. What a rollout has of each token (versions, advantages, what a model says of
it) stands in that order, whatever its branches are; only what a model reads follows the paths.

Shape legend: P prompt tokens, T completion tokens, B branches of one rollout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlsys.engines.models.prefix_tree import IntArray
from rlsys.types import BRANCH_FIELDS, NO_PARENT, Int32Array, TrainRow


@dataclass(frozen=True, eq=False)
class Paths:
    """Of one rollout. Raises ValueError for branches that do not describe its tokens."""

    num_prompt: int  # P
    num_tokens: int  # T
    branches: Int32Array  # [4 B]: own tokens, parent, where in its path, seat; of each branch

    def __post_init__(self) -> None:
        flat = self.branches
        if not len(flat) or len(flat) % BRANCH_FIELDS:
            raise ValueError(
                f"branches have {len(flat)} numbers; give {BRANCH_FIELDS} of each, at least one."
            )
        num_own = int(flat[::BRANCH_FIELDS].sum())
        if num_own != self.num_tokens or flat[::BRANCH_FIELDS].min() < 0:
            raise ValueError(
                f"branches have {flat[::BRANCH_FIELDS].tolist()} own tokens, and the rollout has "
                f"{self.num_tokens}; each token is one branch's own."
            )
        for number, (own, parent, at) in enumerate(self._fields()):
            allowed: tuple[int, int]
            if parent == NO_PARENT:
                allowed = (self.num_prompt, self.num_prompt) if number == 0 else (0, 0)
            elif 0 <= parent < number:
                allowed = (1, self.lengths[parent])
            else:
                raise ValueError(
                    f"branch {number} has parent {parent}; name an earlier one, or {NO_PARENT} for "
                    "none."
                )
            if not allowed[0] <= at <= allowed[1]:
                raise ValueError(
                    f"branch {number} of {own} tokens begins behind {at} tokens of its parent "
                    f"({parent}); that takes {allowed[0]} to {allowed[1]}."
                )

    @classmethod
    def of(cls, row: TrainRow) -> Paths:
        """Of a row that has branches."""
        assert row.branches is not None
        return cls(len(row.prompt_token_ids), len(row.token_ids), row.branches)

    def _fields(self) -> Iterator[tuple[int, int, int]]:
        """Of each branch its own tokens, its parent and where it begins."""
        table = self.branches.reshape(-1, BRANCH_FIELDS)[:, :3].tolist()
        return ((own, parent, at) for own, parent, at in table)

    @cached_property
    def lengths(self) -> list[int]:
        """[B]: tokens of each path."""
        return [at + own for own, _, at in self._fields()]

    @cached_property
    def places(self) -> list[IntArray]:
        """[B]: where the tokens of each path stand among prompt and completion [P + T]."""
        paths: list[IntArray] = []
        end = self.num_prompt
        for own, parent, at in self._fields():
            behind = np.arange(at) if parent == NO_PARENT else paths[parent][:at]
            paths.append(np.concatenate((behind, np.arange(end, end + own))))
            end += own
        return paths

    @cached_property
    def readers(self) -> list[int]:
        """Branches with tokens of their own, whose paths a model reads."""
        return [number for number, (own, _, _) in enumerate(self._fields()) if own]

    @cached_property
    def input_lengths(self) -> list[int]:
        """Of each of these, the tokens that a model is given: all but the last, which predicts
        nothing.
        """
        return [max(self.lengths[number] - 1, 1) for number in self.readers]

    @cached_property
    def predicted_at(self) -> tuple[IntArray, IntArray]:
        """[T], [T]: which of the `readers` predicts a token, and at which of its inputs. One that
        is predicted from nothing is read at itself.
        """
        reader, inputs = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for number, branch in enumerate(self.readers):
            own, _, at = self.branches[BRANCH_FIELDS * branch :][:3].tolist()
            reader.append(np.full(own, number))
            inputs.append(np.maximum(np.arange(at, at + own) - 1, 0))
        return np.concatenate(reader), np.concatenate(inputs)

    @cached_property
    def unpredicted(self) -> IntArray:
        """Of the T tokens those that nothing stands before."""
        ends = np.cumsum([own for own, _, _ in self._fields()])
        found = [
            end - own
            for end, (own, _, at) in zip(ends.tolist(), self._fields(), strict=True)
            if own and not at
        ]
        return np.array(found, np.int64)

    def num_inputs_shared(self, min_shared: int) -> int:
        """The most inputs of all paths, beside the prompt, where what they share stands once but
        for pieces of less than `min_shared` tokens.
        """
        again = (min(at, min_shared - 1) for own, parent, at in self._fields() if parent >= 0)
        return self.num_tokens + sum(again)


def longest_path(row: TrainRow) -> int:
    """Tokens."""
    if row.branches is None:
        return len(row.prompt_token_ids) + len(row.token_ids)
    return max(Paths.of(row).lengths)


def check_trained(row: TrainRow) -> None:
    """Raise ValueError for a token that is trained on and predicted from nothing."""
    if row.branches is not None and row.loss_mask[Paths.of(row).unpredicted].any():
        raise ValueError(
            f"a rollout of group {row.group_id} has a branch that begins with a token that is "
            "trained on, and nothing predicts it; begin branches without a parent with tokens "
            "that no policy sampled, such as their prompt."
        )


def last_path(row: TrainRow) -> Int32Array:
    """The tokens of the branch that a rollout ended with, which may be its only one."""
    tokens = np.concatenate((row.prompt_token_ids, row.token_ids))
    return tokens if row.branches is None else tokens[Paths.of(row).places[-1]]
