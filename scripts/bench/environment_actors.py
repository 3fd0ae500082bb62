"""Measure environment workers on Ray, with an engine that computes nothing.

    python scripts/bench/environment_actors.py             # all parts
    python scripts/bench/environment_actors.py --only kill

steps      steps/s of one worker with 2,000 concurrent episodes of a null environment and an engine
           that answers at once, and the CPU time of a step
blocking   seconds of 256 episodes of 3 turns whose environment blocks for 3 s before each turn
kill       a worker with 1,000 episodes is killed: seconds until all are played again, and the
           number of lost ones
hung       time of 64 episodes beside one that hangs, against 64 without

Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

import rlsys
from actors.cluster.calls import Worker, end_all
from actors.cluster.gauges import Gauges
from actors.environment.environment_actor import EnvironmentActor, as_episode
from actors.environment.episode_replica import EpisodeReplica
from actors.rollout.ray_replica import RayReplica
from actors.rollout.rollout_actor import RolloutActor
from actors.run.factories import EnvironmentFactory
from actors.store.store_shards import StoreShards
from rlsys.common import pickling
from rlsys.common.async_condition import AsyncCondition
from rlsys.controller.worker_protocols import FinishedRollout
from rlsys.engines.generation.generation_protocol import EngineStats
from rlsys.environments.environment import Environment
from rlsys.environments.workers.loop_watchdog import BLOCKED_S
from rlsys.launcher.tiny_models import build_tokenizer
from rlsys.runs.observe.trace import Tracer
from rlsys.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParams,
    Task,
    WeightManifest,
)

LIMIT_S = 120.0
CHARACTERS = "0123456789?<>"


CONFIG = rlsys.RunConfig(
    name="bench",
    model=rlsys.ModelConfig(path="none"),
    data=rlsys.DataConfig(max_prompt_tokens=64),
    sampling=rlsys.SamplingConfig(max_tokens=4096),
)


def reply_to(request: GenerationRequest) -> Generation:
    """Return the answer to a request."""
    return Generation(
        request_id=request.request_id,
        token_ids=np.array([8, 2], np.int32),
        sampler_logprobs=np.zeros(2, np.float32),
        policy_versions=np.zeros(2, np.int32),
        finish_reason=FinishReason.STOP,
    )


class NullEngine:
    """Engine that answers each request with `5<eos>` after `delay_s`."""

    context = 1 << 20

    def __init__(self, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._ended: list[Generation] = []
        self._has_ended = AsyncCondition()
        self._num_tokens = 0

    async def start(self) -> None:
        """Do nothing."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Schedule the answers."""
        if self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, self._answer, list(requests))
        else:
            self._answer(requests)

    def _answer(self, requests: Sequence[GenerationRequest]) -> None:
        self._num_tokens += 2 * len(requests)
        self._ended += map(reply_to, requests)
        self._has_ended.notify()

    async def collect(self) -> list[Generation]:
        """Return the answers that are due, at least one."""
        await self._has_ended.until(lambda: bool(self._ended))
        ended, self._ended = self._ended, []
        return ended

    async def progress(self) -> list[Generation]:
        """Return nothing."""
        return []

    async def abort(self, request_ids: Collection[str]) -> None:
        """Do nothing."""

    async def pause(self) -> None:
        """Do nothing."""

    async def prepare(self, manifest: WeightManifest) -> None:
        """Do nothing."""

    async def load(self) -> None:
        """Do nothing."""

    async def resume(self) -> None:
        """Do nothing."""

    async def release(self) -> None:
        """Do nothing."""

    def stats(self) -> EngineStats:
        """Return statistics without requests."""
        return EngineStats(
            num_waiting=0,
            num_running=0,
            num_generated_tokens=self._num_tokens,
            policy_version=0,
        )

    async def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class MakeEngine:
    """Factory of null engines."""

    delay_s: float

    def __call__(self) -> NullEngine:
        """Return an engine."""
        return NullEngine(self.delay_s)


