"""Service: the API without HTTP, from requests to names of futures.

Service ─► Sessions ──────── heartbeats, time limits, room for models
        ├► Training ───────► Models ─► one task per model ─► trainers
        ├► Sampling ───────► one task per sample ──────────► samplers
        └► Management ─────► Checkpoints: list, delete, copy, expire
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rlsys.common.background_tasks import start_task
from rlsys.tinker_server import request_checks
from rlsys.tinker_server.api_errors import ApiError
from rlsys.tinker_server.futures import Futures
from rlsys.tinker_server.management import Management
from rlsys.tinker_server.request_checks import Body
from rlsys.tinker_server.sampler_versions import WeightsIndex
from rlsys.tinker_server.sampling_requests import Sampling
from rlsys.tinker_server.server_backend import Backend, BaseModel
from rlsys.tinker_server.server_checkpoints import ServerCheckpoints
from rlsys.tinker_server.sessions import Session, Sessions
from rlsys.tinker_server.stability import StabilityRecords
from rlsys.tinker_server.trained_models import Models
from rlsys.tinker_server.training_commands import Training

logger = logging.getLogger(__name__)

HOUSEKEEPING_S = 5.0

# Printed by each client at its start.
WARNING = (
    "rlsys: adapters are added to attention and MLP only, so train_unembed=True leaves the "
    "unembedding as it is. stable_reinforce is rlsys's own definition, as the API publishes none."
)


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits of a server."""

    session_timeout_s: float = 600.0
    gap_timeout_s: float = 600.0
    """How long a command waits for one with a lower number that has not arrived."""
    max_models: int = 4


class Service:
    """A server, used within `running`. `clock` returns monotonic seconds."""

    def __init__(
        self,
        backend: Backend,
        checkpoints: ServerCheckpoints,
        *,
        clock: Callable[[], float],
        limits: ServerLimits = ServerLimits(),
    ) -> None:
        self._backend = backend
        self._checkpoints = checkpoints
        self._clock = clock
        self._records = StabilityRecords(clock)
        self._changed = asyncio.Event()  # a session sent a heartbeat, or a model ended
        self.futures = Futures(clock)
        self.sessions = Sessions(clock, timeout_s=limits.session_timeout_s)
        self.models = Models(
            self.sessions,
            self.futures,
            checkpoints,
            max_models=limits.max_models,
            gap_timeout_s=limits.gap_timeout_s,
            changed=self._changed.set,
        )
        weights = WeightsIndex(checkpoints, self.base_model)
        self.training = Training(
            backend,
            checkpoints,
            sessions=self.sessions,
            futures=self.futures,
            models=self.models,
            weights=weights,
            records=self._records,
            base_model=self.base_model,
        )
        self.sampling = Sampling(
            backend,
            sessions=self.sessions,
            futures=self.futures,
            weights=weights,
            records=self._records,
            base_model=self.base_model,
        )
        self.management = Management(checkpoints, self.sessions, self.models)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the housekeeping during the block, and close everything after it."""
        keeping = start_task(self._housekeeping(), fail=_stop_server, returns=False)
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await self.sampling.close()
            await self.models.close()
            await self._backend.close()

    @property
    def base_models(self) -> list[BaseModel]:
        """Models that the server offers."""
        return list(self._backend.base_models)

    def base_model(self, name: str) -> BaseModel:
        """Return a served model.

        Raises:
            ApiError: 404, there is no model of this name.
        """
        for one in self._backend.base_models:
            if one.name == name:
                return one
        known = ", ".join(one.name for one in self._backend.base_models)
        raise ApiError(
            "base_model", name, rule="this model is not served", fix=f"Use {known}.", status=404
        )

    # Sessions.

    def create_session(self, body: Body) -> dict[str, Any]:
        """Create a session."""
        display_name = body.get("display_name")
        if not isinstance(display_name, str):
            display_name = None
        else:
            request_checks.whole_characters("display_name", display_name)
        session = self.sessions.create(request_checks.user_metadata(body), display_name)
        return {
            "type": "create_session",
            "session_id": session.name,
            "warning_message": WARNING,
        }

    def heartbeat(self, body: Body) -> dict[str, Any]:
        """Note that a session is alive."""
        self.sessions.seen(request_checks.text(body, "session_id"))
        self._changed.set()
        return {"type": "session_heartbeat"}

    def finish_session(self, name: str) -> None:
        """End a session whose client has closed it. Do nothing if it has ended."""
        session = self.sessions.end(name)
        if session is not None:
            self._clear(session)

    # Room for models.

    async def make_room(self, body: Body) -> None:
        """Make room for the model that this request creates.

        End sessions that missed their heartbeats, longest first, until there is room. The client
        sends nothing when its process exits, so a session with a recent request may have ended too.
        Therefore wait until each session has either sent a heartbeat or missed three. If there is
        still no room, the request itself is refused.
        """
        session, number = body.get("session_id"), body.get("model_seq_id")
        asked_s = self._clock()
        while self.models.is_full and f"{session}:train:{number}" not in self.models:
            holders = {one.session for one in self.models.living if one.session != session}
            if silent := self.sessions.silent(holders):
                logger.info(
                    "session %s ends: it is silent, and another one needs its room", silent[0].name
                )
                self.finish_session(silent[0].name)
                continue
            left_s = self.sessions.silence_in_s(holders, asked_s)
            if left_s is None:
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    # Time.

    async def _housekeeping(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self.clean_up()

    def clean_up(self) -> None:
        """End sessions whose time is over, and drop expired answers, records and checkpoints."""
        self.futures.expire()
        self._records.expire()
        self._checkpoints.expire()
        for session in self.sessions.expired():
            logger.info("session %s ended without a heartbeat", session.name)
            self._clear(session)

    def _clear(self, session: Session) -> None:
        for name in session.models:
            self.models.end(name, f"session {session.name} has ended.")
        self.sampling.end_all_of(session)
        self.futures.drop_all_of(session.name)
        self._records.drop_all_of(session.name)
        self._changed.set()


def _stop_server(error: BaseException) -> None:
    """End this process: without housekeeping, sessions would keep their models for ever."""
    logger.critical("the server ends, because its housekeeping has failed", exc_info=error)
    signal.raise_signal(signal.SIGTERM)
