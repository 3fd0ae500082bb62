"""Generation by a vLLM server outside of the run, an entry of rollout.urls.

    this process, an asyncio loop                    the server
    submit ──► a task per request ──► POST /inference/v1/generate ──► tokens, versions
    prepare ─► rlsys_server_prepare ─► ServerWorker opens the weights of this node, or receives them
    pause, load, resume ─► /pause, rlsys_load, /update_weight_version, /resume

The engine counts as started once the server has the weights of model.path, verified by digest. A
server that ends or hangs is an EngineError. A request returns its tokens at its end only, so that a
request of a server that has died starts again elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from rlsys.config import RolloutConfig
from rlsys.engines.generation.generation_protocol import EngineError, EngineStats
from rlsys.engines.generation.sampling import stream_key
from rlsys.engines.generation.stopping import check_stop, end_of_sequence_ids, stop_ids
from rlsys.engines.generation.vllm.vllm_requests import FINISH_REASONS, REQUEST_ID, STREAM
from rlsys.engines.generation.vllm.vllm_routing import WorkerExperts, check_recorded
from rlsys.engines.generation.vllm.vllm_server_checks import (
    ServedModel,
    check_served,
    read_served,
)
from rlsys.engines.generation.vllm.vllm_server_client import (
    GENERATED_TOKENS,
    KV_USAGE,
    PREEMPTIONS,
    RUNNING,
    ServerClient,
)
from rlsys.engines.generation.vllm.vllm_server_config import plain_config
from rlsys.engines.models.attention_context import context_length
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.models.expert_layout import Routing
from rlsys.engines.models.model_tensors import meta_model, model_tensors
from rlsys.engines.models.routing import routing_of
from rlsys.errors import InvalidValue, require
from rlsys.reallocation.transport.weight_views import Tensors, Weights, open_verified, stage_whole
from rlsys.types import (
    ExpertArray,
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParams,
    WeightManifest,
)

# Interval of asking whether the server has prepared new weights.
POLL_S = 0.01

# Bytes of weights in a call, if the server is on another node. In base64 they are a third more.
PIECE_BYTES = 24 * 2**20

GENERATE_PREFIX = "generate-tokens-"  # that vLLM puts before the ids of requests
CLAMPED = -9999.0  # what vLLM returns for a log-probability that is not finite


class ServerEngine:
    """A GenerationEngine that samples on a server.

    `path` is the model of the run, which the server must serve too. `max_context` is the largest
    number of tokens of a prompt and its completion.
    """

    def __init__(
        self, path: str, rollout: RolloutConfig, *, url: str, dtype: str, max_context: int
    ) -> None:
        self._path = path
        self._dtype = dtype
        self._max_context = max_context
        self._replays = rollout.replay_routing
        self._client = ServerClient(url)
        self._life = secrets.token_hex(4)  # no other client has its requests or its cache
        self._served: ServedModel | None = None
        self._shapes: Tensors = {}
        self._routing: Routing | None = None
        self._experts: WorkerExperts | None = None
        self._stop_token_ids: tuple[int, ...] = ()
        self._version = self._prepared = self._num_loads = 0
        self._numbers = itertools.count()
        self._tasks: dict[str, asyncio.Task[Generation]] = {}  # unfinished, by request id
        self._ids: dict[str, str] = {}  # on the server, of unfinished requests
        self._finished: list[Generation] = []
        self._changed = asyncio.Event()
        self._metrics: Mapping[str, float] = {}
        self._first_metrics: Mapping[str, float] = {}
        self._num_prompt_tokens = self._num_finished_tokens = 0
        self._failure: str | None = "the engine was not started"

    async def start(self) -> None:
        """Check the server, load the weights of the model and sample a token.

        Raises InvalidValue for a server that does not fit the run, FloatingPointError for a model
        without finite probabilities, EngineError if the server fails.
        """
        config = await asyncio.to_thread(self._read_config)
        self._served = await read_served(self._client)
        longest = min(self._max_context, context_length(config))
        check_served(
            self._client.url,
            self._served,
            plain_config(config),
            dtype=self._dtype,
            max_context=longest,
        )
        await self._client.json("POST", "/resume")  # an earlier client may have died in a pause
        await self._client.json("POST", "/abort_requests", {})
        await self._start_worker()
        self._failure = None
        await self._load_first_weights()
        trial = GenerationRequest(
            request_id="trial", prompt_token_ids=[0], sampling=SamplingParams(max_tokens=1), seed=0
        )
        (await self._generate(trial)).raise_failure()
        self._num_prompt_tokens = self._num_finished_tokens = 0
        self._first_metrics = self._metrics = await self._client.metrics()

    def _read_config(self) -> Any:
        model = meta_model(self._path)
        self._shapes = model_tensors(model)
        self._stop_token_ids = end_of_sequence_ids(self._path)
        if self._replays:
            self._routing = routing_of(model)
        return model.config

    async def _start_worker(self) -> None:
        shapes = {name: list(tensor.shape) for name, tensor in self._shapes.items()}
        routing = None if self._routing is None else asdict(self._routing)
        answers = await self._client.rpc_objects("rlsys_server_start", shapes, routing)
        if routing is not None:
            check_recorded(answers)
            self._experts = WorkerExperts(self._read_experts)
        for answer in answers:
            if refusal := answer.get("refusal"):
                rule, fix = refusal
                raise InvalidValue("rollout.urls", self._client.url, rule=rule, fix=fix)

    async def _load_first_weights(self) -> None:
        """Load the weights of model.path, whatever the server had before."""

        def stage() -> Any:
            model = load_causal_lm(self._path, dtype=self._dtype)
            return stage_whole(0, model_tensors(model))

        staged, manifest = await asyncio.to_thread(stage)
        with contextlib.closing(staged):
            await self.prepare(manifest)
            await self.pause()
            try:
                await self.load()
            finally:
                await self.resume()

    @property
    def context(self) -> int:
        """See `GenerationEngine.context`."""
        assert self._served is not None, "used during start"
        return self._served.max_context

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `GenerationEngine.submit`."""
        self._check_alive()
        names = [request.request_id for request in requests]
        for request in requests:
            is_new = request.request_id not in self._tasks and names.count(request.request_id) == 1
            require(
                is_new,
                "request_id",
                request.request_id,
                rule="must differ from those of all requests that have not ended",
                fix="Give each request its own id.",
            )
            self._check_request(request)
        for request in requests:
            task = asyncio.create_task(self._generate(request), name=request.request_id)
            self._tasks[request.request_id] = task
            task.add_done_callback(self._end)

    def _check_request(self, request: GenerationRequest) -> None:
        name, limit = f"request {request.request_id!r}", self.context
        num_tokens = len(request.prompt_token_ids)
        require(
            1 <= num_tokens < limit,
            f"{name}: prompt_token_ids",
            rule=f"has {num_tokens} tokens, but the context of {limit} allows 1 to {limit - 1}",
            fix="Shorten the prompt (data.max_prompt_tokens), or give at least one token.",
        )
        require(
            request.sampling.max_tokens >= 1,
            f"{name}: max_tokens",
            request.sampling.max_tokens,
            rule="must be at least 1",
            fix="Use 1 or more.",
        )
        check_stop(request)
        require(
            not request.sampling.structure,
            f"{name}: structure",
            rule="servers of rollout.urls do not sample structures",
            fix='Use rollout.engine="vllm" or "torch" without urls.',
        )

    async def collect(self) -> list[Generation]:
        """See `GenerationEngine.collect`."""
        while not self._finished:
            self._check_alive()
            self._changed.clear()
            await self._changed.wait()
        finished, self._finished = self._finished, []
        return finished

    async def progress(self) -> list[Generation]:
        """Return nothing, after a call that does not return if the server hangs."""
        self._check_alive()
        try:
            await self._client.rpc("rlsys_ping")
            self._metrics = await self._client.metrics()
        except EngineError as error:
            self._fail(str(error))
            raise
        return []

    async def abort(self, request_ids: Collection[str]) -> None:
        """See `GenerationEngine.abort`."""
        self._check_alive()
        known = [self._ids[name] for name in request_ids if name in self._ids]
        if known:
            ids = [GENERATE_PREFIX + name for name in known]
            await self._client.json("POST", "/abort_requests", {"request_ids": ids})

    async def pause(self) -> None:
        """See `GenerationEngine.pause`."""
        self._check_alive()
        await self._client.json("POST", "/pause", mode="keep", clear_cache="false")

    async def resume(self) -> None:
        """See `GenerationEngine.resume`."""
        self._check_alive()
        await self._client.json("POST", "/resume")

    async def prepare(self, manifest: WeightManifest) -> None:
        """See `GenerationEngine.prepare`."""
        self._check_alive()
        weights = await asyncio.to_thread(open_verified, manifest, self._shapes)
        with contextlib.closing(weights):  # the workers keep it open
            plain = asdict(weights.local)
            has = {"is_here": bool}
            answers = await self._client.rpc_objects("rlsys_server_prepare", plain, False, has=has)
            if not all(answer["is_here"] for answer in answers):
                await self._send(weights)
                await self._client.rpc("rlsys_server_prepare", plain, True)
        while not await self._is_prepared():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        self._prepared = manifest.version

    async def _is_prepared(self) -> bool:
        has = {"is_prepared": bool}
        answers = await self._client.rpc_objects("rlsys_server_is_prepared", has=has)
        return all(answer["is_prepared"] for answer in answers)

    async def _send(self, weights: Weights) -> None:
        """Send all bytes of a version to a server on another node."""
        for share, content in weights.contents():
            for start in range(0, len(content), PIECE_BYTES):
                piece = base64.b64encode(content[start : start + PIECE_BYTES].tobytes()).decode()
                place = share.rank, len(content), start
                await self._client.rpc("rlsys_server_receive", *place, piece)

    async def load(self) -> None:
        """See `GenerationEngine.load`. The server must name the new version afterwards."""
        self._check_alive()
        await self._client.rpc("rlsys_load")
        version = str(self._prepared)
        await self._client.json("POST", "/update_weight_version", {"new_version": version})
        found = await self._client.field("GET", "/weight_info", "weight_version")
        if found != version:
            raise EngineError(f"{self._client.url} has version {found} instead of {version}")
        self._version = self._prepared
        self._num_loads += 1

    async def release(self) -> None:
        """Refuse: a server keeps its devices (placement=colocated is refused with urls)."""
        raise EngineError(f"{self._client.url} keeps its devices")

    def stats(self) -> EngineStats:
        """Return the server's own counters as of the last `progress`, without other clients."""
        found = self._metrics
        generated = found.get(GENERATED_TOKENS, 0) - self._first_metrics.get(GENERATED_TOKENS, 0)
        preempted = found.get(PREEMPTIONS, 0) - self._first_metrics.get(PREEMPTIONS, 0)
        num_running = min(int(found.get(RUNNING, 0)), len(self._tasks))
        return EngineStats(
            num_waiting=len(self._tasks) - num_running,
            num_running=num_running,
            num_generated_tokens=max(int(generated), self._num_finished_tokens),
            policy_version=self._version,
            num_prompt_tokens=self._num_prompt_tokens,
            kv_usage=found.get(KV_USAGE),
            num_preempted=max(int(preempted), 0),
        )

    async def close(self) -> None:
        """Abort all requests and leave the server running."""
        self._fail("the engine was closed")
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._client.close()

    async def _generate(self, request: GenerationRequest) -> Generation:
        name = f"{self._life}-{next(self._numbers)}"
        self._ids[request.request_id] = name
        try:
            body = self._body(request, name)
            choices = await self._client.field(
                "POST", "/inference/v1/generate", "choices", body=body, generates=True
            )
        finally:
            self._ids.pop(request.request_id, None)
        self._num_prompt_tokens += len(request.prompt_token_ids)
        made = served_generation(request.request_id, choices)
        if self._experts is not None:
            num_sampled = len(made.token_ids)
            num_rows = len(request.prompt_token_ids) + num_sampled - 1 if num_sampled else 0
            rows = await self._experts.of_ended(name, num_rows, None)
            made = replace(made, routed_experts=rows)
        return made.until_failure()

    def _body(self, request: GenerationRequest, name: str) -> dict[str, Any]:
        """Return the request in the form of /inference/v1/generate."""
        assert self._served is not None
        sampling = request.sampling
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": stop_ids(request, self._stop_token_ids),
            "ignore_eos": True,  # otherwise vLLM chooses the end tokens
            "include_stop_str_in_output": True,
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": False,  # stop strings may contain them
            "logprobs": 0,  # of the sampled token only
            "extra_args": {
                STREAM: [stream_key(request.seed), request.num_prior_tokens],
                REQUEST_ID: name,
            },
        }
        body: dict[str, Any] = {
            "request_id": name,
            "token_ids": [int(token) for token in request.prompt_token_ids],
            "sampling_params": params,
            "cache_salt": f"{self._life} {self._num_loads} {request.cache_salt}",
        }
        if self._served.has_priorities:
            body["priority"] = -request.priority  # vLLM prefers the lowest
        return body

    async def _read_experts(
        self, starts: Mapping[str, int], ended: Sequence[str]
    ) -> dict[str, ExpertArray]:
        assert self._routing is not None
        dtype = self._routing.dtype
        first, *_ = await self._client.rpc_objects(
            "rlsys_server_experts", dict(starts), list(ended)
        )
        try:
            return {
                name: np.frombuffer(base64.b64decode(one["rows"]), dtype).reshape(one["shape"])
                for name, one in first.items()
            }
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self._client.url} returned no rows of experts: {error!r}"
            ) from None

    def _end(self, task: asyncio.Task[Generation]) -> None:
        """Handle the end of a request's task: it has a generation, or the server has failed."""
        del self._tasks[task.get_name()]
        if task.cancelled():
            return
        if error := task.exception():
            self._fail(str(error))
            return
        self._num_finished_tokens += len(task.result().token_ids)
        self._finished.append(task.result())
        self._changed.set()

    def _fail(self, reason: str) -> None:
        """Record the first reason why the engine cannot continue, and wake up `collect`."""
        self._failure = self._failure or reason
        self._changed.set()

    def _check_alive(self) -> None:
        if self._failure:
            raise EngineError(f"{self._client.url} cannot continue: {self._failure}")