@contextlib.asynccontextmanager
async def playing(
    environment: Environment,
    *,
    delay_s: float = 0.0,
    num_workers: int = 1,
    blocked_s: float = BLOCKED_S,
    on_death: Callable[[str], None] = print,
) -> AsyncIterator[EpisodeReplica]:
    """Yield a replica with a null engine and workers of an environment. Ray is running."""
    shards = StoreShards(
        capacity_bytes=256 << 20,
        timeout_s=LIMIT_S,
        heartbeat_timeout_s=LIMIT_S,
        on_lost=lambda shard: None,
    )
    await shards.ensure(ray.get_runtime_context().get_node_id())
    running = asyncio.create_task(shards.run())

    def start(name: str, actor: Any, *args: Any, **named: Any) -> Worker:
        handle = actor.options(num_cpus=0).remote(*args, shards.address, Tracer(name), **named)
        return Worker(name, handle, timeout_s=LIMIT_S, heartbeat_timeout_s=LIMIT_S)

    gauges = Gauges("bench", "rollout-0")
    engine = start("rollout-0", RolloutActor, MakeEngine(delay_s), None, gauges)
    sampling = RayReplica(engine, None, shards)
    make_host = EnvironmentFactory(
        config=CONFIG,
        environment=pickling.dumps(environment),
        tokenizer=build_tokenizer(CHARACTERS),
        max_context=4160,
    )

    def start_worker(name: str) -> Worker:
        handle = sampling.worker.handle
        return start(name, EnvironmentActor, name, make_host, handle, {}, blocked_s=blocked_s)

    replica = EpisodeReplica(
        sampling,
        start_worker,
        environment,
        shards,
        num_workers=num_workers,
        start_timeout_s=LIMIT_S,
        on_death=on_death,
    )
    try:
        await replica.start(LIMIT_S)
        yield replica
    finally:
        await end_all(replica.workers)
        await shards.close()
        running.cancel()


def requests(num: int, row: Callable[[int], dict[str, Any]]) -> list[GenerationRequest]:
    """Return requests for episodes."""
    return [
        GenerationRequest(
            request_id=f"{n}.0.0",
            prompt_token_ids=(),
            sampling=SamplingParams(max_tokens=4096),
            seed=n,
            task=Task(row=row(n), group_id=n, index=0, group_size=1),
        )
        for n in range(num)
    ]


async def all_of(replica: EpisodeReplica, num: int) -> list[FinishedRollout]:
    """Return all finished episodes."""
    finished: list[FinishedRollout] = []
    while len(finished) < num:
        finished += (await replica.collect()).finished
    return finished


@rlsys.environment(plain_text=True, max_turns=100_000)
async def null(chat: Any, task: Any) -> float:
    """Play one turn."""
    for _ in range(task["turns"]):
        await chat("5")
    return 1.0


@rlsys.environment(plain_text=True)
def blocks(chat: Any, task: Any) -> float:
    """Block before each of three turns."""
    for _ in range(3):
        time.sleep(task["seconds"])
        chat("5")
    return 1.0


@rlsys.environment(plain_text=True, timeout_s=3600)
async def open_ended(chat: Any, task: Any) -> float:
    """Play turns until a file exists, and add a byte to the episode's file for each turn."""
    while not is_there(task["stop"]):
        await chat("5")
        add_byte(task["counts"])
        await asyncio.sleep(0.2)
    return 1.0


def is_there(path: str) -> bool:
    """Return whether a file exists."""
    return Path(path).exists()


def add_byte(path: str) -> None:
    """Append a byte to a file."""
    with Path(path).open("ab") as file:
        file.write(b".")


@rlsys.environment(plain_text=True, timeout_s=3600, num_retries=0)
async def hangs(chat: Any, task: Any) -> float:
    """Play one turn, and never end in one of the episodes."""
    for _ in range(8):
        await chat("5")
        await asyncio.sleep(3600 if task["hangs"] else 0.05)
    return 1.0


async def steps(num: int = 2000, turns: int = 20) -> dict[str, float]:
    """Measure steps/s of one worker."""
    async with playing(null) as replica:
        await replica.submit(requests(64, lambda n: {"turns": 4}), {})
        await all_of(replica, 64)  # warm
        (player,) = replica.players
        worker = psutil.Process(player.pid)
        cpu_s = -sum(worker.cpu_times()[:2])
        start = time.perf_counter()
        await replica.submit(requests(num, lambda n: {"turns": turns}), {})
        finished = await all_of(replica, num)
        seconds = time.perf_counter() - start
        cpu_s += sum(worker.cpu_times()[:2])
    assert all(one.num_tokens == 3 * turns - 1 for one in finished)
    return {
        "live_episodes": num,
        "steps_per_s": num * turns / seconds,
        "step_cpu_us": 1e6 * cpu_s / (num * turns),  # CPU time of the worker, which has one core
    }


