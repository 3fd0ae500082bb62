"""The embedded generation engine: in this process, starts at once, computes like the trainer.

    event loop                                engine thread
    submit, pause, load, resume, abort ─────► commands, in order, between two steps
                                              ContinuousBatch.step, while there is work
    collect ◄───── requests that ended ────── (or the error that ended the thread)

The model and the requests belong to the thread. Nothing is shared, so no lock is needed, and the
event loop never waits for a pass: a call into the thread is a future that the thread completes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch

from rlsys.config import RolloutConfig
from rlsys.engines.devices.cpu import keep_freed_memory
from rlsys.engines.generation.constraint import Grammars
from rlsys.engines.generation.generation_protocol import EngineError, EngineStats
from rlsys.engines.generation.stopping import end_of_sequence_ids, text_decoder
from rlsys.engines.generation.torch.continuous_batch import ContinuousBatch
from rlsys.engines.generation.torch.draft_policy import DraftPolicy
from rlsys.engines.generation.torch.weight_buffers import Exchange
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.models.fused_elementwise import use_fused_elementwise
from rlsys.engines.models.rms_norm import use_fast_norms
from rlsys.errors import InvalidValue
from rlsys.reallocation.transport.cuda_ipc import shared_device
from rlsys.reallocation.transport.shared_memory import MemoryGone
from rlsys.reallocation.transport.staging import Mappings
from rlsys.reallocation.transport.weight_views import Weights, open_verified
from rlsys.types import Generation, GenerationRequest, WeightManifest

# The thread ends after its current pass: seconds for the largest prompts.
CLOSE_TIMEOUT_S = 60.0

# Interval at which the thread delivers ended requests while it samples. Each delivery waits for the
# event loop to release the interpreter.
DELIVER_EVERY_S = 0.02

Result = TypeVar("Result")


class Prepared(NamedTuple):
    """A version of the weights that is ready to load."""

    weights: Weights
    made: Exchange | None  # None: weights are copied while the engine is paused


class TorchEngine:
    """A GenerationEngine for one device.

    `stop_token_ids` default to those of `end_of_sequence_ids`, `num_threads` to config.num_cpus.
    `reuses_prefixes` keeps keys and values of ended requests, in the part of kv_cache_gib that
    running requests leave, for requests that continue them.
    """

    def __init__(
        self,
        model_path: str | Path,
        config: RolloutConfig,
        *,
        dtype: str,
        stop_token_ids: Sequence[int] | None = None,
        device: str = "cpu",
        num_threads: int | None = None,
        reuses_prefixes: bool = True,
    ) -> None:
        self._model_path = model_path
        self._config = config
        self._dtype = dtype
        self._stop_token_ids = stop_token_ids
        self._device = device
        self._reuses_prefixes = reuses_prefixes
        self._num_threads = num_threads or max(1, int(config.num_cpus))
        draft = config.draft
        # On the CPU, time of other processes must not count.
        clock = time.thread_time if device == "cpu" else time.perf_counter
        self._draft_policy = None if draft is None else DraftPolicy(draft, clock=clock)

        self._thread: threading.Thread | None = None
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Used by the thread once it runs; the event loop reads counters and constants only.
        self._batch: ContinuousBatch | None = None
        self._paused = False
        self._leaving = False
        self._undelivered: list[Generation] = []
        self._delivered_s = 0.0

        # Used by the event loop; the thread changes the last two in `load`.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mappings = Mappings()
        self._prepared: Prepared | None = None
        self._serving: Weights | None = None  # open if the model uses them in shared memory
        self._calls: set[asyncio.Future[Any]] = set()
        self._open_requests: set[str] = set()
        self._ended: list[Generation] = []
        self._something_ended = asyncio.Event()
        self._failure: EngineError | None = None

    async def start(self) -> None:
        """Load the model.

        Raises ValueError if the path has none, or one of an unsupported architecture.
        """
        assert self._thread is None, "started twice"
        self._loop = asyncio.get_running_loop()
        if self._device == "cpu":
            keep_freed_memory()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()
        try:
            await self._call(self._load_model)
        except (ValueError, OSError):
            self._commands.put(self._leave)
            raise

    @property
    def context(self) -> int:
        """See `GenerationEngine.context`."""
        return self._require_batch().context

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `GenerationEngine.submit`."""
        batch = self._require_batch()
        for request in requests:
            batch.check(request)
        names = [request.request_id for request in requests]
        known = [name for name in names if name in self._open_requests]
        if known or len(set(names)) < len(names):
            raise InvalidValue(
                "request_id",
                known[:4] or names[:4],
                rule="must differ from those of all requests that have not ended",
                fix="Give each request its own id.",
            )
        self._open_requests.update(names)
        queued = tuple(requests)
        self._commands.put(lambda: batch.submit(queued))

    async def collect(self) -> list[Generation]:
        """See `GenerationEngine.collect`."""
        while not self._ended or self._failure is not None:
            self._require_alive()
            self._something_ended.clear()
            await self._something_ended.wait()
        ended, self._ended = self._ended, []
        return ended

    async def progress(self) -> list[Generation]:
        """See `GenerationEngine.progress`."""
        return await self._call(self._require_batch().progress)

    async def abort(self, request_ids: Collection[str]) -> None:
        """See `GenerationEngine.abort`."""
        batch = self._require_batch()
        await self._call(lambda: self._post(self._deliver, batch.abort(request_ids)))

    async def pause(self) -> None:
        """See `GenerationEngine.pause`."""
        await self._call(lambda: self._set_paused(True))

    async def prepare(self, manifest: WeightManifest) -> None:
        """See `GenerationEngine.prepare`."""
        batch = self._require_batch()
        if self._prepared is not None:
            _free_later({self._prepared.weights}, [])
            self._prepared = None
        self._prepared = await asyncio.to_thread(self._prepare, batch, manifest)

    def _prepare(self, batch: ContinuousBatch, manifest: WeightManifest) -> Prepared:
        with contextlib.ExitStack() as opened:
            weights = opened.enter_context(open_verified(manifest, batch.tensors, self._mappings))
            weights.open_on(shared_device(self._device))
            made = batch.prepare(weights)
            if made is None or made.uses_shared_memory:
                opened.pop_all()  # otherwise all is copied, and the trainer may reuse its memory
            return Prepared(weights, made)

    async def load(self) -> None:
        """See `GenerationEngine.load`."""
        batch, prepared = self._require_batch(), self._prepared
        assert prepared is not None, "prepare comes first"

        def load() -> None:
            if not self._paused:
                raise InvalidValue(
                    "load", rule="the engine is not paused", fix="Call pause before load."
                )
            prepared.weights.require_owners()
            replaced = batch.load(prepared.weights, prepared.made)
            try:
                prepared.weights.require_owners()
            except MemoryGone as gone:  # the copied values are undefined
                raise EngineError(f"torch engine: {gone}") from gone
            # On this thread, so that it happens even if the caller was cancelled.
            unused = (
                {prepared.weights} if self._serving is None else {prepared.weights, self._serving}
            )
            self._prepared = self._serving = None
            if prepared.made is not None and prepared.made.uses_shared_memory:
                self._serving = prepared.weights
                unused.remove(prepared.weights)
            self._post(_free_later, unused, replaced)

        await self._call(load)

    async def add_adapter(self, number: int, directory: Path) -> None:
        """See `AdapterEngine.add_adapter`."""
        bank = await self._call(self._require_batch().open_adapters)
        factors = await asyncio.to_thread(bank.read, directory)
        await self._call(lambda: bank.add(number, factors))

    async def drop_adapter(self, number: int) -> None:
        """See `AdapterEngine.drop_adapter`."""
        bank = await self._call(self._require_batch().open_adapters)
        await self._call(lambda: bank.remove(number))

    async def resume(self) -> None:
        """See `GenerationEngine.resume`."""
        await self._call(lambda: self._set_paused(False))

    async def release(self) -> None:
        """See `GenerationEngine.release`."""
        await self._call(self._require_batch().release)
        self._mappings.release()
        if self._serving is not None:
            self._serving.close()  # at once: the trainer may need this memory
            self._serving = None

    def stats(self) -> EngineStats:
        """See `GenerationEngine.stats`."""
        batch, policy = self._batch, self._draft_policy
        if batch is None:
            return EngineStats(
                num_waiting=0, num_running=0, num_generated_tokens=0, policy_version=0
            )
        num_running = batch.num_running
        return EngineStats(
            num_waiting=max(0, len(self._open_requests) - num_running),
            num_running=num_running,
            num_generated_tokens=batch.num_generated_tokens,
            policy_version=batch.policy_version,
            num_prompt_tokens=batch.num_prompt_tokens,
            num_reused_tokens=batch.num_reused_tokens,
            kv_usage=batch.kv_usage,
            num_drafted_tokens=0 if policy is None else policy.num_drafted,
            num_accepted_tokens=0 if policy is None else policy.num_accepted,
            draft_speedup=None if policy is None else policy.speedup,
        )

    async def close(self) -> None:
        """End the thread. Raises EngineError if a pass still runs after CLOSE_TIMEOUT_S."""
        if self._thread is None:
            return
        self._commands.put(self._leave)
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise EngineError(f"torch engine: a pass is still running after {CLOSE_TIMEOUT_S} s.")
        self._fail(EngineError("torch engine: it is closed."))
        for weights in (self._serving, self._prepared and self._prepared.weights):
            if weights is not None:
                weights.close()

    # Methods that run on the event loop.

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(str(self._failure)) from self._failure.__cause__
        if self._thread is None:
            raise EngineError("torch engine: not started; await start() first.")

    def _require_batch(self) -> ContinuousBatch:
        self._require_alive()
        assert self._batch is not None, "used during start"
        return self._batch

    async def _call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the thread, after earlier commands, and return its result."""
        self._require_alive()
        assert self._loop is not None
        done: asyncio.Future[Result] = self._loop.create_future()
        self._calls.add(done)
        done.add_done_callback(self._calls.discard)

        def command() -> None:
            try:
                result = function()
            except (ValueError, OSError) as error:  # the caller's mistake; the engine continues
                self._post(_raise_in, done, error)
            else:
                self._post(_return_to, done, result)

        self._commands.put(command)
        return await done

    def _deliver(self, generations: list[Generation]) -> None:
        self._open_requests.difference_update(one.request_id for one in generations)
        self._ended += generations
        self._something_ended.set()

    def _fail(self, failure: EngineError) -> None:
        self._failure = self._failure or failure
        self._something_ended.set()
        for call in list(self._calls):
            _raise_in(call, self._failure)

    # Methods that run on the thread.

    def _run(self) -> None:
        try:
            while not self._leaving:
                self._run_commands()
                if self._has_work:
                    assert self._batch is not None
                    self._undelivered += self._batch.step()
                if not self._has_work or time.monotonic() >= self._delivered_s + DELIVER_EVERY_S:
                    self._deliver_all()
        except Exception as error:  # noqa: BLE001 - every waiting call raises it
            failure = EngineError(f"torch engine: its thread died with {error!r}.")
            failure.__cause__ = error
            self._post(self._fail, failure)

    @property
    def _has_work(self) -> bool:
        return self._batch is not None and self._batch.has_work and not self._paused

    def _run_commands(self) -> None:
        """Run all queued commands; wait for one if there is nothing else to do."""
        with contextlib.suppress(Empty):
            while not self._leaving:
                self._commands.get(block=not self._has_work)()

    def _load_model(self) -> None:
        torch.set_num_threads(self._num_threads)  # a setting of the current thread in OpenMP
        model = load_causal_lm(self._model_path, dtype=self._dtype, device=self._device)
        if self._device.startswith("cuda"):
            use_fast_norms(model, fused=True)  # like the trainer
            use_fused_elementwise(model)
        self._batch = ContinuousBatch(
            model,
            max_running=self._config.max_running,
            kv_cache_gib=self._config.kv_cache_gib,
            stop_token_ids=self._stop_token_ids
            if self._stop_token_ids is not None
            else end_of_sequence_ids(self._model_path),
            decode_text=text_decoder(self._model_path),
            records_routing=self._config.replay_routing,
            reuses_prefixes=self._reuses_prefixes,
            grammars=Grammars(self._model_path, model.config.get_text_config().vocab_size),
            draft_policy=self._draft_policy,
        )

    def _deliver_all(self) -> None:
        if self._undelivered:
            self._post(self._deliver, self._undelivered)
            self._undelivered = []
            self._delivered_s = time.monotonic()

    def _set_paused(self, paused: bool) -> None:
        self._deliver_all()
        self._paused = paused

    def _leave(self) -> None:
        self._leaving = True

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, *args)


def _free_later(versions: set[Weights], replaced: list[torch.Tensor]) -> None:
    """Free memory during generation, because it takes as long as copying it."""

    def free() -> None:
        replaced.clear()
        for weights in versions:
            weights.close()

    asyncio.get_running_loop().run_in_executor(None, free)


# A call's future may be done before its result arrives, if its caller was cancelled.


def _return_to(call: asyncio.Future[Result], result: Result) -> None:
    if not call.done():
        call.set_result(result)


def _raise_in(call: asyncio.Future[Any], error: Exception) -> None:
    if not call.done():
        call.set_exception(error)
