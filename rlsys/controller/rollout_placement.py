"""Placement of rollouts: each goes to a replica whose node has room for its rows.

A group gets its replica when it is issued. Unassigned rollouts of a dead replica get another one
before any new group is issued. If there is no room for them, groups that were issued later are
dropped from the store and issued again.

So no group waits for ever as long as the nodes hold the groups of one step. Consider the first
group without room. All groups before it are being sampled or are done. If they fill a step, its end
makes room. If they do not, the group fits once the groups after it are gone. If no group lacks room
but there are too few for a step, the next group fits, on several nodes if necessary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlsys.controller.state import RunningGroup, RunState
from rlsys.dataflow.scheduling.router import Router


class RolloutPlacement:
    """The assignment of rollouts to replicas and of their rows to nodes.

    Args:
        is_in_training: Whether the trainer has taken a group, whose rows must stay.
        whole_groups: Never split a group over replicas, since its environment rewards the group
            as a whole.
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
        self._groups_unassigned: set[int] = set()  # ids of groups that may have some

    def mark_unassigned(self, group: RunningGroup, indices: Sequence[int]) -> None:
        """Record that these rollouts have no replica."""
        group.unassigned = sorted({*group.unassigned, *indices})
        self._groups_unassigned.add(group.group_id)

    def first_unassigned(self) -> RunningGroup | None:
        """Return the group with unassigned rollouts that was issued first."""
        if not self._groups_unassigned:
            return None
        found = [self._state.groups.get(group_id) for group_id in self._groups_unassigned]
        waiting = [group for group in found if group is not None and group.unassigned]
        self._groups_unassigned = {group.group_id for group in waiting}
        return min(waiting, key=lambda group: group.rows[0], default=None)

    def has_room(self, group_id: int) -> bool:
        """Return whether a group can be issued.

        A group is split over several nodes, which computes its prompt several times, only if a step
        could not be filled otherwise.
        """
        config = self._state.config
        may_split = len(self._state.groups) < config.prompts_per_step
        return bool(self._choose(group_id, config.group_size, may_split=may_split))

    def place(self, group: RunningGroup, indices: Sequence[int]) -> Mapping[str, Sequence[int]]:
        """Reserve room for rollouts and return their indices by replica; empty without room."""
        placed: dict[str, Sequence[int]] = {}
        start = 0
        for name, share in self._choose(group.group_id, len(indices), may_split=True).items():
            placed[name] = indices[start : start + share]
            start += share
            rows = [group.rows[index] for index in placed[name]]
            self._state.store.place(rows, self._router.node(name))
        return placed

    def place_unassigned(self, group: RunningGroup) -> Mapping[str, Sequence[int]]:
        """Place the unassigned rollouts of a group; later groups make room for them."""
        if not (placed := self.place(group, group.unassigned)):
            self._make_room(group)
            placed = self.place(group, group.unassigned)
        if placed:
            group.unassigned = []
        return placed

    def place_restored(self, rows: Sequence[int], node: str) -> bool:
        """Place rows of restored rollouts on their node, which may have no replica.

        Return False if it has no room.
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
        """Issue later groups again, the last first, until the unassigned rollouts fit.

        Do nothing if all of them together would not make enough room.
        """
        state, num_wanted = self._state, len(group.unassigned)
        later = [
            other.group_id
            for other in state.groups.values()
            if other.rows[0] > group.rows[0] and not self._is_in_training(other.group_id)
        ]
        later.reverse()
        nodes = self._router.nodes
        for num_dropped, room in enumerate(state.store.room_without(later)):
            if sum(room[node] for node in nodes) >= num_wanted:
                for group_id in later[:num_dropped]:
                    state.store.drop_group(group_id)
                    state.reissue(state.groups[group_id])
                return
