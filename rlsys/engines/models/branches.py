"""Token paths of a rollout that is a tree.

    prompt   a b c                      path of branch 0    a b c d e f
    own      d e f │ x y │ u v w                    1       a b c d x y
    branches (3, -1, 3, 0) (2, 0, 4, 0) (3, -1, 0, 1)
                                                    2       u v w

A rollout's tokens are the own tokens of its branches, one branch after another. A branch either
continues a prefix of an earlier branch's path, or starts anew; then nothing predicts its first
token. Per-token data of a rollout (versions, advantages, model outputs) keeps this order. Only the
model's inputs follow the paths.

Shape legend: P prompt tokens, T completion tokens, B branches of one rollout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlsys.engines.models.prefix_tree import IntArray
from rlsys.errors import InvalidValue, require
from rlsys.types import BRANCH_FIELDS, NO_PARENT, Int32Array, TrainRow


@dataclass(frozen=True, eq=False)
class Paths:
    """Paths of one rollout's branches.

    Raises InvalidValue for branches that do not describe the rollout's tokens.
    """

    num_prompt: int  # P
    num_tokens: int  # T
    branches: Int32Array  # [4 B], per branch: own tokens, parent, start in the parent's path, seat

    def __post_init__(self) -> None:
        flat = self.branches
        require(
            len(flat) > 0 and len(flat) % BRANCH_FIELDS == 0,
            "branches",
            flat.tolist(),
            rule=f"must hold {BRANCH_FIELDS} numbers per branch, and at least one branch",
            fix=f"Give own tokens, parent, start and seat of each branch, not {len(flat)} numbers.",
        )
        own_tokens = flat[::BRANCH_FIELDS]
        require(
            int(own_tokens.sum()) == self.num_tokens and own_tokens.min() >= 0,
            "branches: own tokens",
            own_tokens.tolist(),
            rule=f"must add up to the {self.num_tokens} tokens of the rollout",
            fix="Count each token in exactly one branch.",
        )
        for number, (own, parent, at) in enumerate(self._fields()):
            allowed: tuple[int, int]
            if parent == NO_PARENT:
                allowed = (self.num_prompt, self.num_prompt) if number == 0 else (0, 0)
            elif 0 <= parent < number:
                allowed = (1, self.lengths[parent])
            else:
                raise InvalidValue(
                    f"branches: parent of branch {number}",
                    parent,
                    rule="must be the number of an earlier branch",
                    fix=f"Use 0 to {number - 1}, or {NO_PARENT} for no parent.",
                )
            require(
                allowed[0] <= at <= allowed[1],
                f"branches: start of branch {number}",
                at,
                rule=f"must be in [{allowed[0]}, {allowed[1]}] for {own} tokens after parent "
                f"{parent}",
                fix="Give the number of the parent path's tokens that the branch continues.",
            )

    @classmethod
    def of(cls, row: TrainRow) -> Paths:
        """Return the paths of a row that has branches."""
        assert row.branches is not None
        return cls(len(row.prompt_token_ids), len(row.token_ids), row.branches)

    def _fields(self) -> Iterator[tuple[int, int, int]]:
        """Return own tokens, parent and start of each branch."""
        table = self.branches.reshape(-1, BRANCH_FIELDS)[:, :3].tolist()
        return ((own, parent, at) for own, parent, at in table)

    @cached_property
    def lengths(self) -> list[int]:
        """[B]: tokens of each path."""
        return [at + own for own, _, at in self._fields()]

    @cached_property
    def places(self) -> list[IntArray]:
        """[B]: indices of each path's tokens in prompt and completion [P + T]."""
        paths: list[IntArray] = []
        end = self.num_prompt
        for own, parent, at in self._fields():
            before = np.arange(at) if parent == NO_PARENT else paths[parent][:at]
            paths.append(np.concatenate((before, np.arange(end, end + own))))
            end += own
        return paths

    @cached_property
    def readers(self) -> list[int]:
        """Branches with own tokens; the model processes their paths."""
        return [number for number, (own, _, _) in enumerate(self._fields()) if own]

    @cached_property
    def input_lengths(self) -> list[int]:
        """Inputs of each branch in `readers`: all tokens but the last, which predicts nothing."""
        return [max(self.lengths[number] - 1, 1) for number in self.readers]

    @cached_property
    def predicted_at(self) -> tuple[IntArray, IntArray]:
        """[T], [T]: for each token the index in `readers` and the input at which it is predicted.

        A token that nothing predicts is read at its own input.
        """
        reader, inputs = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for number, branch in enumerate(self.readers):
            own, _, at = self.branches[BRANCH_FIELDS * branch :][:3].tolist()
            reader.append(np.full(own, number))
            inputs.append(np.maximum(np.arange(at, at + own) - 1, 0))
        return np.concatenate(reader), np.concatenate(inputs)

    @cached_property
    def unpredicted(self) -> IntArray:
        """Indices of tokens without a predecessor, whose log-probability is undefined."""
        ends = np.cumsum([own for own, _, _ in self._fields()])
        found = [
            end - own
            for end, (own, _, at) in zip(ends.tolist(), self._fields(), strict=True)
            if own and not at
        ]
        return np.array(found, np.int64)

    def num_inputs_shared(self, min_shared: int) -> int:
        """Return an upper bound on the inputs after the prompt, with prefixes shared.

        Shared pieces shorter than `min_shared` tokens may be repeated.
        """
        again = (min(at, min_shared - 1) for own, parent, at in self._fields() if parent >= 0)
        return self.num_tokens + sum(again)


def longest_path(row: TrainRow) -> int:
    """Return the tokens of a row's longest path, prompt included."""
    if row.branches is None:
        return len(row.prompt_token_ids) + len(row.token_ids)
    return max(Paths.of(row).lengths)


def check_trained(row: TrainRow) -> None:
    """Raise InvalidValue if a token with loss mask 1 has no predecessor."""
    if row.branches is not None and row.loss_mask[Paths.of(row).unpredicted].any():
        raise InvalidValue(
            "branches",
            rule=f"a rollout of group {row.group_id} has a branch whose first token has loss mask "
            "1, but nothing predicts that token",
            fix="Begin branches without a parent with tokens that the policy did not sample, such "
            "as their prompt.",
        )


def last_path(row: TrainRow) -> Int32Array:
    """Return the tokens of the last branch's path, or all tokens of a row without branches."""
    tokens = np.concatenate((row.prompt_token_ids, row.token_ids))
    return tokens if row.branches is None else tokens[Paths.of(row).places[-1]]
