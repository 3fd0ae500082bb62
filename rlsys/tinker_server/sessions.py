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
    """Weights to sample with.

    With `inflight`, each request uses the newest weights that were saved inflight for the model.
    Otherwise, the weights never change.
    """

    name: str
    session: str
    weights: SamplerWeights
    inflight: bool = False
    num_clients: int = 1  # that share it; each has its own block of request numbers


@dataclass(kw_only=True)
class Session:
    """A process of a client."""

    name: str
    last_seen_s: float  # by the clock
    metadata: Mapping[str, str] = field(default_factory=dict)
    display_name: str | None = None
    models: set[str] = field(default_factory=set)
    sampling: dict[int, str] = field(default_factory=dict)  # by the client's number


class Sessions:
    """All living sessions, without I/O. `clock` returns monotonic seconds.

    A session ends after `timeout_s` without a request.
    """

    def __init__(self, clock: Callable[[], float], *, timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._sessions: dict[str, Session] = {}
        self._sampling: dict[str, SamplingSession] = {}

    def create(self, metadata: Mapping[str, str], display_name: str | None = None) -> Session:
        """Return a new session."""
        name = f"session-{secrets.token_hex(8)}"
        session = Session(
            name=name, last_seen_s=self._clock(), metadata=metadata, display_name=display_name
        )
        self._sessions[name] = session
        return session

    def seen(self, name: str) -> Session:
        """Return a living session and note that it is alive.

        Raises:
            ApiError: 410, the session has ended or is unknown.
        """
        session = self._sessions.get(name)
        if session is None:
            raise ApiError(
                "session_id",
                name,
                rule="the session has ended or is unknown; without a heartbeat a session ends "
                f"after {self._timeout_s:g} s",
                fix="Make a new ServiceClient, and continue from a checkpoint.",
                status=410,
            )
        session.last_seen_s = self._clock()
        return session

    def all(self) -> list[Session]:
        """Return the living sessions, newest first."""
        return list(reversed(self._sessions.values()))

    def get(self, name: str) -> Session:
        """Return a living session without noting that it is alive.

        Raises:
            ApiError: 404, the session has ended or is unknown.
        """
        if name not in self._sessions:
            raise ApiError(
                "session_id",
                name,
                rule="the session has ended or is unknown",
                fix="List the sessions with GET sessions.",
                status=404,
            )
        return self._sessions[name]

    def idle_s(self, name: str) -> float:
        """Return the seconds since a living session's last request, 0 for an ended one."""
        session = self._sessions.get(name)
        return 0.0 if session is None else self._clock() - session.last_seen_s

    def silent(self, among: Collection[str]) -> list[Session]:
        """Return the sessions among these that missed three heartbeats, longest first."""
        limit_s = self._clock() - SILENT_S
        found = [session for name, session in self._sessions.items() if name in among]
        return sorted(
            (session for session in found if session.last_seen_s <= limit_s),
            key=lambda session: session.last_seen_s,
        )

    def silence_in_s(self, among: Collection[str], since_s: float) -> float | None:
        """Return in how many seconds the next of these sessions will be silent.

        Sessions with a request at `since_s` or later are alive and ignored. None: all of them are.
        """
        times = [
            session.last_seen_s
            for name, session in self._sessions.items()
            if name in among and session.last_seen_s < since_s
        ]
        return max(min(times) + SILENT_S - self._clock(), 0.0) if times else None

    def expired(self) -> list[Session]:
        """End the sessions whose time is over, and return them."""
        limit_s = self._clock() - self._timeout_s
        ended = [one for one in self._sessions.values() if one.last_seen_s < limit_s]
        for session in ended:
            self.end(session.name)
        return ended

    def end(self, name: str) -> Session | None:
        """End a session and its sampling sessions, and return it, or None if it has ended."""
        session = self._sessions.pop(name, None)
        if session is not None:
            for sampling in session.sampling.values():
                self._sampling.pop(sampling, None)
        return session

    def sampling_session(
        self, session: Session, number: int, weights: SamplerWeights, *, inflight: bool = False
    ) -> SamplingSession:
        """Return the sampling session with the client's number, the same one on a repeated call."""
        if number in session.sampling:
            return self._sampling[session.sampling[number]]
        name = f"{session.name}:sample:{number}"
        new = SamplingSession(name=name, session=session.name, weights=weights, inflight=inflight)
        session.sampling[number] = name
        self._sampling[name] = new
        return new

    def sampling(self, name: str) -> SamplingSession:
        """Return a sampling session and note that its session is alive.

        Raises:
            ApiError: 404, it is unknown; 410, its session has ended.
        """
        found = self._sampling.get(name)
        if found is None:
            raise ApiError(
                "sampling_session_id",
                name,
                rule="the sampling session is unknown, or its session has ended",
                fix="Make a new sampling client.",
                status=404,
            )
        self.seen(found.session)
        return found

    def update_inflight(self, model: str, weights: SamplerWeights) -> None:
        """Switch the inflight sampling sessions of a model to newer weights."""
        for one in self._sampling.values():
            if one.inflight and one.weights.model == model:
                one.weights = weights
