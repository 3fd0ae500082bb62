"""Which replica samples which requests.

A pure state machine. Requests that share a prefix go to one replica together, whose cache then
holds the prefix's keys and values once: of those whose node has room for their rows, the one with
the fewest outstanding tokens. Later requests of the same affinity, such as the next turns of an
episode, follow them there. A replica that has died gets nothing more; what it had outstanding is
handed back to be routed again. Replicas come and go while requests are routed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence


class Router:
    def __init__(self) -> None:
        self._outstanding: dict[str, dict[str, int]] = {}
        self._load: dict[str, int] = {}
        self._nodes: dict[str, str] = {}  # of each replica
        self._followed: dict[int, str] = {}  # the replica of each affinity

    def add(self, replica: str, *, node: str) -> None:
        """A replica takes requests from now on."""
        assert replica not in self._load, f"{replica} was added twice"
        self._outstanding[replica] = {}
        self._load[replica] = 0
        self._nodes[replica] = node

    @property
    def replicas(self) -> list[str]:
        return list(self._load)

    @property
    def nodes(self) -> set[str]:
        """Where a replica is."""
        return set(self._nodes.values())

    def node(self, replica: str) -> str:
        return self._nodes[replica]

    def load(self, replica: str) -> int:
        """Outstanding tokens."""
        return self._load[replica]

    def choose(self, num_rows: int, *, affinity: int, room: Callable[[str], int]) -> str | None:
        """A replica for requests that share a prefix: where earlier ones of the same affinity went,
        or the one with the least to do; `room` says how many rows a node can take. None: no
        replica's node has room for all.
        """
        with_room = [name for name, node in self._nodes.items() if room(node) >= num_rows]
        if (followed := self._followed.get(affinity)) in with_room:
            return followed
        return min(with_room, key=self._load.__getitem__, default=None)  # the first of equals

    def split(self, num_rows: int, *, room: Callable[[str], int]) -> Mapping[str, int]:
        """How many rows each replica takes, where none takes all; empty if there is no room. As few
        nodes as can be, and of each the replica with the least to do.
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
        """The replica has these requests, of `num_tokens` each at most."""
        self._followed[affinity] = replica
        for request_id in request_ids:
            self._outstanding[replica][request_id] = num_tokens
        self._load[replica] += num_tokens * len(request_ids)

    def outstanding(self, replica: str, request_ids: Sequence[str]) -> list[str]:
        """Those of the requests that the replica has."""
        here = self._outstanding[replica]
        return [request_id for request_id in request_ids if request_id in here]

    def finished(self, replica: str, request_id: str) -> None:
        """The request has ended on this replica; an unknown one is ignored (it was moved)."""
        if replica in self._load:
            self._load[replica] -= self._outstanding[replica].pop(request_id, 0)

    def keep_only(self, affinities: Container[int]) -> None:
        """Of all others no more requests will come."""
        self._followed = {a: name for a, name in self._followed.items() if a in affinities}

    def remove(self, replica: str) -> list[str]:
        """The replica has died; returns the requests that it had not finished."""
        del self._load[replica], self._nodes[replica]
        self._followed = {a: name for a, name in self._followed.items() if name != replica}
        return list(self._outstanding.pop(replica))
