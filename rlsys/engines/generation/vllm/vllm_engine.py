"""Generation by vLLM: token ids in, sampled tokens with log-probabilities and versions out.

    this process, an asyncio loop               vLLM's processes
    submit ──► a task per request ──► AsyncLLM ──► engine core ──► a worker per tensor-parallel rank
    collect ◄── finished generations ◄──┘              ▲             ▲
    pause, resume ─────────────────────────────────────┘             │
    prepare, load ───────────────────────────────────────────────────┘ takes staged weights

Versions are exact: vLLM's core marks the tokens of each step with the version that was set while it
was paused. Running requests keep their KV cache over an update. The prefix cache is keyed by the
number of updates and by the salts of requests, so a request submitted after an update never reads
keys and values of older weights.

One engine can serve several policies of one base model, each with adapters of its own. Requests
name their policy by its number, and an update replaces the adapters of one policy. vLLM marks
tokens with the versions of all policies, of which a request takes its policy's. The prefix cache is
keyed by the policy too. rlsys.engines.generation.shared_engine makes a GenerationEngine of each
policy.

Log-probabilities are those of softmax(logits / temperature), before top-k, top-p and structures
restrict it; at temperature 0 (the most likely token), those of softmax(logits). Structures use
vLLM's structured outputs; when a completion ends, tokens without an alternative are marked here.

The result of a request depends on its prompt, its seed and the weights, not on earlier requests:
each has its own random stream, on the CPU the same as in the torch engine. Concurrent requests
affect the last bits, since kernels depend on the number of rows, and so does the prefix cache,
which decides how much of a prompt is computed. So two runs are bit-identical only if requests are
batched alike. About one token in some thousands depends on such a bit.

A request without finite probabilities fails, and the engine goes on. But its keys and values stay
in blocks of the cache and in buffers of vLLM's kernels. Kernels for CPUs multiply what is there by
0, which is NaN again, so that later requests of other weights may fail too. A server of the Tinker
API therefore starts another engine for them.

vllm is imported inside functions of the vllm_* modules, and by those that only vLLM's own processes
import, such as vllm_worker and vllm_weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import tempfile
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rlsys.config import RolloutConfig
from rlsys.config.lora import Lora
from rlsys.engines.generation.constraint import Grammars, forced_tokens, with_forced
from rlsys.engines.generation.generation_protocol import EngineError, EngineStats
from rlsys.engines.generation.stopping import (
    DecodeText,
    end_of_sequence_ids,
    stop_ids,
    text_decoder,
)
from rlsys.engines.generation.vllm.vllm_leftovers import ProcessSupervisor, unlink_shared_files
from rlsys.engines.generation.vllm.vllm_model_options import check_runs_on_cpu
from rlsys.engines.generation.vllm.vllm_process import end_vllm, start_vllm
from rlsys.engines.generation.vllm.vllm_requests import (
    adapter_request,
    generation,
    partial_generation,
    read_prior_text,
    version_label,
    vllm_params,
    vllm_prompt,
)
from rlsys.engines.generation.vllm.vllm_routing import ExpertSource, expert_source
from rlsys.engines.models.eagle_head import published_head
from rlsys.engines.models.expert_layout import Routing
from rlsys.engines.models.model_tensors import meta_model, model_tensors
from rlsys.engines.models.routing import routing_of
from rlsys.engines.training.adapters import factor_tensors, layer_of
from rlsys.errors import InvalidValue
from rlsys.reallocation.shards import TensorShard
from rlsys.reallocation.transport.weight_views import UPDATE_ERRORS, open_verified
from rlsys.types import Generation, GenerationRequest, SamplingParams, WeightManifest

# Interval of asking workers whether they have prepared new weights; they cannot notify. Generation
# continues meanwhile.
POLL_S = 0.002

PROCESSES_ENDED = "its processes have ended (its messages above give the cause)"

Result = TypeVar("Result")


@dataclass(kw_only=True)
class _Policy:
    """A policy of the engine."""

    setting: str = "model.lora"  # the option of its adapters
    lora: Lora | None  # these, if versions are adapters
    shapes: dict[str, Any] = field(default_factory=dict)  # of the tensors of a version, by name
    version: int = 0
    prepared: int = 0
    num_loads: int = 0


class VLLMEngine:
    """A GenerationEngine that runs vLLM.

    `path` is a Hugging Face name or directory. `max_context` limits prompt and completion together,
    in tokens, below the model's own limit; None means that limit, or what the KV cache holds if
    less. `shares_device` means that the engine will `release` its memory, which vLLM on GPUs then
    allocates differently. `reuses_prefixes` enables vLLM's prefix cache for models that support it.
    `lora` are the adapters that are trained. If rollout.vllm.enable_lora is set, the engine keeps
    the weights of `path`, and a version consists of the factors of the adapters. Then the engine
    can serve more policies, numbered from 1: `others` are their adapters, by name.
    """

    def __init__(
        self,
        path: str,
        rollout: RolloutConfig,
        *,
        dtype: str,
        max_context: int | None = None,
        shares_device: bool = False,
        reuses_prefixes: bool = True,
        lora: Lora | None = None,
        others: Mapping[str, Lora] | None = None,
    ) -> None:
        self._path = path
        self._rollout = rollout
        self._dtype = dtype
        self._max_context = max_context
        self._shares_device = shares_device
        self._reuses_prefixes = reuses_prefixes
        self._policies = [_Policy(lora=lora if rollout.sends_adapters else None)]
        for name, adapters in (others or {}).items():
            self._policies.append(_Policy(lora=adapters, setting=f"{name}.model.lora"))
        self._is_asleep = False
        self._routing: Routing | None = None  # if the experts of tokens are recorded
        self._experts: ExpertSource | None = None
        self._stop_token_ids: tuple[int, ...] = ()
        self._decode_text: DecodeText | None = None  # created on first use
        self._llm: Any = None  # vLLM's AsyncLLM, between start and close
        self._tasks: dict[str, asyncio.Task[Generation]] = {}  # unfinished, by request id
        self._aborted: set[str] = set()  # among unfinished requests
        self._constrained: dict[str, GenerationRequest] = {}  # among unfinished requests
        self._grammars: Grammars | None = None  # created on first use
        self._finished: list[Generation] = []
        self._num_finished_tokens = 0
        self._num_prompt_tokens = self._num_reused_tokens = 0
        self._num_drafted = self._num_accepted = 0  # tokens, when last read
        self._num_preempted = 0  # when last read
        self._draft_speedup: float | None = None  # by n-grams, when last read
        self._numbers = itertools.count()  # one per request
        self._changed = asyncio.Event()  # a request has finished, or the engine has failed
        self._failure: str | None = "the engine was not started"

    async def start(self) -> None:
        """Load the model; about 15 s for a small one.

        Raises ValueError for a model that vLLM cannot serve or whose weights cannot be replaced,
        FloatingPointError for one without finite probabilities, EngineError if vLLM's processes do
        not start.
        """
        await asyncio.to_thread(self._read_config)
        self._stop_token_ids = await asyncio.to_thread(end_of_sequence_ids, self._path)
        with (
            tempfile.TemporaryDirectory(prefix="rlsys-vllm-") as sockets,
            ProcessSupervisor(directory=sockets),
        ):
            try:
                await asyncio.to_thread(self._start_vllm, sockets)
            except RuntimeError as error:
                raise EngineError(
                    f"vLLM did not start: {error} See its messages above for the cause. If memory "
                    "is short, lower rollout.kv_cache_gib (CPU) or rollout.gpu_memory_frac (GPU)."
                ) from error
            try:
                await self._prepare()
                await asyncio.to_thread(unlink_shared_files, os.getpid())
            except BaseException:
                await self.close()
                raise

    @property
    def vocabulary(self) -> int:
        """Number of tokens of the model; known once the engine has started."""
        size: int = self._llm.model_config.get_vocab_size()
        return size

    @property
    def context(self) -> int:
        """See `GenerationEngine.context`."""
        limit: int = self._llm.model_config.max_model_len
        return limit

    @property
    def policy_versions(self) -> list[int]:
        """Versions of all policies, by number."""
        return [policy.version for policy in self._policies]

    def submit(self, requests: Sequence[GenerationRequest], *, policy: int = 0) -> None:
        """See `GenerationEngine.submit`."""
        self._check_alive()
        prepared: dict[str, Any] = {}
        for request in requests:
            if request.request_id in self._tasks or request.request_id in prepared:
                raise InvalidValue(
                    "request_id",
                    request.request_id,
                    rule="must differ from those of all requests that have not ended",
                    fix="Give each request its own id.",
                )
            prepared[request.request_id] = self._params(request)
        for request in requests:
            params = prepared[request.request_id]
            sampling = self._generate(request, params, policy)
            task = asyncio.create_task(sampling, name=request.request_id)
            self._tasks[request.request_id] = task
            if request.sampling.structure:
                self._constrained[request.request_id] = request
            task.add_done_callback(self._end)
            if request.sampling.stop and request.num_prior_tokens:
                # Runs after the task's first step, in which vLLM takes the request.
                asyncio.get_running_loop().call_soon(self._read_prior_text, request)

    async def collect(self) -> list[Generation]:
        """See `GenerationEngine.collect`."""
        while not self._finished:
            self._check_alive()
            self._changed.clear()
            await self._changed.wait()
        finished, self._finished = self._finished, []
        return finished

    async def progress(self) -> list[Generation]:
        """See `GenerationEngine.progress`."""
        self._check_alive()
        await self._read_counts()  # does not return if a process is stopped or hangs
        states = {
            state.external_req_id: state
            for state in self._llm.output_processor.request_states.values()
            if state.detokenizer.num_output_tokens()
        }
        running = [partial_generation(state).until_failure() for state in states.values()]
        if failed := [one.request_id for one in running if one.failure]:
            await self.abort(failed)  # vLLM would sample to their end
            running = [one for one in running if not one.failure]
        if self._experts is not None:
            num_rows = {
                one.request_id: states[one.request_id].prompt_len + len(one.token_ids) - 1
                for one in running
            }
            rows = await self._experts.of_running(num_rows, states)
            running = [
                replace(one, routed_experts=rows[one.request_id])
                for one in running
                if one.request_id in rows
            ]
        return [await self._with_forced(one) for one in running]

    async def abort(self, request_ids: Collection[str]) -> None:
        """See `GenerationEngine.abort`."""
        self._check_alive()
        known = [request_id for request_id in request_ids if request_id in self._tasks]
        self._aborted.update(known)
        await self._call(self._llm.abort(known))

    async def pause(self) -> None:
        """See `GenerationEngine.pause`."""
        self._check_alive()
        # AsyncLLM.pause_generation would also sleep 20 ms to order outputs, which is not needed
        # because they carry their version.
        core = self._llm.engine_core
        await self._call(core.pause_scheduler_async(mode="keep", clear_cache=False))

    async def prepare(self, manifest: WeightManifest, *, policy: int = 0) -> None:
        """See `GenerationEngine.prepare`."""
        self._check_alive()
        updated = self._policies[policy]
        weights = await asyncio.to_thread(open_verified, manifest, updated.shapes)
        with contextlib.closing(weights):  # the workers keep it open
            await self._rpc("rlsys_prepare", pickle.dumps(weights.local), policy)
        while not all(answers := await self._rpc("rlsys_is_prepared", policy)):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        for answer in answers:
            if answer is not True:
                kind, text = answer
                raise UPDATE_ERRORS[kind](text)
        updated.prepared = manifest.version

    async def load(self, *, policy: int = 0) -> None:
        """See `GenerationEngine.load`."""
        self._check_alive()
        if self._is_asleep:
            await self._call(self._llm.wake_up())
            self._is_asleep = False
        await self._rpc("rlsys_load", policy)
        if self._rollout.speculation:
            await self._read_counts()
        updated = self._policies[policy]
        updated.version = updated.prepared
        updated.num_loads += 1
        await self._label_versions()

    async def holdings(self) -> list[list[TensorShard]]:
        """Return each tensor-parallel rank's shards of the Hugging Face model."""
        self._check_alive()
        return [pickle.loads(pickled) for pickled in await self._rpc("rlsys_holdings")]

    async def _label_versions(self) -> None:
        """Let vLLM mark later tokens with the versions of all policies."""
        await self._call(self._llm.update_weight_version(version_label(self.policy_versions)))

    async def _read_counts(self) -> None:
        """Read the counts of the first rank, whose drafts vLLM uses."""
        counts = (await self._rpc("rlsys_ping"))[0]
        self._num_drafted, self._num_accepted, self._num_preempted, self._draft_speedup = counts

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of each worker and return their results."""
        answers: list[Any] = await self._call(self._llm.collective_rpc(method, args=args))
        return answers

    async def resume(self) -> None:
        """See `GenerationEngine.resume`."""
        self._check_alive()
        await self._call(self._llm.resume_generation())

    async def release(self) -> None:
        """Enter vLLM's sleep mode, at the level that keeps nothing."""
        self._check_alive()
        await self._call(self._llm.sleep(level=2))
        self._is_asleep = True

    def stats(self) -> EngineStats:
        """See `GenerationEngine.stats`."""
        states = self._llm.output_processor.request_states.values() if self._llm else ()
        num_tokens = [state.detokenizer.num_output_tokens() for state in states]
        num_running = sum(num > 0 for num in num_tokens)
        return EngineStats(
            num_waiting=len(self._tasks) - num_running,  # requests without a token yet
            num_running=num_running,
            num_generated_tokens=self._num_finished_tokens + sum(num_tokens),
            policy_version=self._policies[0].version,
            num_prompt_tokens=self._num_prompt_tokens,
            num_reused_tokens=self._num_reused_tokens,
            kv_usage=self._kv_usage(),
            num_drafted_tokens=self._num_drafted,
            num_accepted_tokens=self._num_accepted,
            num_preempted=self._num_preempted,
            draft_speedup=self._draft_speedup,
        )

    def _kv_usage(self) -> float | None:
        """Return an estimate: the tokens of running requests, without shared prefixes."""
        if self._llm is None:
            return None
        cache = self._llm.vllm_config.cache_config
        room = (cache.num_gpu_blocks or 0) * cache.block_size
        states = self._llm.output_processor.request_states.values()
        lengths = [(state.prompt_len, state.detokenizer.num_output_tokens()) for state in states]
        used = sum(prompt + sampled for prompt, sampled in lengths if sampled)
        return min(1.0, used / room) if room else None

    async def close(self) -> None:
        """See `GenerationEngine.close`."""
        self._fail("the engine was closed")
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.output_handler.cancel()  # otherwise it would report the shutdown as an error
            await asyncio.to_thread(end_vllm, llm)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _read_config(self) -> None:
        model, draft = meta_model(self._path), self._rollout.draft
        if not self._rollout.num_gpus:
            check_runs_on_cpu(self._path, model.config)
        for policy in self._policies:
            lora = policy.lora
            policy.shapes = model_tensors(model) if lora is None else factor_tensors(model, lora)
        if draft is not None and draft.trained_along:
            self._policies[0].shapes |= published_head(draft.model, model.config)
        if self._rollout.replay_routing:
            self._routing = routing_of(model)

    def _start_vllm(self, sockets: str) -> None:
        self._llm = start_vllm(
            self._path,
            self._rollout,
            dtype=self._dtype,
            max_context=self._max_context,
            shares_device=self._shares_device,
            reuses_prefixes=self._reuses_prefixes,
            loras=[one.lora for one in self._policies if one.lora is not None],
            adapted_layers={
                layer_of(factor)
                for one in self._policies
                if one.lora is not None
                for factor in one.shapes
            },
            sockets=sockets,
        )

    async def _prepare(self) -> None:
        """Make the first calls and sample one token.

        An architecture that vLLM loads but cannot run fails here.
        """
        self._failure = None
        self._llm._run_output_handler()  # a task that ends when vLLM's processes do
        self._llm.output_handler.add_done_callback(lambda _: self._fail(PROCESSES_ENDED))
        await self._call(self._llm.get_supported_tasks())  # cached for later requests
        await self._label_versions()
        await self._start_policy(self._policies[0], "rlsys_start")
        for policy in self._policies[1:]:
            await self._start_policy(policy, "rlsys_add_policy")
        if self._routing is not None:
            by_hooks = not self._llm.vllm_config.aux_output_config.enabled
            self._experts = await expert_source(self._rpc, self._routing, by_hooks=by_hooks)
        trial = GenerationRequest(
            request_id="trial", prompt_token_ids=[0], sampling=SamplingParams(max_tokens=1), seed=0
        )
        (await self._call(self._generate(trial, self._params(trial)))).raise_failure()
        self._num_prompt_tokens = 0  # the trial does not count

    async def _start_policy(self, policy: _Policy, method: str) -> None:
        """Let the workers prepare for updates of a policy."""
        shapes = {name: tuple(tensor.shape) for name, tensor in policy.shapes.items()}
        lora = policy.lora
        adapter = None if lora is None else {"r": lora.rank, "lora_alpha": lora.alpha}
        refusals = await self._rpc(method, shapes, adapter)
        if any(refusals):
            rule, fix = next(filter(None, refusals))
            if lora is not None:
                raise InvalidValue(policy.setting, rule=rule, fix=fix)
            raise InvalidValue("model.path", self._path, rule=rule, fix=fix)

    def _params(self, request: GenerationRequest) -> Any:
        return vllm_params(request, self._llm, self._stop_token_ids)

    def _read_prior_text(self, request: GenerationRequest) -> None:
        self._decode_text = self._decode_text or text_decoder(self._path)
        states = self._llm.output_processor.request_states.values() if self._llm else ()
        for state in states:
            if state.external_req_id == request.request_id:
                read_prior_text(state, request, self._decode_text)

    async def _generate(
        self, request: GenerationRequest, params: Any, policy: int = 0
    ) -> Generation:
        """Sample a completion.

        Runs without suspending until vLLM has the request, so vLLM sees them in submission order.
        """
        request_id, completion = request.request_id, None
        if request_id not in self._aborted:
            number, sampler = next(self._numbers), self._policies[policy]
            prompt = vllm_prompt(request, num_loads=sampler.num_loads, number=number)
            # vLLM prefers the lowest priority.
            requested = self._llm.generate(
                prompt,
                params,
                request_id,
                lora_request=None if sampler.lora is None else adapter_request(policy),
                priority=-request.priority,
            )
            async for output in requested:  # once, at the end
                (completion,) = output.outputs
                self._num_prompt_tokens += len(request.prompt_token_ids)
                self._num_reused_tokens += output.num_cached_tokens
        made = generation(request_id, completion, policy)
        if self._experts is not None and completion is not None:
            num_sampled = len(made.token_ids)
            num_rows = len(request.prompt_token_ids) + num_sampled - 1 if num_sampled else 0
            rows = await self._experts.of_ended(request_id, num_rows, completion)
            made = replace(made, routed_experts=rows)
        return await self._with_forced(made.until_failure())

    async def _with_forced(self, made: Generation) -> Generation:
        """Mark the tokens of a constrained completion that had no alternative."""
        request = self._constrained.get(made.request_id)
        if request is None:
            return made
        if self._grammars is None:
            self._grammars = Grammars(self._path, self.vocabulary)
        grammars, structure = self._grammars, request.sampling.structure
        end_ids = stop_ids(request, self._stop_token_ids)

        def marked() -> Generation:  # on a thread, because it reads the tokenizer the first time
            matcher = grammars.matcher(structure, end_ids)
            return with_forced(made, forced_tokens(matcher, made.token_ids.tolist()))

        return await asyncio.to_thread(marked)

    def _end(self, task: asyncio.Task[Generation]) -> None:
        """Handle the end of a request's task: it has a generation, or the engine has failed."""
        del self._tasks[task.get_name()]
        self._aborted.discard(task.get_name())
        self._constrained.pop(task.get_name(), None)
        if task.cancelled():
            return
        if error := task.exception():
            self._fail(f"{type(error).__name__}: {error}")
            return
        self._num_finished_tokens += len(task.result().token_ids)
        self._finished.append(task.result())
        self._changed.set()

    async def _call(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Await a call to vLLM's processes; fail if they end, when the call would never return."""
        handler = self._llm.output_handler
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task, handler}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and task.exception() is None:
                return task.result()
        finally:
            task.cancel()
        self._fail(repr(task.exception()) if task.done() else PROCESSES_ENDED)
        raise self._error()

    def _fail(self, reason: str) -> None:
        """Record the first reason why the engine cannot continue, and wake up `collect`."""
        self._failure = self._failure or reason
        self._changed.set()

    def _check_alive(self) -> None:
        if self._failure:
            raise self._error()

    def _error(self) -> EngineError:
        return EngineError(f"vLLM cannot continue: {self._failure}.")
