"""Models that are being trained, and the tasks that carry out their commands.

    add() ──► TrainedModel ──► enter(command) ──► log ──► one task per model ──► future
                │
                └──► end(): unloaded, or its session ended ──► the trainer is closed

A failed command is reported through its future, and the model continues with the next command. When
a trainer dies, all commands of its model fail with the actor's name and the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from rlsys.common.background_tasks import start_task
from rlsys.tinker_server.api_errors import ApiError, PartDied
from rlsys.tinker_server.command_log import CommandLog
from rlsys.tinker_server.futures import Answer, Failure, Futures
from rlsys.tinker_server.server_backend import BaseModel, Trainer
from rlsys.tinker_server.server_checkpoints import SamplerWeights, SavedModel, ServerCheckpoints
from rlsys.tinker_server.sessions import Session, Sessions

logger = logging.getLogger(__name__)

# Data of waiting commands of one session. More is refused until some of it has run, so that one
# client cannot fill the memory of the server.
MAX_WAITING_BYTES = 2**29


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command in the log of a model."""

    future: str
    run: Callable[[], Awaitable[Answer]]


@dataclass(kw_only=True)
class TrainedModel:
    """A model, its log of commands and its trainer."""

    name: str
    session: str
    base: BaseModel
    lora: str
    rank: int
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    log: CommandLog[Command] = field(default_factory=CommandLog)
    command_added: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    trainer: Trainer | None = None
    incomplete: str = ""  # why the gradient of the next step is incomplete
    death: str = ""
    ephemeral: list[SamplerWeights] = field(default_factory=list)
    num_saved: int = 0

    def description(self, user_metadata: Mapping[str, str]) -> SavedModel:
        """Return the description of a checkpoint of this model."""
        assert self.trainer is not None
        return SavedModel(
            base_model=self.base.name,
            lora=self.lora,
            version=self.trainer.version,
            user_metadata=user_metadata,
        )


