"""Measure the store alone, with the numbers of scripts/bench/peers/transferqueue.py.

    python scripts/bench/store.py            # put and get, through Ray actors and shared memory
    python scripts/bench/store.py --control  # only the control plane, in this process

A row has 4 fields of 1024 float32 (16 KiB). One actor produces, another one consumes, a shard owns
the memory, and the control plane runs here. Results are medians over repeats after a warm-up.

batch   512 rows in one block. put: until the control plane has the rows. get: from then on until
        the consumer has arrays of all rows.
stream  64 groups of 8 rows, with a put for each group. put: until the control plane has the last
        group. get: from the same start, including the puts, until the consumer has the last row.

For the `_read` numbers the consumer also reads every byte. Every run compares them with the
produced ones. Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from actors.store.store_actor import ShardAddress, StoreAddress, StoreClient
from actors.store.store_shards import StoreShards
from rlsys.common.async_condition import AsyncCondition
from rlsys.dataflow.store.blocks import BlockLayout, BlockRef
from rlsys.dataflow.store.selection import whole_groups
from rlsys.dataflow.store.stream_store import RowBatch, StageSpec, StreamStore, Subscription

NUM_ROWS, WIDTH, GROUP = 512, 1024, 8
FIELDS = ("f0", "f1", "f2", "f3")
ROW_BYTES = len(FIELDS) * WIDTH * 4
MEGABYTES = NUM_ROWS * ROW_BYTES / 1e6
CAPACITY_BYTES = 512 << 20  # cluster.store_gib's default
NUM_WARM_UPS, NUM_REPEATS = 2, 15
TIMEOUT_S = 60.0

CONTROL_TENSORS = ("prompt_token_ids", "token_ids", "sampler_logprobs", "policy_versions")
NUM_CONTROL_GROUPS = 12_800
NUM_LIVE_GROUPS = 125_000


class Producer:
    """Actor that puts rows and reports them on request, like a rollout actor without an engine."""

    def __init__(self, address: StoreAddress) -> None:
        self._store = StoreClient(address)
        rng = np.random.default_rng(0)
        self._rows = {f: list(rng.standard_normal((NUM_ROWS, WIDTH), np.float32)) for f in FIELDS}
        self._announced: list[BlockRef] = []
        self._put = AsyncCondition()

    async def checksums(self) -> dict[str, int]:
        """Return the checksums of all rows."""
        return checksums(self._rows)

    async def produce(self, num_rows: int) -> None:
        """Put all rows once, `num_rows` in each put."""
        for start in range(0, NUM_ROWS, num_rows):
            block = await self._store.put_async(
                {field: rows[start : start + num_rows] for field, rows in self._rows.items()}
            )
            self._announced.append(block)
            self._put.notify()
            await asyncio.sleep(0)  # `collect` may return between puts

    async def collect(self) -> list[BlockRef]:
        """Wait for and return the blocks put since the last answer, at least one."""
        await self._put.until(lambda: bool(self._announced))
        blocks, self._announced = self._announced, []
        return blocks


class Consumer:
    """Actor that gets rows."""

    def __init__(self, address: StoreAddress) -> None:
        self._store = StoreClient(address)

    def consume(self, batch: RowBatch, read: bool) -> dict[str, int]:
        """Get the rows, and optionally read all of their bytes."""
        columns = self._store.get_batch(batch.cells)
        return checksums(columns) if read else {}


def checksums(columns: dict[str, list[npt.NDArray[Any]]]) -> dict[str, int]:
    """Return a checksum of each column, which does not depend on the batches."""
    return {
        name: int(np.concatenate(arrays).view(np.uint64).sum()) for name, arrays in columns.items()
    }


class Controller:
    """The control plane between one producer and one consumer."""

    def __init__(self, store: StreamStore, producer: Any, consumer: Any) -> None:
        self._store = store
        self._rows = store.subscribe("consume", at_most=NUM_ROWS, selection=whole_groups())
        self._producer = producer
        self._consumer = consumer
        self._num_groups = 0
        self._got = dict.fromkeys(FIELDS, 0)  # checksums of the consumer's bytes

    async def batch(self, read: bool) -> tuple[float, float]:
        """Return the seconds for put and for get."""
        start = time.perf_counter()
        produced = self._producer.produce.remote(NUM_ROWS)
        await self._collect()
        registered = time.perf_counter()
        end = await self._consume(await self._rows.take(timeout_s=TIMEOUT_S), read)
        await produced
        return registered - start, end - registered

    async def stream(self, read: bool) -> tuple[float, float]:
        """Return the seconds for put, and until the consumer has everything."""
        start = time.perf_counter()
        produced = self._producer.produce.remote(GROUP)
        collecting = asyncio.create_task(self._collect())
        consuming: list[asyncio.Task[float]] = []
        num_taken = 0
        while num_taken < NUM_ROWS:
            batch = await self._rows.take(timeout_s=TIMEOUT_S)
            num_taken += len(batch)
            consuming.append(asyncio.create_task(self._consume(batch, read)))
        end = max(await asyncio.gather(*consuming))
        await produced
        return await collecting - start, end - start

    async def _collect(self) -> float:
        """Return when all rows are registered."""
        num_rows = 0
        while num_rows < NUM_ROWS:
            for block in await asyncio.wait_for(self._producer.collect.remote(), TIMEOUT_S):
                rows: list[int] = []
                while len(rows) < block.layout.num_rows:
                    rows += self._store.add_group(self._num_groups, node="node")
                    self._num_groups += 1
                self._store.write(
                    "produce",
                    rows,
                    block=block,
                    versions=[(0, 0)] * len(rows),
                    num_tokens=[WIDTH] * len(rows),
                )
                num_rows += len(rows)
        return time.perf_counter()

    async def _consume(self, batch: RowBatch, read: bool) -> float:
        """Return when the consumer has the rows."""
        answer = self._consumer.consume.remote(batch, read)
        checksums = await asyncio.wait_for(answer, TIMEOUT_S)
        end = time.perf_counter()
        for name, checksum in checksums.items():
            self._got[name] = (self._got[name] + checksum) % 2**64
        self._store.release("consume", batch.rows)
        return end

    def take_checksums(self) -> dict[str, int]:
        """Return the consumer's checksums and clear them."""
        got, self._got = self._got, dict.fromkeys(FIELDS, 0)
        return got


