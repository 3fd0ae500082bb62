"""Assembly of optimizer steps from groups, in parts that can start early.

A pure state machine. In: groups that are ready to train, in training order. Out: parts of the step,
each a list of groups for all data-parallel ranks.

    add(group) × n ──► next_part() ──► groups ──plan_micro_batches──► rows of each rank

With streaming, a part is due when the micro-batches of all ranks are full. The last part is due
when the step has all its groups. With several ranks or pipeline stages, parts are larger: ranks
share them more evenly, and a pipeline idles less. Parts depend on the order and sizes of groups
only, never on timing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlsys.dataflow.scheduling.microbatch_plan import GroupLengths
from rlsys.dataflow.store.selection import karmarkar_karp

# Maximum parts of a step with several ranks or pipeline stages.
MAX_PARTS = 4


@dataclass(frozen=True, kw_only=True)
class ReadyGroup:
    """A group that is ready to train."""

    group_id: int
    row_ids: tuple[int, ...]
    lengths: GroupLengths

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all rows, with their shared prompt counted once."""
        return self.lengths.prompt + sum(self.lengths.completions)


@dataclass(kw_only=True)
class StepAssembler:
    """The groups of the next step and the parts that are taken from it."""

    groups_per_step: int
    num_ranks: int
    num_stages: int = 1  # pipeline stages, each with a micro-batch
    micro_batch_tokens: int  # of one rank
    stream: bool
    _groups: list[ReadyGroup] = field(default_factory=list)
    _num_taken: int = 0

    @property
    def num_wanted(self) -> int:
        """Number of groups that the step still needs."""
        return self.groups_per_step - len(self._groups)

    @property
    def is_finished(self) -> bool:
        """Return whether all parts of the step have been taken."""
        return self._num_taken == self.groups_per_step

    @property
    def groups(self) -> Sequence[ReadyGroup]:
        """Groups of the step so far."""
        return tuple(self._groups)

    @property
    def group_ids(self) -> list[int]:
        """Ids of the step's groups so far."""
        return [group.group_id for group in self._groups]

    def add(self, groups: Sequence[ReadyGroup]) -> None:
        """Add groups to the step."""
        assert len(groups) <= self.num_wanted, "more groups than the step takes"
        self._groups.extend(groups)

    def take_back(self, group_id: int) -> ReadyGroup | None:
        """Remove and return a group that no part has taken; return None if a part has."""
        for place in range(self._num_taken, len(self._groups)):
            if self._groups[place].group_id == group_id:
                return self._groups.pop(place)
        return None

    def next_part(self) -> list[ReadyGroup] | None:
        """Take the part that is due; return None if none is."""
        pending = self._groups[self._num_taken :]
        if not pending:
            return None
        num_sharing = self.num_ranks * self.num_stages
        full = self.micro_batch_tokens * num_sharing
        fewest = 1 if num_sharing == 1 else -(-self.groups_per_step // MAX_PARTS)
        size = num_tokens = 0
        for group in pending:
            if size >= fewest and num_tokens + group.num_tokens > full:
                break
            size, num_tokens = size + 1, num_tokens + group.num_tokens
        is_full = size < len(pending) or (size >= fewest and num_tokens >= full)
        if self.num_wanted and not (self.stream and is_full):
            return None
        part = pending[:size] if self.stream else pending
        self._num_taken += len(part)
        return part

    def finish(self) -> None:
        """Start the next step."""
        assert self.is_finished, "the step has parts that were not taken"
        self.reset()

    def reset(self) -> None:
        """Remove all groups from the step."""
        self._groups, self._num_taken = [], 0


def split(groups: Sequence[ReadyGroup], num_ranks: int) -> list[list[ReadyGroup]]:
    """Split whole groups over the ranks so that their numbers of tokens are similar."""
    shares = karmarkar_karp([group.num_tokens for group in groups], num_ranks)
    return [[groups[i] for i in sorted(share)] for share in shares]


def mini_batches(
    groups: Sequence[ReadyGroup], *, num_minibatches: int, num_epochs: int, seed: int
) -> list[list[ReadyGroup]]:
    """Return the groups of each optimizer update of a step.

    Each epoch has each group once. Its minibatches differ by at most one group, and are shuffled if
    there are several.
    """
    rng = random.Random(seed)
    updates = []
    for _ in range(num_epochs):
        order = list(groups)
        if num_minibatches > 1:
            rng.shuffle(order)
        updates += [order[part::num_minibatches] for part in range(num_minibatches)]
    return updates
