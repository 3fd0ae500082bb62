"""Sessions of clients and their sampling sessions.

create() ──► alive: heartbeats and other requests ──► end(), or expired() after `timeout_s`
                └──► silent() after three missed heartbeats; alive again with the next request

A session is one process of a client. The client sends nothing when its process exits, so an ended
session looks like one with a slow network. It keeps its models for `timeout_s`. A silent session
loses them earlier, but only when another client needs the room.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from rlsys.tinker_server.api_errors import ApiError
from rlsys.tinker_server.server_checkpoints import SamplerWeights

# Interval at which the client sends heartbeats: SESSION_HEARTBEAT_PERIOD_SEC in its
# lib/internal_client_holder.py.
HEARTBEAT_S = 10.0
SILENT_S = 3 * HEARTBEAT_S


@dataclass(kw_only=True)
class SamplingSession:
    """Weights to sample with. `inflight`: the newest of the model that were saved for samplers by
    the time a request comes; else always the same.
    """

    name: str
    session: str
    weights: SamplerWeights
    inflight: bool = False
    num_clients: int = 1  # that share it; each numbers its requests in a block of its own


@dataclass(kw_only=True)
class Session:
    name: str
    last_seen_s: float  # by the clock
    metadata: Mapping[str, str] = field(default_factory=dict)
    display_name: str | None = None
    models: set[str] = field(default_factory=set)
    sampling: dict[int, str] = field(default_factory=dict)  # by the client's number for it


class Sessions:
    """No I/O; `clock`: monotonic seconds. A session without a sign of life for `timeout_s` is
    over.
    """

    def __init__(self, clock: Callable[[], float], *, timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._sessions: dict[str, Session] = {}
        self._sampling: dict[str, SamplingSession] = {}

    def create(self, metadata: Mapping[str, str], display_name: str | None = None) -> Session:
        name = f"session-{secrets.token_hex(8)}"
        session = Session(
            name=name, last_seen_s=self._clock(), metadata=metadata, display_name=display_name
        )
        self._sessions[name] = session
        return session

    def seen(self, name: str) -> Session:
        """A living one, of which this is a sign of life. Raises Refused, 410, for another."""
        session = self._sessions.get(name)
        if session is None:
            raise ApiError(
                f"session {name!r} is over, or none of this server: without a heartbeat one ends "
                f"after {self._timeout_s:g} s; make a new ServiceClient, and go on from what was "
                "saved.",
                410,
            )
        session.last_seen_s = self._clock()
        return session

    def all(self) -> list[Session]:
        """Return the living sessions, newest first."""
        return list(reversed(self._sessions.values()))

    def get(self, name: str) -> Session:
        """Return a living session without counting this as a sign of life. Raises Refused, 404."""
        if name not in self._sessions:
            raise ApiError(f"session {name!r} does not exist, or has ended.", 404)
        return self._sessions[name]

    def idle_s(self, name: str) -> float:
        """Return the seconds since a living session's last sign of life; 0 for an ended one."""
        session = self._sessions.get(name)
        return 0.0 if session is None else self._clock() - session.last_seen_s

    def silent(self, among: Collection[str]) -> list[Session]:
        """Return those of these sessions that have missed three heartbeats, longest first."""
        limit_s = self._clock() - SILENT_S
        found = [one for name, one in self._sessions.items() if name in among]
        return sorted(
            (one for one in found if one.last_seen_s <= limit_s), key=lambda one: one.last_seen_s
        )

    def silence_in_s(self, among: Collection[str], since_s: float) -> float | None:
        """Return in how many seconds the next of these sessions would be silent.

        Sessions that were seen at `since_s` or later are alive and do not count. None: all are.
        """
        times = [
            one.last_seen_s
            for name, one in self._sessions.items()
            if name in among and one.last_seen_s < since_s
        ]
        return max(min(times) + SILENT_S - self._clock(), 0.0) if times else None

    def expired(self) -> list[Session]:
        """Those whose time is over; they are forgotten, and so is what they sampled with."""
        limit_s = self._clock() - self._timeout_s
        over = [one for one in self._sessions.values() if one.last_seen_s < limit_s]
        for session in over:
            self.end(session.name)
        return over

    def end(self, name: str) -> Session | None:
        """Forget it, and what it sampled with; None where it is over."""
        session = self._sessions.pop(name, None)
        if session is not None:
            for sampling in session.sampling.values():
                self._sampling.pop(sampling, None)
        return session

    def sample_with(
        self, session: Session, number: int, weights: SamplerWeights, *, inflight: bool = False
    ) -> SamplingSession:
        """The sampling session that the client counts as `number`; the same when it asks again."""
        if number in session.sampling:
            return self._sampling[session.sampling[number]]
        name = f"{session.name}:sample:{number}"
        made = SamplingSession(name=name, session=session.name, weights=weights, inflight=inflight)
        session.sampling[number] = name
        self._sampling[name] = made
        return made

    def sampling(self, name: str) -> SamplingSession:
        """Raises Refused, 404, for an unknown one, and as `seen` where its session is over."""
        found = self._sampling.get(name)
        if found is None:
            raise ApiError(
                f"sampling session {name!r} is not here: its session is over, or none of this "
                "server; make a sampling client anew.",
                404,
            )
        self.seen(found.session)
        return found

    def update_inflight(self, model: str, weights: SamplerWeights) -> None:
        """Newer weights of a model: its inflight sampling sessions use them from now on."""
        for one in self._sampling.values():
            if one.inflight and one.weights.model == model:
                one.weights = weights