async def measure() -> dict[str, Any]:
    """Return the results."""
    shards = StoreShards(
        capacity_bytes=CAPACITY_BYTES, timeout_s=TIMEOUT_S, heartbeat_timeout_s=30, on_lost=_fail
    )
    await shards.add(ray.get_runtime_context().get_node_id())
    keeping = asyncio.create_task(shards.run())
    store = StreamStore(
        tensors=FIELDS,
        scalars=(),
        stages=[
            StageSpec(name="produce", writes=FIELDS),
            StageSpec(name="consume", reads=FIELDS),
        ],
        group_size=GROUP,
        max_bytes=CAPACITY_BYTES // 2,
        max_row_bytes=ROW_BYTES,
        on_free=shards.free,
    )
    store.add_node("node")
    producer = ray.remote(Producer).options(num_cpus=0).remote(shards.address)
    consumer = ray.remote(Consumer).options(num_cpus=0).remote(shards.address)
    expected = await producer.checksums.remote()
    controller = Controller(store, producer, consumer)
    batch = await _repeat(controller.batch, False)
    stream = await _repeat(controller.stream, False)
    batch_read = await _repeat(controller.batch, True)
    controller.take_checksums()
    await controller.stream(True)
    if (got := controller.take_checksums()) != expected:
        raise RuntimeError(f"the consumer read wrong bytes: checksums {got} instead of {expected}")
    stream_read = await _repeat(controller.stream, True)
    await shards.close()
    keeping.cancel()
    return {
        "batch_put_mb_per_s": round(MEGABYTES / batch[0], 1),
        "batch_get_mb_per_s": round(MEGABYTES / batch[1], 1),
        "stream_put_rows_per_s": round(NUM_ROWS / stream[0], 1),
        "stream_get_rows_per_s": round(NUM_ROWS / stream[1], 1),
        "batch_get_read_mb_per_s": round(MEGABYTES / batch_read[1], 1),
        "stream_get_read_rows_per_s": round(NUM_ROWS / stream_read[1], 1),
    }


