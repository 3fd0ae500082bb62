"""The embedded generation engine: in this process, starts at once, runs the trainer's arithmetic.

    event loop                                engine thread
    submit, pause, load, resume, abort ─────► commands, in order, between two steps
                                              ContinuousBatch.step, while there is work
    collect ◄───── what steps have ended ──── (or the error that ended the thread)

The model and the requests belong to the thread. Nothing is shared, so nothing is locked, and the
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
from rlsys.engines.generation.torch.weight_buffers import Exchange
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.models.fused_elementwise import use_fused_elementwise
from rlsys.engines.models.rms_norm import use_fast_norms
from rlsys.reallocation.transport.staging import Mappings
from rlsys.reallocation.transport.weight_views import Weights, open_verified
from rlsys.types import Generation, GenerationRequest, WeightManifest

# The thread leaves after the pass at hand: seconds for the largest prompts.
CLOSE_TIMEOUT_S = 60.0

# While it samples on, the thread hands over what has ended this often: each time it then waits for
# the event loop's turn at the interpreter.
DELIVER_EVERY_S = 0.02

Result = TypeVar("Result")


class Prepared(NamedTuple):
    weights: Weights
    made: Exchange | None  # of them; None: they are copied while the engine is paused


class TorchEngine:
    """A rlsys.engines.generation.generation_protocol.GenerationEngine for one device.

    `stop_token_ids`: by default those of `end_of_sequence_ids`. `num_threads`: by default
    config.num_cpus. `reuses_prefixes`: whether keys and values of what has ended are kept, in what
    running requests leave of kv_cache_gib, for requests that go on from it.
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

        self._thread: threading.Thread | None = None
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # The thread's own, once it runs; the event loop reads counters and constants only.
        self._batch: ContinuousBatch | None = None
        self._paused = False
        self._leaving = False
        self._undelivered: list[Generation] = []
        self._delivered_s = 0.0

        # The event loop's own; the thread changes the last two in `load`.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mappings = Mappings()
        self._prepared: Prepared | None = None
        self._serving: Weights | None = None  # open, where the model computes with what lies there
        self._calls: set[asyncio.Future[Any]] = set()
        self._open_requests: set[str] = set()
        self._ended: list[Generation] = []
        self._something_ended = asyncio.Event()
        self._failure: EngineError | None = None

    async def start(self) -> None:
        """Load the model. Raises ValueError if the path holds none, or one of an architecture that
        this engine cannot run.
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

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        batch = self._require_batch()
        for request in requests:
            batch.check(request)
        names = [request.request_id for request in requests]
        known = [name for name in names if name in self._open_requests]
        if known or len(set(names)) < len(names):
            raise ValueError(
                f"request ids {known[:4] or names[:4]} are not unique among the requests that have "
                "not ended; give each request an id of its own."
            )
        self._open_requests.update(names)
        queued = tuple(requests)
        self._commands.put(lambda: batch.submit(queued))

    async def collect(self) -> list[Generation]:
        while not self._ended or self._failure is not None:
            self._require_alive()
            self._something_ended.clear()
            await self._something_ended.wait()
        ended, self._ended = self._ended, []
        return ended

    async def progress(self) -> list[Generation]:
        return await self._call(self._require_batch().progress)

    async def abort(self, request_ids: Collection[str]) -> None:
        batch = self._require_batch()
        await self._call(lambda: self._post(self._deliver, batch.abort(request_ids)))

    async def pause(self) -> None:
        await self._call(lambda: self._set_paused(True))

    async def prepare(self, manifest: WeightManifest) -> None:
        batch = self._require_batch()
        if self._prepared is not None:
            _let_go({self._prepared.weights}, [])
            self._prepared = None
        self._prepared = await asyncio.to_thread(self._prepare, batch, manifest)

    def _prepare(self, batch: ContinuousBatch, manifest: WeightManifest) -> Prepared:
        with contextlib.ExitStack() as opened:
            weights = opened.enter_context(open_verified(manifest, batch.tensors, self._mappings))
            made = batch.prepare(weights)
            if made is None or made.stays_in_share:
                opened.pop_all()  # else all has been copied, and the trainer may have its memory
            return Prepared(weights, made)

    async def load(self) -> None:
        batch, prepared = self._require_batch(), self._prepared
        assert prepared is not None, "prepare comes first"

        def load() -> None:
            if not self._paused:
                raise ValueError("weights can only be loaded while the engine is paused; pause it.")
            replaced = batch.load(prepared.weights, prepared.made)
            # Here, whether the caller is still there or not.
            unused = (
                {prepared.weights} if self._serving is None else {prepared.weights, self._serving}
            )
            self._prepared = self._serving = None
            if prepared.made is not None and prepared.made.stays_in_share:
                self._serving = prepared.weights
                unused.remove(prepared.weights)
            self._post(_let_go, unused, replaced)

        await self._call(load)

    async def resume(self) -> None:
        await self._call(lambda: self._set_paused(False))

    async def release(self) -> None:
        await self._call(self._require_batch().release)
        self._mappings.release()
        if self._serving is not None:
            self._serving.close()  # at once: who works now may want this memory
            self._serving = None

    def stats(self) -> EngineStats:
        batch = self._batch
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
        )

    async def close(self) -> None:
        """Raises EngineError if the thread is still in a pass after CLOSE_TIMEOUT_S."""
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

    # On the event loop.

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(str(self._failure)) from self._failure.__cause__
        if self._thread is None:
            raise EngineError("torch engine: it has not been started; await start() first.")

    def _require_batch(self) -> ContinuousBatch:
        self._require_alive()
        assert self._batch is not None, "used while it starts"
        return self._batch

    async def _call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the thread, after all commands before it; its result or exception."""
        self._require_alive()
        assert self._loop is not None
        done: asyncio.Future[Result] = self._loop.create_future()
        self._calls.add(done)
        done.add_done_callback(self._calls.discard)

        def command() -> None:
            try:
                result = function()
            except (ValueError, OSError) as error:  # the caller's mistake: the engine goes on
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

    # On the thread.

    def _run(self) -> None:
        try:
            while not self._leaving:
                self._run_commands()
                if self._has_work:
                    assert self._batch is not None
                    self._undelivered += self._batch.step()
                if not self._has_work or time.monotonic() >= self._delivered_s + DELIVER_EVERY_S:
                    self._deliver_all()
        except Exception as error:  # noqa: BLE001 - not swallowed: every waiting call raises it
            failure = EngineError(f"torch engine: its thread died of {error!r}.")
            failure.__cause__ = error
            self._post(self._fail, failure)

    @property
    def _has_work(self) -> bool:
        return self._batch is not None and self._batch.has_work and not self._paused

    def _run_commands(self) -> None:
        """All that are queued; waits for one where there is nothing else to do."""
        with contextlib.suppress(Empty):
            while not self._leaving:
                self._commands.get(block=not self._has_work)()

    def _load_model(self) -> None:
        torch.set_num_threads(self._num_threads)  # OpenMP keeps this per thread
        model = load_causal_lm(self._model_path, dtype=self._dtype, device=self._device)
        if self._device.startswith("cuda"):
            use_fast_norms(model, fused=True)  # as in the trainer
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
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens
            self._loop.call_soon_threadsafe(function, *args)


def _let_go(versions: set[Weights], replaced: list[torch.Tensor]) -> None:
    """Beside generation: it takes as long as to copy it."""

    def let_go() -> None:
        replaced.clear()
        for weights in versions:
            weights.close()

    asyncio.get_running_loop().run_in_executor(None, let_go)


# A call's future may be done before its result comes: its caller was cancelled.


def _return_to(call: asyncio.Future[Result], result: Result) -> None:
    if not call.done():
        call.set_result(result)


def _raise_in(call: asyncio.Future[Any], error: Exception) -> None:
    if not call.done():
        call.set_exception(error)
