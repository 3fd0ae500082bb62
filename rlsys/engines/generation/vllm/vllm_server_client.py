"""Client of a vLLM server outside of the run: HTTP calls and checks of what it serves.

    GET /version, /v1/models ─► is it a vLLM of this version, with access?
    POST /collective_rpc     ─► does it run rlsys's worker, and which model?
    POST /inference/v1/generate, /pause, /resume, /abort_requests, /update_weight_version

The server runs with VLLM_SERVER_DEV_MODE=1 and `--worker-cls` WORKER. Every host that reaches its
port can change its weights, so the port belongs into a private network. Neither vllm nor torch is
imported.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.errors import InvalidValue, require

FIELD = "rollout.urls"
WORKER = "rlsys.engines.generation.vllm.vllm_server_worker.ServerWorker"
SCHEDULER = "rlsys.engines.generation.vllm.vllm_scheduler.WindowedScheduler"
START = (
    "Start it with VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server "
    f"--enable-scale-out --worker-cls {WORKER} --logprobs-mode processed_logprobs"
)
API_KEY_VARIABLE = "VLLM_API_KEY"  # the variable of vLLM's own server

VERSION = "0.32"  # the worker replaces parts of vLLM, which change with each minor version

# Limit of calls that do not wait for generation. A server that loads weights may be slow.
CALL_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 10.0

# Counters of /metrics that tell an engine's load.
RUNNING, GENERATED_TOKENS = "vllm:num_requests_running", "vllm:generation_tokens_total"
KV_USAGE, PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Facts about a server that must fit the run.

    Attributes:
        sizes: Sizes of the model by name, as `model_sizes` returns them.
        max_context: Longest prompt and completion together, in tokens.
        has_priorities: Whether the server orders waiting requests by priority.
    """

    sizes: Mapping[str, Any]
    max_context: int
    has_priorities: bool


def model_sizes(config: Any) -> dict[str, Any]:
    """Return what two models must have in common, from a Hugging Face configuration."""
    text = config.get_text_config()
    names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    return {name: getattr(text, name, None) for name in names}


class NoServer(EngineError):
    """A server that does not answer, or ends a connection."""


