"""Which groups make the next optimizer step, and when a part of them may start.

A pure state machine. In: groups that are ready to train, in the order in which they should be
trained. Out: parts of the step, each a list of groups for every data-parallel rank.

    add(group) × n ──► next_part() ──► groups ──plan_micro_batches──► rows of every rank, by pass

A part is due when a pass on every rank is full (streaming), and in any case when the step's last
group is there. Several ranks share larger parts more evenly, and a pipeline is idle less in them,
so theirs are a good share of the step. Parts follow from the groups' order and sizes alone, never
from timing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlsys.dataflow.scheduling.microbatch_plan import GroupLengths
from rlsys.dataflow.store.selection import karmarkar_karp

# Of a step, where several ranks or stages share it.
MAX_PARTS = 4


@dataclass(frozen=True, kw_only=True)
class ReadyGroup:
    group_id: int
    row_ids: tuple[int, ...]
    lengths: GroupLengths

    @property
    def num_tokens(self) -> int:
        """Of its rows, with the prompt that they share."""
        return self.lengths.prompt + sum(self.lengths.completions)


@dataclass(kw_only=True)
class StepAssembler:
    groups_per_step: int
    num_ranks: int
    num_stages: int = 1  # of a pipeline, each with a pass
    micro_batch_tokens: int  # of one rank
    stream: bool
    _groups: list[ReadyGroup] = field(default_factory=list)
    _num_taken: int = 0

    @property
    def num_wanted(self) -> int:
        """Groups that the step still lacks."""
        return self.groups_per_step - len(self._groups)

    @property
    def is_finished(self) -> bool:
        """All parts of the step have been handed out."""
        return self._num_taken == self.groups_per_step

    @property
    def groups(self) -> Sequence[ReadyGroup]:
        """Those that the step has so far."""
        return tuple(self._groups)

    @property
    def group_ids(self) -> list[int]:
        return [group.group_id for group in self._groups]

    def add(self, groups: Sequence[ReadyGroup]) -> None:
        assert len(groups) <= self.num_wanted, "more groups than the step takes"
        self._groups.extend(groups)

    def take_back(self, group_id: int) -> ReadyGroup | None:
        """Remove a group that no part has handed out yet; None if one has."""
        for place in range(self._num_taken, len(self._groups)):
            if self._groups[place].group_id == group_id:
                return self._groups.pop(place)
        return None

    def next_part(self) -> list[ReadyGroup] | None:
        """The part that is due; None if none is."""
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
        assert self.is_finished, "the step has parts that were not handed out"
        self.reset()

    def reset(self) -> None:
        """Start the step anew: what it had is handed in again."""
        self._groups, self._num_taken = [], 0


def split(groups: Sequence[ReadyGroup], num_ranks: int) -> list[list[ReadyGroup]]:
    """Whole groups over the ranks, by tokens."""
    shares = karmarkar_karp([group.num_tokens for group in groups], num_ranks)
    return [[groups[i] for i in sorted(share)] for share in shares]


def mini_batches(
    groups: Sequence[ReadyGroup], *, num_minibatches: int, num_epochs: int, seed: int
) -> list[list[ReadyGroup]]:
    """What each optimizer update of a step trains on: in every epoch each group once, in parts that
    differ by one group at most, shuffled where there are several.
    """
    chance = random.Random(seed)
    updates = []
    for _ in range(num_epochs):
        order = list(groups)
        if num_minibatches > 1:
            chance.shuffle(order)
        updates += [order[part::num_minibatches] for part in range(num_minibatches)]
    return updates
