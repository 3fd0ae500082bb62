"""The API without its HTTP: requests in, names of futures out.

    sessions ─► models, each with a log of commands and a task that carries them out in order
            └─► sampling sessions ─► a task for each sample

A command that fails is told through its future, and the model goes on with the next; but a step
whose gradient lacks a part is not taken. Where a trainer has died, everything that its model was
asked fails with the actor's name and the reason, and what was saved stays.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rlsys.background import start_task
from rlsys.json_text import dump_json
from rlsys.primitives import requests
from rlsys.primitives.backend import Backend, BaseModel, Trainer
from rlsys.primitives.checkpoints import Checkpoints, SamplerWeights, SavedModel, check_whole
from rlsys.primitives.completions import Completion, Completions
from rlsys.primitives.errors import PartDied, Refused
from rlsys.primitives.futures import Answer, Failure, Futures
from rlsys.primitives.log import CommandLog
from rlsys.primitives.losses import kind_of, loss_of
from rlsys.primitives.requests import Body
from rlsys.primitives.rows import rows_of
from rlsys.primitives.sampling import sampled
from rlsys.primitives.sessions import Session, Sessions
from rlsys.primitives.wire import PROTOBUF, WirePass, encode_pass

logger = logging.getLogger(__name__)

HOUSEKEEPING_S = 5.0

# Of ephemeral sampler weights, those before the newest so many of a model are removed.
NUM_EPHEMERAL = 8


@dataclass(frozen=True, kw_only=True)
class Limits:
    session_timeout_s: float = 600.0
    gap_timeout_s: float = 600.0
    """A command waits so long for one with a lower number that has not come."""
    max_models: int = 4


@dataclass(frozen=True, kw_only=True)
class Command:
    future: str
    run: Callable[[], Awaitable[Answer]]


@dataclass(kw_only=True)
class Model:
    name: str
    session: str
    base: BaseModel
    lora: str
    rank: int
    log: CommandLog[Command] = field(default_factory=CommandLog)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    trainer: Trainer | None = None
    lacks: str = ""  # why the gradient of the next step is not whole
    death: str = ""
    ephemeral: list[SamplerWeights] = field(default_factory=list)
    num_saved: int = 0


class Service:
    """`clock`: monotonic seconds. To be used within `running`."""

    def __init__(
        self,
        backend: Backend,
        checkpoints: Checkpoints,
        *,
        clock: Callable[[], float],
        limits: Limits = Limits(),
    ) -> None:
        self._backend = backend
        self._checkpoints = checkpoints
        self._limits = limits
        self._clock = clock
        self.futures = Futures(clock)
        self.sessions = Sessions(clock, timeout_s=limits.session_timeout_s)
        self._models: dict[str, Model] = {}
        self._numbers: dict[str, SamplerWeights] = {}  # by path
        self._samples: dict[str, asyncio.Task[None]] = {}  # by future
        self._completions: dict[tuple[str, int], Completions] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        keeping = start_task(self._keep_house(), fail=_stop_server, returns=False)
        try:
            yield
        finally:
            tasks = [keeping, *self._samples.values()]
            tasks += [one.task for one in self._models.values() if one.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*self._ending)
            await self._backend.close()

    # Sessions.

    def create_session(self, body: Body) -> dict[str, Any]:
        metadata = body.get("user_metadata") or {}
        session = self.sessions.create(metadata if isinstance(metadata, dict) else {})
        return {
            "type": "create_session",
            "session_id": session.name,
            "warning_message": (
                "rlsys puts adapters beside attention and MLP only: train_unembed=True leaves the "
                "unembedding as it is."
            ),
        }

    def heartbeat(self, body: Body) -> dict[str, Any]:
        self.sessions.seen(requests.text(body, "session_id"))
        return {"type": "session_heartbeat"}

    # Models.

    @property
    def base_models(self) -> list[BaseModel]:
        return list(self._backend.base_models)

    def base_model(self, name: str) -> BaseModel:
        for one in self._backend.base_models:
            if one.name == name:
                return one
        known = ", ".join(one.name for one in self._backend.base_models)
        raise Refused(f"base_model={name!r} is not served here; use {known}.", 404)

    def model(self, name: str) -> Model:
        model = self._models.get(name)
        if model is None:
            raise Refused(
                f"model {name!r} is not here: its session is over, it was unloaded, or the server "
                "has started anew; make a training client from what was saved.",
                404,
            )
        self.sessions.seen(model.session)
        return model

    def create_model(self, body: Body, digest: bytes) -> str:
        asked = requests.lora(body)
        base = self.base_model(requests.text(body, "base_model"))
        lora = ""
        if asked.rank:
            lora = self._backend.adapters(
                base.name, rank=asked.rank, attention=asked.attention, mlp=asked.mlp
            )
        seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
        model = self._new_model(body, base, lora, asked.rank)

        async def create() -> Answer:
            model.trainer = await self._backend.start_trainer(model.name, base.name, lora, seed)
            return _json({"type": "create_model", "model_id": model.name})

        return self._enter(model, 0, digest, create)

    def create_from_state(self, body: Body, digest: bytes) -> str:
        """A model whose first command is to load what was saved of another."""
        path = requests.text(body, "path")
        _, directory = self._checkpoints.parse(path, "weights")
        said = self._checkpoints.said(directory)
        base = self.base_model(requests.optional_text(body, "base_model") or said.base_model)
        rank = _rank(said.lora)
        model = self._new_model(body, base, said.lora, rank)
        optimizer = requests.yes(body, "optimizer")

        async def create() -> Answer:
            await check_whole(path, directory)
            seed = secrets.randbelow(2**31)
            model.trainer = await self._backend.start_trainer(
                model.name, base.name, said.lora, seed
            )
            await model.trainer.load(directory, optimizer=optimizer)
            return _json({"type": "load_weights", "path": path, "model_id": model.name})

        return self._enter(model, 0, digest, create)

    def _new_model(self, body: Body, base: BaseModel, lora: str, rank: int) -> Model:
        session = self.sessions.seen(requests.text(body, "session_id"))
        number = requests.whole(body, "model_seq_id", high=2**31 - 1)
        name = f"{session.name}:train:{number}"
        if name in self._models:
            return self._models[name]
        num_living = sum(not one.death for one in self._models.values())
        if num_living >= self._limits.max_models:
            raise Refused(
                f"{num_living} models are being trained, the most that this server holds "
                "(--max-models); unload one, or wait for its session to end.",
                403,  # the client tries 429 again for a minute
            )
        model = Model(name=name, session=session.name, base=base, lora=lora, rank=rank)
        self._models[name] = model
        session.models.add(name)
        model.task = asyncio.create_task(self._carry_out(model), name=name)
        model.task.add_done_callback(lambda task: self._ended(model, task))
        return model

    def unload(self, body: Body) -> str:
        """Its name; what was saved of it stays."""
        model = self.model(requests.text(body, "model_id"))
        self._end_model(model, f"model {model.name} was unloaded.")
        name = f"{model.name}:unload"
        if name not in self.futures:
            self.futures.open(name, owner=model.session)
            self.futures.finish(name, _json({"type": "unload_model", "model_id": model.name}))
        return name

    def info(self, body: Body) -> dict[str, Any]:
        model = self.model(requests.text(body, "model_id"))
        return {
            "type": "get_info",
            "model_id": model.name,
            "model_name": model.base.name,
            "is_lora": bool(model.lora),
            "lora_rank": model.rank or None,
            "model_data": {"model_name": model.base.name, "tokenizer_id": model.base.path},
        }

    # Commands.

    def forward_backward(self, sent: WirePass, digest: bytes) -> str:
        model = self.model(sent.model_id)
        name = "forward" if sent.forward_only else "forward_backward"

        async def run() -> Answer:
            try:
                if sent.problem:
                    raise Refused(sent.problem)
                kind, loss = kind_of(sent.loss), loss_of(sent.loss, sent.config)
                data = rows_of(sent.data, sent.loss, kind, model.base.limits)
                assert model.trainer is not None
                result = await model.trainer.forward_backward(
                    data, loss, backward=not sent.forward_only
                )
            except (ValueError, FloatingPointError, OSError) as error:
                if not sent.forward_only:
                    model.lacks = f"{name} with seq_id={sent.seq_id} failed: {error}"
                raise
            encoded = encode_pass(result.logprobs, {"loss:sum": result.loss})
            return Answer(body=encoded, content_type=PROTOBUF)

        return self._enter(model, sent.seq_id, digest, run)

    def optim_step(self, body: Body, digest: bytes) -> str:
        model = self.model(requests.text(body, "model_id"))

        async def run() -> Answer:
            params = requests.adam(body)
            assert model.trainer is not None
            if model.lacks:
                why, model.lacks = model.lacks, ""
                await model.trainer.discard()
                raise Refused(
                    f"the gradient lacks a part, so that no step is taken and the rest is "
                    f"forgotten: {why}"
                )
            return _json({"metrics": await model.trainer.optim_step(params)})

        return self._enter(model, requests.seq_id(body), digest, run)

    def save_weights(self, body: Body, digest: bytes) -> str:
        model = self.model(requests.text(body, "model_id"))

        async def run() -> Answer:
            trainer = model.trainer
            assert trainer is not None
            name = requests.optional_text(body, "path") or f"step-{trainer.version:06d}"
            path = self._checkpoints.path(model.name, "weights", name)
            overwrite = requests.yes(body, "overwrite")
            said = self._said(model)
            async with self._checkpoints.writing(path, said, overwrite=overwrite) as place:
                await trainer.save(place)
            return _json({"type": "save_weights", "path": path})

        return self._enter(model, requests.seq_id(body), digest, run)

    def load_weights(self, body: Body, digest: bytes) -> str:
        if body.get("session_id") is not None:
            return self.create_from_state(body, digest)
        model = self.model(requests.text(body, "model_id"))

        async def run() -> Answer:
            path = requests.text(body, "path")
            _, directory = self._checkpoints.parse(path, "weights")
            said = self._checkpoints.said(directory)
            if (said.base_model, said.lora) != (model.base.name, model.lora):
                raise Refused(
                    f"{path} is of {said.base_model} with adapters {said.lora or 'none'}, the "
                    f"model of {model.base.name} with {model.lora or 'none'}; make a training "
                    "client from the state instead."
                )
            await check_whole(path, directory)
            assert model.trainer is not None
            await model.trainer.load(directory, optimizer=requests.yes(body, "optimizer"))
            model.lacks = ""
            return _json({"type": "load_weights", "path": path, "model_id": model.name})

        return self._enter(model, requests.seq_id(body), digest, run)

    def save_weights_for_sampler(self, body: Body, digest: bytes) -> str:
        model = self.model(requests.text(body, "model_id"))

        async def run() -> Answer:
            assert model.trainer is not None
            given = requests.optional_text(body, "path")
            version = model.trainer.version
            model.num_saved += 1
            name = given or f"step-{version:06d}-{model.num_saved}"
            path = self._checkpoints.path(model.name, "sampler_weights", name)
            weights = await self._save_for_sampler(model, path)
            answer: dict[str, Any] = {"type": "save_weights_for_sampler"}
            if given is not None:
                return _json({**answer, "path": path})
            session = self.sessions.seen(model.session)
            number = requests.whole(body, "sampling_session_seq_id", high=2**31 - 1)
            inflight = body.get("kind") == "inflight"
            sampling = self.sessions.sample_with(session, number, weights, inflight=inflight)
            if inflight:
                self.sessions.update_inflight(model.name, weights)
            self._keep_ephemeral(model, weights)
            return _json({**answer, "sampling_session_id": sampling.name})

        return self._enter(model, requests.seq_id(body), digest, run)

    async def _save_for_sampler(self, model: Model, path: str) -> SamplerWeights:
        assert model.trainer is not None
        number = len(self._numbers) + 1
        said = self._said(model)
        async with self._checkpoints.writing(path, said, overwrite=False) as place:
            await model.trainer.save_for_sampler(place, number)
        name, directory = self._checkpoints.parse(path, "sampler_weights")
        weights = SamplerWeights(
            base_model=model.base.name,
            number=number,
            path=path,
            model=name,
            directory=directory,
            version=model.trainer.version,
        )
        self._numbers[path] = weights
        return weights

    def _keep_ephemeral(self, model: Model, newest: SamplerWeights) -> None:
        """Whoever still samples with older ones has had NUM_EPHEMERAL steps to stop."""
        model.ephemeral.append(newest)
        for one in model.ephemeral[:-NUM_EPHEMERAL]:
            assert one.directory is not None
            self._checkpoints.remove(one.directory)
        del model.ephemeral[:-NUM_EPHEMERAL]

    def save_weights_external(self, body: Body, digest: bytes) -> str:
        model = self.model(requests.text(body, "model_id"))

        async def run() -> Answer:
            raise Refused(
                "save_weights_external is not offered; what save_weights_for_sampler writes is an "
                "adapter as PEFT loads it, on the server's disk."
            )

        return self._enter(model, requests.seq_id(body), digest, run)

    def _said(self, model: Model) -> SavedModel:
        assert model.trainer is not None
        return SavedModel(
            base_model=model.base.name, lora=model.lora, version=model.trainer.version
        )

    def _enter(
        self, model: Model, seq_id: int, digest: bytes, run: Callable[[], Awaitable[Answer]]
    ) -> str:
        """The name of the future of a command of the model's log; the same one for the same
        command."""
        name = f"{model.name}:{seq_id}"
        if model.death:
            if name not in self.futures:
                self.futures.open(name, owner=model.session)
                self.futures.finish(name, Failure(message=model.death, category="server"))
            return name
        if model.log.add(seq_id, digest, Command(future=name, run=run)):
            try:
                self.futures.open(name, owner=model.session)
            except Refused:
                model.log.remove(seq_id)
                raise
            model.came.set()
        return name

    async def _carry_out(self, model: Model) -> None:
        while not model.death:
            command = model.log.next()
            if command is None:
                await self._next_command(model)
                continue
            outcome = await self._outcome(model, command)
            model.log.done()
            self.futures.finish(command.future, outcome)
        self._fail_waiting(model)

    async def _next_command(self, model: Model) -> None:
        model.came.clear()
        lacks = model.log.lacks
        try:
            async with asyncio.timeout(None if lacks is None else self._limits.gap_timeout_s):
                await model.came.wait()
        except TimeoutError:
            if model.log.lacks == lacks:
                model.death = (
                    f"model {model.name} has waited {self._limits.gap_timeout_s:g} s for the "
                    f"command with seq_id={lacks}, which never came; commands behind it are not "
                    "carried out. Go on from what was saved."
                )

    async def _outcome(self, model: Model, command: Command) -> Answer | Failure:
        try:
            return await command.run()
        except PartDied as death:
            model.death = (
                f"{_sentence(death)} Model {model.name} is lost with it; make a training client "
                "from what was saved last."
            )
            return Failure(message=model.death, category="server")
        except (ValueError, FloatingPointError) as error:
            if model.trainer is None:  # it has never begun
                model.death = str(error)
            return Failure(message=str(error), category="user")
        except OSError as error:
            return Failure(message=str(error), category="server")

    def _fail_waiting(self, model: Model) -> None:
        for command in model.log.close(model.death):
            self.futures.finish(command.future, Failure(message=model.death, category="server"))

    def _ended(self, model: Model, task: asyncio.Task[None]) -> None:
        """Its task has: the model was ended, is dead, or there is a mistake in this program."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("model %s ended by a fault of the server", model.name, exc_info=error)
            model.death = f"model {model.name} ended by a fault of the server: {error!r}"
        running = f"{model.name}:{model.log.next_seq}"
        why = model.death or "the server ends."
        self.futures.finish(running, Failure(message=why, category="server"))
        self._fail_waiting(model)
        if model.trainer is not None:
            self._later(model.trainer.close())

    def _end_model(self, model: Model, why: str) -> None:
        model.death = model.death or why
        self._models.pop(model.name, None)
        self._fail_waiting(model)
        if model.task is not None:
            model.task.cancel()
        for one in model.ephemeral:
            assert one.directory is not None
            self._checkpoints.remove(one.directory)

    # Sampling.

    def create_sampling_session(self, body: Body) -> dict[str, Any]:
        session = self.sessions.seen(requests.text(body, "session_id"))
        number = requests.whole(body, "sampling_session_seq_id", high=2**31 - 1)
        made = self.sessions.sample_with(session, number, self._weights(body))
        return {"type": "create_sampling_session", "sampling_session_id": made.name}

    def join_sampling_session(self, body: Body) -> dict[str, Any]:
        sampling = self.sessions.sampling(requests.text(body, "sampling_session_id"))
        sampling.num_clients += 1
        return {"type": "join_sampling_session", "client_counter": sampling.num_clients - 1}

    def sampler(self, name: str) -> dict[str, Any]:
        weights = self.sessions.sampling(name).weights
        return {
            "sampler_id": name,
            "base_model": weights.base_model,
            "model_path": weights.path or None,
        }

    def _weights(self, body: Body) -> SamplerWeights:
        path = requests.optional_text(body, "model_path")
        if path is None:
            base = self.base_model(requests.text(body, "base_model"))
            return SamplerWeights(base_model=base.name)
        if path in self._numbers and self._checkpoints.exists(path, "sampler_weights"):
            return self._numbers[path]
        model, directory = self._checkpoints.parse(path, "sampler_weights")
        said = self._checkpoints.said(directory)
        weights = SamplerWeights(
            base_model=self.base_model(said.base_model).name,
            number=len(self._numbers) + 1,
            path=path,
            model=model,
            directory=directory,
            version=said.version,
        )
        self._numbers[path] = weights
        return weights

    def sample(self, body: Body) -> dict[str, Any]:
        """The future, and what each of its sequences will be called: the name says which weights
        sample it."""
        session_name = requests.text(body, "sampling_session_id")
        sampling = self.sessions.sampling(session_name)
        number = requests.whole(body, "seq_id", high=2**62)
        weights = sampling.weights
        base = self.base_model(weights.base_model)
        asked = requests.sample(body, base.limits)
        name = f"{session_name}:{number}"
        if name not in self.futures:
            self.futures.open(name, owner=sampling.session)
            task = asyncio.create_task(self._sample(name, weights, asked), name=name)
            self._samples[name] = task
            task.add_done_callback(lambda done: self._sampled(name, session_name, number, done))
        return {
            "request_id": name,
            "sample_sequence_ids": [
                f"{name}:{index}@{weights.label}" for index in range(asked.num_samples)
            ],
        }

    async def _sample(
        self, name: str, weights: SamplerWeights, asked: requests.SampleRequest
    ) -> None:
        try:
            body = await sampled(self._backend, name, weights, asked)
        except PartDied as death:
            outcome: Answer | Failure = Failure(
                message=f"{_sentence(death)} Another takes its place: sample again.",
                category="server",
            )
        except ValueError as error:
            outcome = Failure(message=str(error), category="user")
        except OSError as error:
            outcome = Failure(message=str(error), category="server")
        else:
            outcome = Answer(body=body, content_type=PROTOBUF)
        self.futures.finish(name, outcome)

    def _sampled(self, name: str, session: str, number: int, task: asyncio.Task[None]) -> None:
        self._samples.pop(name, None)
        if task.cancelled():
            self.futures.finish(name, Failure(message="the sample was cancelled.", category="user"))
        elif (error := task.exception()) is not None:
            logger.error("sample %s ended by a fault of the server", name, exc_info=error)
            message = f"sample {name} ended by a fault of the server: {error!r}"
            self.futures.finish(name, Failure(message=message, category="server"))
        if name not in self.futures:  # its session is over
            return
        outcome = self.futures.outcome(name)
        size = len(outcome.body) if isinstance(outcome, Answer) else None
        self.completions(session, number // 1_000_000_000).add(Completion(request=name, size=size))

    def completions(self, sampling_session: str, client: int) -> Completions:
        return self._completions.setdefault((sampling_session, client), Completions())

    def cancel(self, body: Body) -> None:
        """A sample that nobody waits for any more; nothing happens where it has ended."""
        task = self._samples.get(requests.text(body, "request_id"))
        if task is not None:
            task.cancel()

    # Checkpoints.

    def weights_info(self, body: Body) -> dict[str, Any]:
        path = requests.text(body, "tinker_path")
        kind = "weights" if "/weights/" in path else "sampler_weights"
        _, directory = self._checkpoints.parse(path, kind)  # type: ignore[arg-type]
        said = self._checkpoints.said(directory)
        return {
            "base_model": said.base_model,
            "is_lora": bool(said.lora),
            "lora_rank": _rank(said.lora) or None,
            "train_unembed": False,
        }

    def checkpoints(self, model: str) -> list[dict[str, Any]]:
        return self._checkpoints.of_model(model)

    def delete_checkpoint(self, path: str) -> None:
        kind = "weights" if "/weights/" in path else "sampler_weights"
        _, directory = self._checkpoints.parse(path, kind)  # type: ignore[arg-type]
        self._checkpoints.remove(directory)

    # Time.

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self.keep_house()

    def keep_house(self) -> None:
        """End the sessions whose time is over, and forget answers whose time is."""
        self.futures.expire()
        for session in self.sessions.expired():
            logger.info("session %s is over: no heartbeat", session.name)
            self._clear(session)

    def finish_session(self, name: str) -> None:
        """Its client says that it is done; nothing happens where it is over."""
        session = self.sessions.end(name)
        if session is not None:
            self._clear(session)

    def _clear(self, session: Session) -> None:
        for name in session.models:
            if name in self._models:
                self._end_model(self._models[name], f"session {session.name} is over.")
        for future, task in list(self._samples.items()):
            if future.startswith(f"{session.name}:"):
                task.cancel()
        for sampling in session.sampling.values():
            for key in [key for key in self._completions if key[0] == sampling]:
                del self._completions[key]
        self.futures.drop_all_of(session.name)

    def _later(self, work: Awaitable[None]) -> None:
        async def do() -> None:
            await work

        task = start_task(do(), fail=_log_failure)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _stop_server(error: BaseException) -> None:
    """Ask this process to end: without housekeeping, sessions would hold their models for ever."""
    logger.critical("the server ends, since its housekeeping has failed", exc_info=error)
    signal.raise_signal(signal.SIGTERM)


def _log_failure(error: BaseException) -> None:
    logger.error("a model could not be ended in good order", exc_info=error)


def _json(body: Mapping[str, Any]) -> Answer:
    return Answer(body=dump_json(body).encode())


def _sentence(error: Exception) -> str:
    told = str(error)
    return told if told.endswith((".", "!", "?")) else f"{told}."


def _rank(lora: str) -> int:
    from rlsys.lora import Lora

    return Lora.parse(lora).rank if lora else 0