class Models:
    """All models of a server.

    `gap_timeout_s` is how long a command waits for one with a lower number that has not arrived.
    `changed` is called when a model has ended.
    """

    def __init__(
        self,
        sessions: Sessions,
        futures: Futures,
        checkpoints: ServerCheckpoints,
        *,
        max_models: int,
        gap_timeout_s: float,
        changed: Callable[[], None],
    ) -> None:
        self._changed = changed
        self._sessions = sessions
        self._futures = futures
        self._checkpoints = checkpoints
        self._max_models = max_models
        self._gap_timeout_s = gap_timeout_s
        self._models: dict[str, TrainedModel] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._models

    @property
    def living(self) -> list[TrainedModel]:
        """Models whose trainer has not died."""
        return [one for one in self._models.values() if not one.death]

    @property
    def all(self) -> list[TrainedModel]:
        """All models of living sessions, dead ones included."""
        return list(self._models.values())

    @property
    def is_full(self) -> bool:
        """Return whether the server trains as many models as it may."""
        return len(self.living) >= self._max_models

    def get(self, name: str) -> TrainedModel:
        """Return a model and note that its session is alive.

        Raises:
            ApiError: 404, there is no such model.
        """
        model = self._models.get(name)
        if model is None:
            raise ApiError(
                "model_id",
                name,
                rule="the model is unknown: its session has ended, it was unloaded, or the server "
                "was restarted",
                fix="Make a training client from a checkpoint.",
                status=404,
            )
        self._sessions.seen(model.session)
        return model

    def add(
        self,
        session: Session,
        number: int,
        *,
        base: BaseModel,
        lora: str,
        rank: int,
        user_metadata: Mapping[str, str],
    ) -> TrainedModel:
        """Return the model with the client's number. A repeated request gets the same model.

        Raises:
            ApiError: 403, the server is full.
        """
        name = f"{session.name}:train:{number}"
        if name in self._models:
            return self._models[name]
        if self.is_full:
            raise ApiError(
                "max_models",
                self._max_models,
                rule="living sessions train as many models as the server allows",
                fix="Unload a model, wait for a session to end, or start the server with a larger "
                "--max-models.",
                status=403,  # the client would repeat the request for minutes after a 429
            )
        model = TrainedModel(
            name=name,
            session=session.name,
            base=base,
            lora=lora,
            rank=rank,
            user_metadata=user_metadata,
        )
        self._models[name] = model
        session.models.add(name)
        model.task = asyncio.create_task(self._run_commands(model), name=name)
        model.task.add_done_callback(lambda task: self._ended(model, task))
        return model

    def enter(
        self,
        model: TrainedModel,
        seq_id: int,
        digest: bytes,
        run: Callable[[], Awaitable[Answer]],
        *,
        num_bytes: int = 0,
    ) -> str:
        """Add a command to the model's log and return the name of its future.

        A repeated command gets the same future. `num_bytes` is the size of the command's data.

        Raises:
            ApiError: The log refuses the command, or 429, the session has too many or too large
                commands waiting.
        """
        name = f"{model.name}:{seq_id}"
        if model.death:
            if name not in self._futures:
                self._futures.open(name, owner=model.session)
                self._futures.finish(name, Failure(message=model.death, category="server"))
            return name
        if model.log.add(seq_id, digest, Command(future=name, run=run), size=num_bytes):
            try:
                self._check_waiting(model, seq_id, num_bytes)
                self._futures.open(name, owner=model.session)
            except ApiError:
                model.log.remove(seq_id)
                raise
            model.command_added.set()
        return name

    def _check_waiting(self, model: TrainedModel, seq_id: int, num_bytes: int) -> None:
        """Raise ApiError if a new command's data is too large together with what waits.

        The next command of a model is never refused, because others may wait for it.
        """
        if not num_bytes or model.log.is_awaited(seq_id):
            return
        models = [one for one in self._models.values() if one.session == model.session]
        if sum(one.log.waiting_size for one in models) > MAX_WAITING_BYTES:
            raise ApiError(
                "max_waiting_bytes",
                MAX_WAITING_BYTES,
                rule=f"session {model.session} has as much data waiting as the server allows it",
                fix="Wait for some of its requests.",
                status=429,
            )

    def end(self, name: str, why: str) -> None:
        """Forget a model and close its trainer. Named checkpoints are kept."""
        model = self._models.pop(name, None)
        if model is None:
            return
        model.death = model.death or why
        self._fail_waiting(model)
        if model.task is not None:
            model.task.cancel()
        for one in model.ephemeral:
            assert one.directory is not None
            self._checkpoints.start_removal(one.directory)

    async def close(self) -> None:
        """End all tasks and trainers."""
        tasks = [one.task for one in self._models.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*self._ending)

    async def _run_commands(self, model: TrainedModel) -> None:
        while not model.death:
            command = model.log.next()
            if command is None:
                await self._next_command(model)
                continue
            outcome = await self._outcome(model, command)
            model.log.done()
            self._futures.finish(command.future, outcome)
        self._fail_waiting(model)

    async def _next_command(self, model: TrainedModel) -> None:
        model.command_added.clear()
        missing = model.log.missing_seq
        try:
            async with asyncio.timeout(None if missing is None else self._gap_timeout_s):
                await model.command_added.wait()
        except TimeoutError:
            if model.log.missing_seq == missing:
                model.death = (
                    f"model {model.name} has waited {self._gap_timeout_s:g} s for the command with "
                    f"seq_id={missing}, which did not arrive. Later commands are not carried out. "
                    "Continue from a checkpoint."
                )

    async def _outcome(self, model: TrainedModel, command: Command) -> Answer | Failure:
        try:
            return await command.run()
        except PartDied as death:
            model.death = (
                f"{sentence(death)} Model {model.name} is lost with it. Make a training client "
                "from the last checkpoint."
            )
            return Failure(message=model.death, category="server")
        except (ValueError, FloatingPointError) as error:
            if model.trainer is None:  # its creation failed
                model.death = str(error)
            return Failure(message=str(error), category="user")
        except OSError as error:
            return Failure(message=str(error), category="server")

    def _fail_waiting(self, model: TrainedModel) -> None:
        for command in model.log.close(model.death):
            self._futures.finish(command.future, Failure(message=model.death, category="server"))

    def _ended(self, model: TrainedModel, task: asyncio.Task[None]) -> None:
        """Clean up after the task of a model that was ended or died, or after a server error."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("model %s ended by a server error", model.name, exc_info=error)
            model.death = f"model {model.name} ended by a server error: {error!r}"
        running = f"{model.name}:{model.log.next_seq}"
        why = model.death or "the server ends."
        self._futures.finish(running, Failure(message=why, category="server"))
        self._fail_waiting(model)
        self._changed()
        if model.trainer is not None:
            self._later(model.trainer.close())

    def _later(self, work: Awaitable[None]) -> None:
        async def do() -> None:
            await work

        task = start_task(do(), fail=_log_failure)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _log_failure(error: BaseException) -> None:
    logger.error("closing a model failed", exc_info=error)


def sentence(error: Exception) -> str:
    """Return an error's message with a full stop."""
    message = str(error)
    return message if message.endswith((".", "!", "?")) else f"{message}."