class ServerClient:
    """The connection to one server.

    Its calls raise NoServer if the server does not answer, and EngineError for an error status.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float | None = CALL_TIMEOUT_S,
        **query: str,
    ) -> tuple[int, bytes]:
        """Return status and body of an answer; a limit of None waits for generation."""
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        data = None if body is None else dump_json(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        try:
            async with self._opened().request(
                method, self.url + path, data=data, params=query, headers=headers, timeout=limit
            ) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise NoServer(f"{self.url} does not answer {path}: {reason}.") from None

    async def json(
        self, method: str, path: str, body: Any = None, *, generates: bool = False, **query: str
    ) -> Any:
        """Return the parsed answer of a call that must succeed."""
        timeout_s = None if generates else CALL_TIMEOUT_S
        status, content = await self.call(method, path, body, timeout_s=timeout_s, **query)
        if status != 200:
            raise EngineError(f"{self.url}{path} answered {status}: {_excerpt(content)}")
        return parse_json(content)

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of each of the server's workers with JSON texts as arguments."""
        body = {"method": method, "args": [dump_json(one) for one in args]}
        answer = await self.json("POST", "/collective_rpc", body)
        results: list[Any] = answer["results"]
        return results

    async def metrics(self) -> dict[str, float]:
        """Return the server's counters by name, summed over their labels."""
        status, content = await self.call("GET", "/metrics")
        return parse_metrics(content.decode()) if status == 200 else {}

    async def is_healthy(self) -> bool:
        """Return whether the server can take requests."""
        try:
            status, _ = await self.call("GET", "/health", timeout_s=CONNECT_TIMEOUT_S)
        except EngineError:
            return False
        return status == 200

    async def until_healthy(self, *, poll_s: float = 1.0) -> None:
        """Wait without a limit until the server can take requests."""
        while not await self.is_healthy():  # noqa: ASYNC110
            await asyncio.sleep(poll_s)

    async def served(self) -> ServedModel:
        """Return what the server serves.

        Raises:
            InvalidValue: It is no vLLM, of another version, refuses the key, or lacks the worker.
            NoServer: It does not answer.
        """
        await self._check_version()
        status, _ = await self.call("GET", "/v1/models")
        require(
            status != 401,
            FIELD,
            self.url,
            rule=f"the server refuses the key in the environment variable {API_KEY_VARIABLE}",
            fix="Set the variable to the server's --api-key.",
        )
        await self._check_generates()
        return await self._hello()

    async def _check_generates(self) -> None:
        """Check with a request that has nothing, which no server answers with a completion."""
        status, _ = await self.call("POST", "/inference/v1/generate", {})
        require(
            status not in (403, 404),
            FIELD,
            self.url,
            rule=f"the server does not take token ids (status {status} of /inference/v1/generate)",
            fix="Start it with --enable-scale-out.",
        )

    async def _check_version(self) -> None:
        status, content = await self.call("GET", "/version")
        try:
            found = str(parse_json(content)["version"]) if status == 200 else ""
        except (ValueError, KeyError, TypeError):
            found = ""
        require(
            bool(found),
            FIELD,
            self.url,
            rule=f"the server there is no vLLM (status {status} of /version)",
            fix=START + ".",
        )
        require(
            found.split(".")[:2] == VERSION.split("."),
            FIELD,
            self.url,
            rule=f"the server runs vLLM {found}, and rlsys's worker is for {VERSION}",
            fix=f"Install vllm=={VERSION}.* there.",
        )

    async def _hello(self) -> ServedModel:
        body = {"method": "rlsys_server_hello", "args": []}
        status, content = await self.call("POST", "/collective_rpc", body)
        require(
            status == 200,
            FIELD,
            self.url,
            rule="the server does not run rlsys's worker"
            if status != 404
            else "the server does not accept weights (VLLM_SERVER_DEV_MODE)",
            fix=START + ".",
        )
        hello = parse_json(content)["results"][0]
        require(
            hello["logprobs_mode"] == "processed_logprobs",
            FIELD,
            self.url,
            rule=f"the server returns {hello['logprobs_mode']}, and the trainer needs "
            "log-probabilities at the temperature",
            fix="Start it with --logprobs-mode processed_logprobs.",
        )
        return ServedModel(
            sizes=hello["sizes"],
            max_context=hello["max_context"],
            has_priorities=hello["has_priorities"],
        )

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            key = os.environ.get(API_KEY_VARIABLE)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            connector = aiohttp.TCPConnector(limit=0)  # one connection for each running request
            self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        return self._session


def check_served(url: str, served: ServedModel, sizes: Mapping[str, Any], max_context: int) -> None:
    """Raise InvalidValue unless a server has the model of these sizes and enough context."""
    differing = {
        name: (served.sizes.get(name), wanted)
        for name, wanted in sizes.items()
        if served.sizes.get(name) != wanted
    }
    require(
        not differing,
        FIELD,
        url,
        rule="the server has another model than model.path: "
        + ", ".join(f"{name} {found} instead of {own}" for name, (found, own) in differing.items()),
        fix="Start it with the model of the run.",
    )
    require(
        served.max_context >= max_context,
        FIELD,
        url,
        rule=f"the server's context has {served.max_context} tokens, and the run needs "
        f"{max_context}",
        fix=f"Start it with --max-model-len {max_context} or more, or shorten "
        "data.max_prompt_tokens or sampling.max_tokens.",
    )


def until_healthy(urls: Sequence[str]) -> Callable[[int], Awaitable[None]]:
    """Return a function that waits until the server of a number can take requests."""

    async def wait(number: int) -> None:
        async with ServerClient(urls[number]) as client:
            await client.until_healthy()

    return wait


async def check_server(url: str, config: Any, max_context: int) -> None:
    """Check that a server can be a replica of a model with this Hugging Face configuration.

    Raises:
        InvalidValue: It does not answer or does not fit.
    """
    async with ServerClient(url) as client:
        try:
            served = await client.served()
        except EngineError as error:
            raise InvalidValue(FIELD, url, rule=str(error), fix=START + ".") from None
    check_served(url, served, model_sizes(config), max_context)


def parse_metrics(text: str) -> dict[str, float]:
    """Return the values of a Prometheus page by name, summed over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        labelled, _, value = line.rpartition(" ")
        name = labelled.partition("{")[0]
        try:
            found[name] = found.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return found


def _excerpt(content: bytes) -> str:
    return content[:300].decode(errors="replace")
