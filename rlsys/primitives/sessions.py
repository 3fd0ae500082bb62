"""Who uses the server: sessions, which live by their heartbeats, and what each samples with."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlsys.primitives.checkpoints import SamplerWeights
from rlsys.primitives.errors import Refused


@dataclass(kw_only=True)
class SamplingSession:
    """Weights to sample with. `inflight`: the newest of the model that were saved for samplers by
    the time a request comes; else always the same."""

    name: str
    session: str
    weights: SamplerWeights
    inflight: bool = False
    num_clients: int = 1  # that share it; each numbers its requests in a block of its own


@dataclass(kw_only=True)
class Session:
    name: str
    last_seen_s: float  # by the clock
    metadata: Mapping[str, Any] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    sampling: dict[int, str] = field(default_factory=dict)  # by the client's number for it


class Sessions:
    """No I/O; `clock`: monotonic seconds. A session without a sign of life for `timeout_s` is
    over."""

    def __init__(self, clock: Callable[[], float], *, timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._sessions: dict[str, Session] = {}
        self._sampling: dict[str, SamplingSession] = {}

    def create(self, metadata: Mapping[str, Any]) -> Session:
        name = f"session-{secrets.token_hex(8)}"
        session = Session(name=name, last_seen_s=self._clock(), metadata=metadata)
        self._sessions[name] = session
        return session

    def seen(self, name: str) -> Session:
        """A living one, of which this is a sign of life. Raises Refused, 410, for another."""
        session = self._sessions.get(name)
        if session is None:
            raise Refused(
                f"session {name!r} is over, or none of this server: without a heartbeat one ends "
                f"after {self._timeout_s:g} s; make a new ServiceClient, and go on from what was "
                "saved.",
                410,
            )
        session.last_seen_s = self._clock()
        return session

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
            raise Refused(
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
