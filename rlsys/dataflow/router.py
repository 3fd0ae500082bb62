"""Which replica samples which requests.

A pure state machine. Requests that share a prefix go to one replica together, whose cache then
holds the prefix's keys and values once: the one with the fewest outstanding tokens. Later requests
of the same affinity, such as the next turns of an episode, follow them there. A replica that has
died gets nothing more; what it had outstanding is handed back to be routed again. Replicas come
and go while requests are routed.
"""

from __future__ import annotations

from collections.abc import Container, Sequence


class Router:
    def __init__(self) -> None:
        self._outstanding: dict[str, dict[str, int]] = {}
        self._load: dict[str, int] = {}
        self._home: dict[int, str] = {}  # of each affinity

    def add(self, replica: str) -> None:
        """A replica takes requests from now on."""
        assert replica not in self._load, f"{replica} was added twice"
        self._outstanding[replica] = {}
        self._load[replica] = 0

    @property
    def replicas(self) -> list[str]:
        return list(self._load)

    def load(self, replica: str) -> int:
        """Outstanding tokens."""
        return self._load[replica]

    def route(self, request_ids: Sequence[str], *, affinity: int, num_tokens: int) -> str:
        """Choose a replica for requests that share a prefix, of `num_tokens` each at most: where
        earlier ones of the same affinity went, while it lives.

        Raises LookupError when no replica is left.
        """
        if not self._load:
            raise LookupError("no rollout replica is alive")
        replica = self._home.get(affinity)
        if replica is None:
            replica = min(self._load, key=self._load.__getitem__)  # the first of equals
            self._home[affinity] = replica
        for request_id in request_ids:
            self._outstanding[replica][request_id] = num_tokens
        self._load[replica] += num_tokens * len(request_ids)
        return replica

    def finished(self, replica: str, request_id: str) -> None:
        """The request has ended on this replica; an unknown one is ignored (it was moved)."""
        if replica in self._load:
            self._load[replica] -= self._outstanding[replica].pop(request_id, 0)

    def keep_only(self, affinities: Container[int]) -> None:
        """Of all others no more requests will come."""
        self._home = {a: home for a, home in self._home.items() if a in affinities}

    def remove(self, replica: str) -> list[str]:
        """The replica has died; returns the requests that it had not finished."""
        del self._load[replica]
        self._home = {a: home for a, home in self._home.items() if home != replica}
        return list(self._outstanding.pop(replica))