class AtOnce:
    """Sampler that returns `5<eos>` at once."""

    async def sample(self, request: GenerationRequest) -> Generation:
        """Return the reply."""
        return reply_to(request)


async def host_steps(num: int = 2000, turns: int = 20) -> dict[str, float]:
    """Measure steps/s of a worker's event loop, without Ray and without calls."""
    make_host = EnvironmentFactory(
        config=CONFIG,
        environment=pickling.dumps(null),
        tokenizer=build_tokenizer(CHARACTERS),
        max_context=4160,
    )
    host = make_host(AtOnce())
    await host.start()
    start = time.perf_counter()
    host.submit([as_episode(one) for one in requests(num, lambda n: {"turns": turns})])
    num_ended = 0
    while num_ended < num:
        num_ended += len(await host.collect())
    seconds = time.perf_counter() - start
    await host.close()
    return {"host_steps_per_s": num * turns / seconds}


async def blocking(num: int = 256) -> dict[str, float]:
    """Measure episodes that block."""
    async with playing(blocks) as replica:
        start = time.perf_counter()
        await replica.submit(requests(num, lambda n: {"seconds": 3.0}), {})
        finished = await all_of(replica, num)
        seconds = time.perf_counter() - start
    assert all(one.num_tokens for one in finished), [one.outcome for one in finished][:1]
    return {"blocking_s": seconds}


async def kill(directory: Path, num: int = 1000) -> dict[str, float]:
    """Measure the death of a worker."""
    stop, counts = directory / "stop", [directory / str(n) for n in range(num)]

    def sizes() -> list[int]:
        return [path.stat().st_size if path.exists() else 0 for path in counts]

    async def all_reach(wanted: Sequence[int], collecting: asyncio.Task[Any]) -> float:
        start = time.perf_counter()
        while not all(size >= least for size, least in zip(sizes(), wanted, strict=True)):
            # Another process writes, without a notification.
            await asyncio.wait([collecting], timeout=0.02)
            assert not collecting.done(), collecting.result()
        return time.perf_counter() - start

    async with playing(open_ended, delay_s=0.05) as replica:
        row = {"stop": str(stop)}
        await replica.submit(requests(num, lambda n: {**row, "counts": str(counts[n])}), {})
        collecting = asyncio.create_task(all_of(replica, num))
        await all_reach([3] * num, collecting)
        (player,) = replica.players
        standby = replica.standby
        assert standby is not None
        await standby.started()
        before = sizes()
        os.kill(player.pid, signal.SIGKILL)
        # Replayed turns come from the engine's memory and add the same bytes again.
        seconds = await all_reach([size + 1 for size in before], collecting)
        beyond = await all_reach([2 * size + 1 for size in before], collecting)
        stop.touch()
        finished = await collecting
    lost = num - sum(one.num_tokens > 0 for one in finished)
    return {"kill_back_s": seconds, "kill_beyond_s": seconds + beyond, "kill_lost": lost}


async def hung(num: int = 64, repeats: int = 5) -> dict[str, float]:
    """Measure the other episodes, with and without one that hangs, in turn."""
    ratios = []
    async with playing(hangs, delay_s=0.02) as replica:
        number = 0
        for _ in range(repeats):
            times = []
            for ill in (0, 1):
                batch = requests(num + ill, lambda n: {"hangs": n == num})
                number += 1
                batch = [replace(one, request_id=f"{one.request_id}{number}") for one in batch]
                start = time.perf_counter()
                await replica.submit(batch, {})
                await all_of(replica, num)
                times.append(time.perf_counter() - start)
            ratios.append(times[1] / times[0])
    return {"hung_ratio": statistics.median(ratios)}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=["steps", "blocking", "kill", "hung"])
    chosen = parser.parse_args().only
    print(json.dumps(measure(chosen)))


def measure(parts: Sequence[str]) -> dict[str, float]:
    """Return the results of the parts."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        ray.init(
            num_cpus=4,
            object_store_memory=100 << 20,
            include_dashboard=False,
            logging_level="ERROR",
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(["."])}},
        )
        try:
            found: dict[str, float] = {}
            if "steps" in parts:
                found |= asyncio.run(steps()) | asyncio.run(host_steps())
            if "blocking" in parts:
                found |= asyncio.run(blocking())
            if "kill" in parts:
                found |= asyncio.run(kill(directory))
            if "hung" in parts:
                found |= asyncio.run(hung())
            return found
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
