"""An HTTP server with the calls of vLLM's that rollout.urls needs, around the real worker calls.

Its completions count upwards from the number of prompt tokens. The weights are those that
ServerCalls opens, so that sending and verifying them are the real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlsys.common.async_condition import AsyncCondition
from rlsys.common.safe_json import dump_json
from rlsys.engines.generation.vllm.vllm_requests import REQUEST_ID
from rlsys.engines.generation.vllm.vllm_server_calls import ServerCalls
from rlsys.reallocation.transport.weight_views import Weights
from rlsys.types import ExpertArray, WeightManifest

KEY = "secret"


class FakeWorker(ServerCalls):
    """A worker whose model is the tensors of the last version."""

    def __init__(self, config: Any, *, max_context: int, is_remote: bool) -> None:
        self.model_config: Any = SimpleNamespace(
            logprobs_mode="processed_logprobs",
            hf_config=config,
            dtype=torch.float32,
            max_model_len=max_context,
        )
        self.scheduler_config: Any = SimpleNamespace(policy="fcfs")
        self.is_remote = is_remote
        self.num_starts = 0
        self.shapes: Mapping[str, list[int]] = {}
        self.prepared: dict[str, torch.Tensor] = {}
        self.loaded: dict[str, torch.Tensor] = {}
        self.rows: dict[str, ExpertArray] = {}

    def rlsys_start(self, shapes: Mapping[str, list[int]]) -> tuple[str, str] | None:
        self.shapes = shapes
        self.num_starts += 1
        return None

    def rlsys_ping(self) -> None:
        return None

    def record_experts(self, routing: Any) -> dict[str, Any]:
        return {"layers": list(range(routing.num_layers))}

    def forget_experts(self) -> None:
        self.rows = {}

    def rows_of_experts(
        self, starts: Mapping[str, int], ended: Sequence[str]
    ) -> dict[str, ExpertArray]:
        return {name: self.rows[name][start:] for name, start in starts.items()}

    def begin_update(self, manifest: WeightManifest) -> None:
        paths = [share.path for share in manifest.shares]
        mine = [memory.path for memory, _ in (self._received or {}).values()]
        if self.is_remote and not set(paths) <= set(mine):
            raise FileNotFoundError(paths[0])  # as on another node
        with Weights(manifest) as weights:
            self.prepared = {name: part.clone() for name, _, part in weights.parts()}

    def rlsys_is_prepared(self) -> bool:
        return bool(self.prepared)

    def rlsys_load(self) -> None:
        self.loaded, self.prepared = self.prepared, {}


class ServedModel:
    """The server and its state."""

    def __init__(self, config: Any, *, max_context: int = 512, is_remote: bool = False) -> None:
        self.worker = FakeWorker(config, max_context=max_context, is_remote=is_remote)
        self.version = "unknown"
        self.reported_version = "0.32.0"
        self.answers: dict[str, Any] = {}  # by path or method of the worker, instead of the real
        self.has_dev_mode = self.has_worker = self.takes_token_ids = True
        self.key = ""
        self.max_tokens_at_once = 1 << 30  # a request stops there until `go_on` or an abort
        self.go_on = asyncio.Event()
        self.aborted: set[str] = set()
        self.is_paused = True  # as an earlier client may have left it
        self.bodies: list[dict[str, Any]] = []
        self.arrived = AsyncCondition()
        self.num_received = 0

    async def until_requests(self, num: int) -> None:
        """Wait until so many requests have arrived, with that of the engine's start."""
        await self.arrived.until(lambda: len(self.bodies) >= num)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._check], client_max_size=1 << 30)
        app.add_routes(
            [
                web.get("/health", self._ok),
                web.get("/version", self._version),
                web.get("/v1/models", self._ok),
                web.get("/metrics", self._metrics),
                web.get("/weight_info", self._weight_info),
                web.post("/collective_rpc", self._rpc),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.post("/abort_requests", self._abort),
                web.post("/update_weight_version", self.update_version),
                web.post("/inference/v1/generate", self._generate),
                web.post("/inference/v1/abort_requests", self._abort_tokens),
            ]
        )
        return app

    @web.middleware
    async def _check(self, request: web.Request, handler: Any) -> web.StreamResponse:
        guarded = request.path.startswith(("/v1", "/inference"))
        if guarded and self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        if request.path == "/collective_rpc" and not self.has_dev_mode:
            return web.Response(status=404)
        if request.path in self.answers:
            return answer_of(self.answers[request.path])
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _ok(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _version(self, _: web.Request) -> web.Response:
        if not self.reported_version:
            return web.Response(text="<html>")
        return web.json_response({"version": self.reported_version})

    async def _metrics(self, _: web.Request) -> web.Response:
        page = (
            "# HELP vllm:kv_cache_usage_perc share\n"
            'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
            'vllm:num_requests_running{engine="0"} 1.0\n'
            'vllm:generation_tokens_total{engine="0"} 40.0\n'
            'vllm:generation_tokens_total{engine="1"} 2.0\n'
        )
        return web.Response(text=page)

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.has_worker:
            return web.Response(status=500)
        self.num_received += body["method"] == "rlsys_server_receive"
        if body["method"] in self.answers:
            return answer_of(self.answers[body["method"]])
        result = getattr(self.worker, body["method"])(*body["args"])
        return web.json_response({"results": [result]}, dumps=dump_json)

    async def _pause(self, request: web.Request) -> web.Response:
        assert dict(request.query) == {"mode": "keep", "clear_cache": "false"}
        self.is_paused = True
        return web.json_response({})

    async def _resume(self, _: web.Request) -> web.Response:
        self.is_paused = False
        return web.json_response({})

    async def _abort(self, request: web.Request) -> web.Response:
        if request_ids := (await request.json()).get("request_ids"):
            self.aborted |= set(request_ids)
            self.go_on.set()
        else:
            self.aborted.add("all")
        return web.json_response({})

    async def update_version(self, request: web.Request) -> web.Response:
        assert self.is_paused
        self.version = (await request.json())["new_version"]
        return web.json_response({})

    async def _abort_tokens(self, request: web.Request) -> web.Response:
        assert await request.json() == {"request_ids": []}  # a check changes nothing
        return web.Response(status=200 if self.takes_token_ids else 404)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.arrived.notify()
        params, num_prompt = body["sampling_params"], len(body["token_ids"])
        wanted = params["max_tokens"]
        first, before = min(wanted, self.max_tokens_at_once), self.version
        spans = [{"version": before, "start": 0, "end": first}]
        reason = "length"
        if first < wanted:
            await self.go_on.wait()
            if f"generate-tokens-{body['request_id']}" in self.aborted:
                reason, wanted = "abort", first
            else:
                spans.append({"version": self.version, "start": first, "end": wanted})
        tokens = list(range(num_prompt, num_prompt + wanted))
        rows = np.arange(num_prompt + wanted - 1, dtype=np.uint8)[:, None].repeat(4, 1)
        self.worker.rows[params["extra_args"][REQUEST_ID]] = rows
        content = [{"token_id": token, "logprob": -0.5} for token in tokens]
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": content},
            "weight_versions": spans,
            "finish_reason": reason,
        }
        return web.json_response({"choices": [choice]})


def answer_of(answer: Any) -> web.Response:
    """Return an answer: a status, text, or a value as JSON."""
    if isinstance(answer, int):
        return web.Response(status=answer, text="no")
    if isinstance(answer, str):
        return web.Response(text=answer)
    return web.json_response(answer, dumps=dump_json)


@asynccontextmanager
async def serving(model: ServedModel) -> AsyncIterator[str]:
    """Serve a model and yield its address."""
    async with TestServer(model.app()) as server:
        yield str(server.make_url("")).rstrip("/")
