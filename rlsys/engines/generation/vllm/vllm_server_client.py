"""Client of a vLLM server outside of the run: HTTP calls.

    POST /collective_rpc     ─► methods of rlsys's worker
    POST /inference/v1/generate, /pause, /resume, /abort_requests, /update_weight_version
    GET /health, /metrics, /weight_info

vllm_server_checks.py compares what a server has with the run.

The server runs with VLLM_SERVER_DEV_MODE=1 and `--worker-cls` WORKER. Every host that reaches its
port can change its weights, so the port belongs into a private network. Neither vllm nor torch is
imported.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.engines.generation.generation_protocol import EngineError

FIELD = "rollout.urls"
WORKER = "rlsys.engines.generation.vllm.vllm_server_worker.ServerWorker"
SCHEDULER = "rlsys.engines.generation.vllm.vllm_scheduler.WindowedScheduler"
START = (
    "Start it as docs/rollouts.md describes (Existing vLLM servers): VLLM_SERVER_DEV_MODE=1 "
    "python -m vllm.entrypoints.openai.api_server --model MODEL --port PORT --dtype DTYPE "
    f"--enable-scale-out --worker-cls {WORKER} --logprobs-mode processed_logprobs"
)
API_KEY_VARIABLE = "VLLM_API_KEY"  # the variable of vLLM's own server

VERSION = "0.32"  # the worker replaces parts of vLLM, which change with each minor version

# Limit of calls that do not wait for generation. A server that loads weights may be slow.
CALL_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 10.0

RPC = "/collective_rpc"
NOTHING: Mapping[str, type] = {}

# Counters of /metrics that tell an engine's load.
RUNNING, GENERATED_TOKENS = "vllm:num_requests_running", "vllm:generation_tokens_total"
KV_USAGE, PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"


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
        max_bytes: int | None = None,
        **query: str,
    ) -> tuple[int, bytes]:
        """Return status and body of an answer; a limit of None waits for generation.

        A redirection is an answer. Bodies above `max_bytes` are cut off.
        """
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        data = None if body is None else dump_json(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        try:
            async with self._opened().request(
                method,
                self.url + path,
                data=data,
                params=query,
                headers=headers,
                timeout=limit,
                allow_redirects=False,
            ) as answer:
                if max_bytes is None:
                    return answer.status, await answer.read()
                return answer.status, await _first_bytes(answer.content, max_bytes)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = _reason(error, timeout_s)
            raise NoServer(f"{self.url} does not answer {path}: {reason}") from None

    async def json(
        self, method: str, path: str, body: Any = None, *, generates: bool = False, **query: str
    ) -> Any:
        """Return the parsed answer of a call that must succeed."""
        timeout_s = None if generates else CALL_TIMEOUT_S
        status, content = await self.call(
            method, path, body, timeout_s=timeout_s, max_bytes=None, **query
        )
        if status != 200:
            raise EngineError(f"{self.url}{path} answered {status}: {_excerpt(content)}")
        try:
            return parse_json(content)
        except ValueError:
            raise self._unexpected(path, content) from None

    async def field(self, method: str, path: str, name: str, **options: Any) -> Any:
        """Return a field of the JSON object that `json` returns.

        Raises:
            EngineError: The answer is no such object.
        """
        answer = await self.json(method, path, **options)
        if not isinstance(answer, dict) or name not in answer:
            raise self._unexpected(path, dump_json(answer).encode())
        return answer[name]

    def _unexpected(self, path: str, content: bytes) -> EngineError:
        return EngineError(f"{self.url}{path} has an unexpected answer: {_excerpt(content)}")

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of each of the server's workers with JSON texts as arguments."""
        body = {"method": method, "args": [dump_json(one) for one in args]}
        results = await self.field("POST", RPC, "results", body=body)
        if not isinstance(results, list) or not results:
            raise self._unexpected(f"{RPC} ({method})", dump_json(results).encode())
        return results

    async def rpc_objects(
        self, method: str, *args: Any, has: Mapping[str, type] = NOTHING
    ) -> list[dict[str, Any]]:
        """Return the answers of `rpc`, which must be objects that have fields of these types."""
        results = await self.rpc(method, *args)
        for one in results:
            fits = isinstance(one, dict) and all(type(one.get(k)) is v for k, v in has.items())
            if not fits:
                raise self._unexpected(f"{RPC} ({method})", dump_json(one).encode())
        return results

    async def metrics(self) -> dict[str, float]:
        """Return the server's counters by name, summed over their labels."""
        status, content = await self.call("GET", "/metrics")
        return parse_metrics(content.decode(errors="replace")) if status == 200 else {}

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

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            key = os.environ.get(API_KEY_VARIABLE)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            connector = aiohttp.TCPConnector(limit=0)  # one connection for each running request
            self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        return self._session


def until_healthy(urls: Sequence[str]) -> Callable[[int], Awaitable[None]]:
    """Return a function that waits until the server of a number can take requests."""

    async def wait(number: int) -> None:
        async with ServerClient(urls[number]) as client:
            await client.until_healthy()

    return wait


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


async def _first_bytes(stream: aiohttp.StreamReader, limit: int) -> bytes:
    found = bytearray()
    async for piece in stream.iter_any():
        found += piece
        if len(found) >= limit:
            break
    return bytes(found[:limit])


def _reason(error: Exception, timeout_s: float | None) -> str:
    """Return why a call has failed, in words that do not name aiohttp's parts."""
    match error:
        case aiohttp.ConnectionTimeoutError():
            return f"no connection within {CONNECT_TIMEOUT_S:g} s"
        case TimeoutError() if timeout_s is not None:
            return f"no answer within {timeout_s:g} s"
        case aiohttp.ClientConnectorDNSError():
            return "the name of the host is unknown"
        case aiohttp.ClientSSLError() | ssl.SSLError():
            return "the secure connection (https) fails"
        case aiohttp.ServerDisconnectedError():
            return "it closes the connection"
        case aiohttp.ClientPayloadError():
            return "it ends the connection within its answer"
        case aiohttp.ClientResponseError():
            return "its answer is not HTTP"
        case OSError(errno=int(number)) if number > 0:
            return os.strerror(number)
    return type(error).__name__
