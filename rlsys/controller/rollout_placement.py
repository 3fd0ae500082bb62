"""Where rollouts are sampled: on a replica whose node has room for their rows.

A group gets its replica when it is issued, and what a dead replica leaves behind gets another
before any group is issued. Where that finds no room, groups that were issued later give theirs up,
and are issued again. So nothing waits for ever as long as the nodes hold the groups of a step. Of
the first group that lacks room, all before it are being sampled or are done: either they are enough
for a step, whose end makes room; or they are fewer, and the group has room beside them when those
after it are gone. When none lacks room, but too few for a step are there, the next group has room,
on several nodes if need be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlsys.controller.state import RunningGroup, RunState
from rlsys.dataflow.scheduling.router import Router


class RolloutPlacement:
    """`is_in_training`: the trainer has a group, and must not lose it. `whole_groups`: what is
    placed of one is never split, since whoever makes its rollouts looks at them together.
    """

    def __init__(
        self,
        state: RunState,
        router: Router,
        *,
        is_in_training: Callable[[int], bool],
        whole_groups: bool = False,
    ) -> None:
        self._may_split = not whole_groups
        self._state = state
        self._router = router
        self._is_in_training = is_in_training
        self._groups_unassigned: set[int] = (
            set()
        )  # groups that may have rollouts which nobody samples

    def mark_unassigned(self, group: RunningGroup, indices: Sequence[int]) -> None:
        """These rollouts have no replica."""
        group.unassigned = sorted({*group.unassigned, *indices})
        self._groups_unassigned.add(group.group_id)

    def first_unassigned(self) -> RunningGroup | None:
        """Of the groups with such rollouts, the one that was issued first."""
        if not self._groups_unassigned:
            return None
        found = [self._state.groups.get(group_id) for group_id in self._groups_unassigned]
        waiting = [group for group in found if group is not None and group.unassigned]
        self._groups_unassigned = {group.group_id for group in waiting}
        return min(waiting, key=lambda group: group.rows[0], default=None)

    def has_room(self, group_id: int) -> bool:
        """Whether a group can be issued. Over several nodes, which costs what its rollouts share,
        only where a step could not be filled else.
        """
        config = self._state.config
        may_split = len(self._state.groups) < config.prompts_per_step
        return bool(self._choose(group_id, config.group_size, may_split=may_split))

    def place(self, group: RunningGroup, indices: Sequence[int]) -> Mapping[str, Sequence[int]]:
        """Reserve for rollouts; returns those that each replica is to sample, none without room."""
        placed: dict[str, Sequence[int]] = {}
        start = 0
        for name, share in self._choose(group.group_id, len(indices), may_split=True).items():
            placed[name] = indices[start : start + share]
            start += share
            rows = [group.rows[index] for index in placed[name]]
            self._state.store.place(rows, self._router.node(name))
        return placed

    def place_unassigned(self, group: RunningGroup) -> Mapping[str, Sequence[int]]:
        """The same for those that were left behind, which later groups make room for."""
        if not (placed := self.place(group, group.unassigned)):
            self._make_room(group)
            placed = self.place(group, group.unassigned)
        if placed:
            group.unassigned = []
        return placed

    def place_restored(self, rows: Sequence[int], node: str) -> bool:
        """Rows of rollouts that have ended and lie there, where there may be no replica. False: it
        has no room.
        """
        store = self._state.store
        store.add_node(node)
        has_room = store.room(node) >= len(rows)
        if has_room:
            store.place(rows, node)
        if node not in self._router.nodes:
            store.remove_node(node)
        return has_room

    def _choose(self, group_id: int, num_rows: int, *, may_split: bool) -> Mapping[str, int]:
        room = self._state.store.room
        name = self._router.choose(num_rows, affinity=group_id, room=room)
        if name is not None:
            return {name: num_rows}
        return self._router.split(num_rows, room=room) if may_split and self._may_split else {}

    def _make_room(self, group: RunningGroup) -> None:
        """Issue later groups again, the last of all first, as many as it takes until there is room
        for what was left behind of this one; none if that is not enough.
        """
        state, wanted = self._state, len(group.unassigned)
        later = [
            other.group_id
            for other in state.groups.values()
            if other.rows[0] > group.rows[0] and not self._is_in_training(other.group_id)
        ]
        later.reverse()
        nodes = self._router.nodes
        for num_given_up, room in enumerate(state.store.room_without(later)):
            if sum(room[node] for node in nodes) >= wanted:
                for group_id in later[:num_given_up]:
                    state.store.drop_group(group_id)
                    state.reissue(state.groups[group_id])
                return
