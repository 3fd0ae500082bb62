"""Measure calls/s of the OpenAI-compatible endpoint with an engine that computes nothing.

    python scripts/bench/environment_endpoint.py

Agents call through OpenAI's client, turn by turn in one growing chat per episode. The server, with
the tokens of its episodes, runs in the event loop of this process. The agents run in two other
processes, because a client takes several times as long per call. Wall-clock and CPU seconds of both
sides are measured; a busy machine hardly changes the latter. Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import openai

import rlsys
from rlsys.environments.episode_host import EpisodeHost, EpisodeRequest
from rlsys.environments.token_budget import EpisodeLimits
from rlsys.environments.tokens.codec import Codec
from rlsys.environments.workers.sync_worker import SyncWorkerFunctions
from rlsys.launcher.tiny_models import build_tokenizer
from rlsys.types import FinishReason, Generation, GenerationRequest, SamplingParams

CLIENTS = 2  # processes
TURNS = 8
EPISODES = 256
AT_ONCE = 32
REPLY_TOKENS = 16
LIMIT_S = 120.0


class Null:
    """Sampler that returns the same reply at once."""

    async def sample(self, request: GenerationRequest) -> Generation:
        """Return the reply."""
        return Generation(
            request_id=request.request_id,
            token_ids=np.array([*range(3, 2 + REPLY_TOKENS), 2], np.int32),
            sampler_logprobs=np.full(REPLY_TOKENS, -0.5, np.float32),
            policy_versions=np.zeros(REPLY_TOKENS, np.int32),
            finish_reason=FinishReason.STOP,
        )


def measure() -> dict[str, float]:
    """Return calls/s of all processes together, and CPU milliseconds per call of each side."""
    return asyncio.run(_measured())


async def _measured() -> dict[str, float]:
    pipes = [_client() for _ in range(CLIENTS)]
    asked: asyncio.Queue[rlsys.Endpoint] = asyncio.Queue()
    ended: dict[str, asyncio.Event] = {}

    @rlsys.agent
    async def elsewhere(endpoint: Any, task: Any) -> float:
        done = ended[endpoint.key] = asyncio.Event()
        asked.put_nowait(endpoint)
        await done.wait()
        return 1.0

    codec = Codec(build_tokenizer("0123456789?<>+- abcdefghij"), chat_template="")
    host = EpisodeHost(
        elsewhere,
        codec,
        Null(),
        limits=EpisodeLimits(max_prompt_tokens=64, max_tokens=4096, max_context=4096),
        executor=SyncWorkerFunctions(elsewhere, memory_gib=4.0, start_timeout_s=60.0),
    )
    await host.start()
    async with asyncio.timeout(LIMIT_S):
        await _replies(pipes)  # the processes have imported the client
        await _round(host, asked, ended, pipes, 0)  # warms up
        seconds, server_s, client_s = await _round(host, asked, ended, pipes, 1)
        await host.close()
    for pipe in pipes:
        pipe.send(None)
    calls = EPISODES * TURNS
    return {
        "endpoint_calls_per_s": calls / seconds,
        "endpoint_server_cpu_ms": 1000 * server_s / calls,
        "endpoint_client_cpu_ms": 1000 * client_s / calls,
        "endpoint_server_calls_per_core_s": calls / server_s,
    }


def _client() -> Connection:
    """Start a process that calls the endpoint and ends after None, or with this process."""
    here, there = get_context("spawn").Pipe()
    get_context("spawn").Process(target=_ask_all, args=(there,), daemon=True).start()
    there.close()  # so that its end is noticed in this process
    return here


async def _replies(pipes: Sequence[Connection]) -> list[float]:
    return list(await asyncio.gather(*(asyncio.to_thread(pipe.recv) for pipe in pipes)))


async def _round(
    host: EpisodeHost,
    asked: asyncio.Queue[rlsys.Endpoint],
    ended: dict[str, asyncio.Event],
    pipes: Sequence[Connection],
    number: int,
) -> tuple[float, float, float]:
    """Return wall-clock seconds, and CPU seconds of the server and of the clients."""
    host.submit([_request(number, index) for index in range(EPISODES)])
    endpoints = [await asked.get() for _ in range(EPISODES)]
    start, cpu = time.monotonic(), time.process_time()
    for client, pipe in enumerate(pipes):
        pipe.send(endpoints[client :: len(pipes)])
    client_s = sum(await _replies(pipes))
    seconds, server_s = time.monotonic() - start, time.process_time() - cpu
    for endpoint in endpoints:
        ended[endpoint.key].set()
    played = 0
    while played < EPISODES:
        for one in await host.collect():
            assert one.played is not None, one.failure
            assert one.played.trajectory.num_branches == 1
            assert int((one.played.trajectory.policy_versions >= 0).sum()) == TURNS * REPLY_TOKENS
            played += 1
    return seconds, server_s, client_s


def _request(number: int, index: int) -> EpisodeRequest:
    return EpisodeRequest(
        request_id=f"{number}.{index}.0",
        task={},
        sampling=SamplingParams(max_tokens=4096),
        seed=index,
        group_id=index,
        index=0,
        group_size=1,
    )


def _ask_all(pipe: Connection) -> None:
    """Call for all agents of the process, some at a time, and send its CPU seconds."""
    pipe.send(0.0)
    while (endpoints := pipe.recv()) is not None:
        before = resource.getrusage(resource.RUSAGE_SELF)
        asyncio.run(_agents(endpoints))
        after = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


async def _agents(endpoints: list[rlsys.Endpoint]) -> None:
    async with openai.AsyncOpenAI(
        base_url=endpoints[0].url, api_key=endpoints[0].key, max_retries=0, timeout=LIMIT_S
    ) as policy:
        left = iter(endpoints)

        async def some() -> None:
            for endpoint in left:
                await _agent(policy, endpoint)

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))


async def _agent(policy: openai.AsyncOpenAI, endpoint: rlsys.Endpoint) -> None:
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    messages: list[Any] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{turn} + 1?"})
        answer = await policy.chat.completions.create(
            model=endpoint.model, messages=messages, max_tokens=REPLY_TOKENS, extra_headers=headers
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(json.dumps({key: round(value, 3) for key, value in measure().items()}))