def served_generation(request_id: str, choices: Any) -> Generation:
    """Return the only choice of the server's answer as a Generation.

    `Generation.until_failure` has not been applied.

    Raises:
        EngineError: The choice is not what vLLM returns.
    """
    try:
        choice = choices[0]
        token_ids = [int(token) for token in choice["token_ids"] or ()]
        content = (choice["logprobs"] or {}).get("content") or []
        logprobs = np.array([one["logprob"] for one in content], np.float32)
        versions = [
            int(span["version"])
            for span in choice["weight_versions"] or ()
            for _ in range(span["start"], span["end"])
        ]
        reason = FINISH_REASONS.get(choice["finish_reason"], FinishReason.ABORTED)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"a server's answer to request {request_id} is not vLLM's: {error!r}"
        ) from None
    logprobs[logprobs == CLAMPED] = np.nan
    if not len(token_ids) == len(logprobs) == len(versions):
        raise EngineError(
            f"a server returned {len(token_ids)} tokens, {len(logprobs)} log-probabilities and "
            f"{len(versions)} versions for request {request_id}"
        )
    return Generation(
        request_id=request_id,
        token_ids=np.asarray(token_ids, np.int32),
        sampler_logprobs=logprobs,
        policy_versions=np.asarray(versions, np.int32),
        finish_reason=reason,
    )