async def _repeat(
    trial: Callable[[bool], Awaitable[tuple[float, float]]], read: bool
) -> tuple[float, float]:
    times = [await trial(read) for _ in range(NUM_WARM_UPS + NUM_REPEATS)][NUM_WARM_UPS:]
    return statistics.median(t for t, _ in times), statistics.median(t for _, t in times)


def _fail(shard: ShardAddress) -> None:
    raise RuntimeError(f"shard {shard.name} died during the measurement")


def measure_control() -> dict[str, Any]:
    """Measure events/s of a steady stream, and the memory of a million live rows.

    Each of these is one event per row: create, write (a stage's columns), take, release. Rows pass
    generate, score, advantage (whole groups) and train: 10 events.
    """
    store = StreamStore(
        tensors=CONTROL_TENSORS,
        scalars=("reward", "advantage"),
        stages=[
            StageSpec(name="generate", writes=CONTROL_TENSORS),
            StageSpec(name="score", reads=CONTROL_TENSORS[:2], writes=("reward",)),
            StageSpec(name="advantage", reads=("reward",), writes=("advantage",)),
            StageSpec(name="train", reads=(*CONTROL_TENSORS, "advantage")),
        ],
        group_size=GROUP,
        max_bytes=1 << 50,
        max_row_bytes=1 << 20,
        on_free=lambda freed: None,
    )
    store.add_node("node")
    score = store.subscribe("score", at_most=64)
    advantage = store.subscribe("advantage", at_most=64, selection=whole_groups())
    train = store.subscribe("train", at_most=64)

    def generate(group_id: int, block: BlockRef) -> None:
        rows = store.add_group(group_id, node="node")
        store.write(
            "generate",
            rows,
            block=block,
            versions=[(group_id, group_id + 1)] * GROUP,
            num_tokens=[500 + group_id % 1000 + i for i in range(GROUP)],
        )

    def label(stage: Subscription, column: str) -> None:
        while batch := stage.take_now():
            store.write(stage.stage, batch.rows, scalars={column: [0.5] * len(batch)})
            store.release(stage.stage, batch.rows)

    def consume() -> None:
        while batch := train.take_now():
            store.release("train", batch.rows)

    blocks = [_control_block(group) for group in range(NUM_CONTROL_GROUPS)]
    start = time.perf_counter()
    for group, block in enumerate(blocks):
        generate(group, block)
        if group % 8 == 7:
            label(score, "reward")
            label(advantage, "advantage")
            consume()
    seconds = time.perf_counter() - start
    before = _resident_bytes()
    for group in range(NUM_CONTROL_GROUPS, NUM_CONTROL_GROUPS + NUM_LIVE_GROUPS):
        generate(group, _control_block(group))
        if group % 8 == 7:
            label(score, "reward")
            label(advantage, "advantage")
    assert store.num_rows == NUM_LIVE_GROUPS * GROUP
    return {
        "row_events_per_s": round(NUM_CONTROL_GROUPS * GROUP * 10 / seconds),
        "live_rows": store.num_rows,
        "live_rows_gib": round((_resident_bytes() - before) / 2**30, 3),
    }


def _control_block(group: int) -> BlockRef:
    lengths = np.arange(len(CONTROL_TENSORS) * GROUP, dtype=np.int32) + group % 1000
    layout = BlockLayout(CONTROL_TENSORS, ("int32", "int32", "float32", "int32"), lengths.tobytes())
    return BlockRef("shard", group // 100, group * 4096, layout)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--control", action="store_true", help="measure the control plane alone")
    if parser.parse_args().control:
        print(json.dumps({"peer": "rlsys", **measure_control()}))
        return
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=128 << 20,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}},
    )
    try:
        print(json.dumps({"peer": "rlsys", **asyncio.run(measure())}))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
