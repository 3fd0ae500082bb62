"""The router assigns requests to replicas.

A pure state machine. Requests that share a prefix go to one replica, whose cache then holds the
prefix once. It is the one with the fewest outstanding tokens among those whose node has room for
the rows. Later requests of the same affinity, such as the next turns of an episode, go to the same
replica. A replica that has died gets no more requests; its outstanding ones are returned and routed
again. Replicas may be added, paused and removed at any time. A paused replica gets no requests and
keeps the outstanding ones.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence


class Router:
    """The outstanding requests of all replicas."""

    def __init__(self) -> None:
        self._outstanding: dict[str, dict[str, int]] = {}
        self._load: dict[str, int] = {}
        self._nodes: dict[str, str] = {}  # of each replica
        self._followed: dict[int, str] = {}  # the replica of each affinity
        self._paused: dict[str, str] = {}  # node of each paused replica

    def add(self, replica: str, *, node: str) -> None:
        """Add a replica, which takes requests from now on."""
        assert replica not in self._load, f"{replica} was added twice"
        self._outstanding[replica] = {}
        self._load[replica] = 0
        self._nodes[replica] = node

    def pause(self, replica: str) -> None:
        """Give a replica no requests until it is resumed."""
        self._paused[replica] = self._nodes.pop(replica)

    def resume(self, replica: str) -> None:
        """Give requests to a paused replica again."""
        self._nodes[replica] = self._paused.pop(replica)

    def has(self, replica: str) -> bool:
        """Return whether a replica was added, paused or not."""
        return replica in self._load

    @property
    def replicas(self) -> list[str]:
        """Names of all replicas that take requests."""
        return list(self._nodes)

    @property
    def nodes(self) -> set[str]:
        """Nodes with replicas that take requests."""
        return set(self._nodes.values())

    def node(self, replica: str) -> str:
        """Return the node of a replica."""
        return self._nodes[replica]

    def load(self, replica: str) -> int:
        """Return the number of outstanding tokens of a replica."""
        return self._load[replica]

    def choose(self, num_rows: int, *, affinity: int, room: Callable[[str], int]) -> str | None:
        """Return a replica for requests that share a prefix; None if no node has room for all.

        The replica of earlier requests of the same affinity is preferred, then the one with the
        lowest load. `room` gives the number of rows that a node can take.
        """
        followed = self._followed.get(affinity)
        if followed in self._nodes and room(self._nodes[followed]) >= num_rows:
            return followed
        with_room = {node for node in self.nodes if room(node) >= num_rows}
        names = (name for name, node in self._nodes.items() if node in with_room)
        return min(names, key=self._load.__getitem__, default=None)  # the first of equals

    def split(self, num_rows: int, *, room: Callable[[str], int]) -> Mapping[str, int]:
        """Split rows over replicas if no node takes all; empty if there is no room.

        As few nodes as possible are used, and on each the replica with the lowest load.
        """
        left, shares = num_rows, dict[str, int]()
        for node in sorted(self.nodes, key=lambda node: (-room(node), node)):
            if share := min(left, room(node)):
                here = [name for name, its_node in self._nodes.items() if its_node == node]
                shares[min(here, key=self._load.__getitem__)] = share
                left -= share
        return {} if left else shares

    def assign(
        self, replica: str, request_ids: Sequence[str], *, affinity: int, num_tokens: int
    ) -> None:
        """Record that a replica has these requests, each of at most `num_tokens`."""
        self._followed[affinity] = replica
        for request_id in request_ids:
            self._outstanding[replica][request_id] = num_tokens
        self._load[replica] += num_tokens * len(request_ids)

    def outstanding(self, replica: str, request_ids: Sequence[str] | None = None) -> list[str]:
        """Return the requests that the replica has, all or those of some, oldest first."""
        here = self._outstanding[replica]
        if request_ids is None:
            return list(here)
        return [request_id for request_id in request_ids if request_id in here]

    def surplus(self) -> dict[str, list[str]]:
        """Return the newest requests of each replica that has more than the mean load.

        Without them it still has at least the mean of all replicas that take requests.
        """
        loads = {name: self._load[name] for name in self._nodes}
        if not loads:
            return {}
        mean = sum(loads.values()) / len(loads)
        found: dict[str, list[str]] = {}
        for name, load in loads.items():
            for request_id, num_tokens in reversed(self._outstanding[name].items()):
                if load - num_tokens < mean:
                    break
                load -= num_tokens
                found.setdefault(name, []).append(request_id)
        return found

    def take_away(
        self, replica: str, request_ids: Sequence[str], *, affinities: Container[int]
    ) -> None:
        """Forget requests that a replica does not sample any more, and where theirs would follow.

        `affinities` are those of the requests.
        """
        for request_id in request_ids:
            self.finished(replica, request_id)
        self._followed = {
            affinity: name
            for affinity, name in self._followed.items()
            if name != replica or affinity not in affinities
        }

    def finished(self, replica: str, request_id: str) -> None:
        """Remove a finished request from its replica; ignore unknown ones, which were moved."""
        if replica in self._load:
            self._load[replica] -= self._outstanding[replica].pop(request_id, 0)

    def keep_only(self, affinities: Container[int]) -> None:
        """Forget all other affinities, of which no more requests will come."""
        self._followed = {a: name for a, name in self._followed.items() if a in affinities}

    def remove(self, replica: str) -> list[str]:
        """Remove a replica that has died; return its unfinished requests."""
        del self._load[replica]
        self._nodes.pop(replica, None)
        self._paused.pop(replica, None)
        self._followed = {a: name for a, name in self._followed.items() if name != replica}
        return list(self._outstanding.pop(replica))
