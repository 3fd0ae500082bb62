"""Shards and clients on two Ray nodes of this machine: local and remote reads, waits, deaths."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.store import inflight_checkpoint
from actors.store.store_actor import ShardAddress, ShardLost, StoreAddress, StoreClient, put_on_node
from actors.store.store_shards import StoreShards
from rlsys.controller.worker_protocols import FinishedRollout, StepPart
from rlsys.dataflow.store.arena import PAGE_BYTES
from rlsys.dataflow.store.blocks import Array, BlockRef, ColumnRef
from rlsys.dataflow.store.rollout_archive import SavedRollout, read_rollouts, write_rollouts
from rlsys.dataflow.store.stream_store import StageSpec, StreamStore
from rlsys.runs.checkpoint import ROLLOUTS_FILE
from tests.clusters import NODE_OPTIONS, cluster_of_one
from tests.errors import invalid

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 300.0
CAPACITY_BYTES = 16 * PAGE_BYTES


class Writer:
    """Another process that uses the store."""

    def __init__(self, address: StoreAddress) -> None:
        self._store = StoreClient(address)

    def put(self, numbers: list[int], num_tokens: int) -> BlockRef:
        return self._store.put(rows(numbers, num_tokens))

    def get(self, cells: list[ColumnRef]) -> list[list[int]]:
        return [ids.tolist() for ids in self._store.get(cells, ["ids"])["ids"]]

    def close(self) -> None:
        self._store.close()


def rows(numbers: list[int], num_tokens: int) -> dict[str, list[Array]]:
    """Return rows that repeat their number; the flags are as many as the place in the block."""
    return {
        "ids": [np.full(num_tokens, number, np.int32) for number in numbers],
        "flags": [np.full(place, True) for place in range(len(numbers))],
    }


async def read(client: StoreClient, cells: list[ColumnRef]) -> list[list[int]]:
    columns = await client.get_batch_async({"ids": cells, "flags": cells})
    assert [len(flags) for flags in columns["flags"]] == [place for _, place in cells]
    return [ids.tolist() for ids in columns["ids"]]


def is_mapped(array: Array) -> bool:
    """Return whether the bytes are in an arena that this process maps."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= address < end:
            return "/memfd:rlsys-" in line
    return False


@dataclass
class Nodes:
    cluster: Any
    here: str
    there: str
    there_node: Any


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with cluster_of_one(num_cpus=2) as cluster:
        try:
            ray.init(
                address=cluster.address,
                logging_level="ERROR",
                log_to_driver=False,
                runtime_env={"env_vars": {"PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}"}},
            )
            second = cluster.add_node(num_cpus=2, **NODE_OPTIONS)
            yield Nodes(cluster, cluster.head_node.node_id, second.node_id, second)
        finally:
            ray.shutdown()


@asynccontextmanager
async def running_shards(
    node_ids: Sequence[str],
    on_lost: Callable[[ShardAddress], None],
    *,
    timeout_s: float = TIMEOUT_S,
) -> AsyncIterator[StoreShards]:
    shards = StoreShards(
        capacity_bytes=CAPACITY_BYTES, timeout_s=timeout_s, heartbeat_timeout_s=30, on_lost=on_lost
    )
    running = asyncio.create_task(shards.run())
    try:
        for node_id in node_ids:
            await shards.add(node_id)
        yield shards
    finally:
        await shards.close()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


def start_writer(address: StoreAddress, node_id: str) -> Any:
    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(Writer).options(num_cpus=0, scheduling_strategy=place).remote(address)


async def answer(call: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(call, TIMEOUT_S)


def fail(shard: ShardAddress) -> None:
    raise AssertionError(f"{shard.name} died")


@pytest.mark.slow
def test_local_reads_copy_nothing_and_remote_reads_are_one_transfer(nodes: Nodes) -> None:
    async def run() -> None:
        async with running_shards([nodes.here, nodes.there], fail) as shards:
            local = StoreClient(shards.address)  # in this process, on the first node
            remote = start_writer(shards.address, nodes.there)
            mine = await local.put_async(rows([1, 2, 3], 5))
            others = await answer(remote.put.remote([7, 8], 2))
            assert (mine.shard, others.shard) == tuple(s.name for s in shards.address.shards)
            mixed = [(others, 1), (mine, 1), (others, 0), (mine, 1)]
            expected = [[8] * 2, [2] * 5, [7] * 2, [2] * 5]
            assert await answer(remote.get.remote(mixed)) == expected
            assert await read(local, mixed) == expected
            columns = await local.get_async([(mine, 2), (others, 0)], ["ids"])
            assert [is_mapped(ids) for ids in columns["ids"]] == [True, False]
            assert not any(ids.flags.writeable for ids in columns["ids"])

            # Existing clients find a shard that is added later.
            late = await shards.add(nodes.here)
            block = await StoreClient(StoreAddress(shards=(late,), timeout_s=TIMEOUT_S)).put_async(
                rows([9], 1)
            )
            assert block.shard == late.name
            assert await read(local, [(block, 0), (mine, 0)]) == [[9], [1] * 5]
            assert await answer(remote.get.remote([(block, 0), (others, 1)])) == [[9], [8] * 2]

    asyncio.run(run())


@pytest.mark.slow
def test_writers_wait_for_room_and_the_error_shows_what_fills_it(nodes: Nodes) -> None:
    async def run() -> None:
        async with running_shards([nodes.here], fail) as shards:
            [shard] = shards.address.shards
            handle = ray.get_actor(shard.name)
            hasty = start_writer(replace(shards.address, timeout_s=1.0), nodes.here)
            page = PAGE_BYTES // 4  # ids, so that a row fills a page
            blocks = [await answer(hasty.put.remote([number], page)) for number in range(16)]
            with pytest.raises(TimeoutError) as full:
                await answer(hasty.put.remote([16], page))
            assert "1 s " in str(full.value)
            assert "16 rows" in str(full.value)

            patient = StoreClient(shards.address)
            waiting = asyncio.create_task(patient.put_async(rows([17], page)))
            await answer(handle.bytes_leased.remote())
            assert not waiting.done()
            shards.free({shard.name: {blocks[3].lease: 1}})
            block = await waiting
            assert block.offset == blocks[3].offset
            with pytest.raises(LookupError) as freed:
                await answer(handle.fetch.remote({"ids": [(blocks[3], 0)]}))
            assert "[4]" in str(freed.value)
            with invalid("bytes of a block", 80_000):
                await patient.put_async(rows([1], 20_000))

            # A writer dies: only the live rows of its leases are kept.
            ray.kill(hasty)
            await shards.reclaim(hasty._actor_id.hex(), lambda shard: {blocks[0].lease: 1})
            assert await answer(handle.bytes_leased.remote()) == 2 * PAGE_BYTES

    asyncio.run(run())


@pytest.mark.slow
def test_a_checkpoints_rollouts_spread_over_the_nodes(nodes: Nodes, tmp_path: Path) -> None:
    # Groups of 9, 5 and 3 tokens: the first is on one node, the others on the other.
    def saved(group_id: int, num_tokens: int, reason: str) -> SavedRollout:
        return SavedRollout(
            request_id=f"{group_id}.0.0",
            finish_reason=reason,
            prompt_token_ids=np.full(2 if reason else 0, 1, np.int32),
            token_ids=np.full(num_tokens, group_id, np.int32),
            sampler_logprobs=np.zeros(num_tokens, np.float32),
            policy_versions=np.full(num_tokens, 4, np.int32),
            extra={"routed_experts": np.full(2 * (num_tokens + 1), group_id, np.uint8)},
            result=json.dumps({"outcome": None, "text": text}) if group_id == 1 else "",
        )

    text = {"prompt": "", "completion": "!", "token_ids": [1], "policy_versions": [4], "turns": []}

    async def run() -> None:
        async with running_shards([nodes.here, nodes.there], _nothing_dies) as shards:
            rollouts = [saved(1, 9, "stop"), saved(2, 5, "length"), saved(3, 3, "")]
            write_rollouts(tmp_path / ROLLOUTS_FILE, rollouts)
            homes = [nodes.here, nodes.there]
            work = await inflight_checkpoint.load(tmp_path, shards.address, nodes=homes)
            assert work.nodes == {1: nodes.here, 2: nodes.there, 3: nodes.there}
            node_of = {shard.name: shard.node_id for shard in shards.address.shards}
            restored: list[FinishedRollout | StepPart] = [*work.finished, *work.parts]
            cells = [one.cell for one in restored]
            where = [node_of[block.shard] for block, _ in cells]
            assert where == [nodes.here, nodes.there, nodes.there]
            assert [one.num_tokens for one in restored] == [9, 5, 3]
            assert [one.text and one.text.completion for one in work.finished] == ["!", None]
            names = ["token_ids", "routed_experts"]
            got = await StoreClient(shards.address).get_async(cells, names)
            assert [ids.tolist() for ids in got["token_ids"]] == [[1] * 9, [2] * 5, [3] * 3]
            assert [one.tolist() for one in got["routed_experts"]] == [[1] * 20, [2] * 12, [3] * 8]
            again = tmp_path / "again"
            again.mkdir()
            await inflight_checkpoint.save(work, StoreClient(shards.address), again)
            for before, after in zip(rollouts, read_rollouts(again / ROLLOUTS_FILE), strict=True):
                assert after.request_id == before.request_id
                assert after.result == before.result
                np.testing.assert_array_equal(
                    after.extra["routed_experts"], before.extra["routed_experts"]
                )
            with pytest.raises(ShardLost) as absent:
                await put_on_node("00" * 28, [rows([1], 1)], shards.address)
            assert "node 00" in str(absent.value)

    asyncio.run(run())


def _nothing_dies(shard: ShardAddress) -> None:
    raise AssertionError(f"{shard.name} died")


@pytest.mark.slow
def test_writing_to_a_dead_shard_is_an_error(nodes: Nodes) -> None:
    # Its memory still exists for processes that have mapped it.
    async def run() -> None:
        lost: asyncio.Queue[ShardAddress] = asyncio.Queue()
        async with running_shards([nodes.here], lost.put_nowait) as shards:
            client = StoreClient(shards.address)
            block = await client.put_async(rows([1], 3))
            (shard,) = shards.address.shards
            os.kill(int(Path(shard.path).parts[2]), signal.SIGKILL)
            assert (await asyncio.wait_for(lost.get(), TIMEOUT_S)).name == block.shard
            with pytest.raises(ShardLost) as dead:
                await client.put_async(rows([1], 3))
            assert block.shard in str(dead.value)

    asyncio.run(run())


@pytest.mark.slow
def test_a_node_dies_and_its_rows_are_reported(nodes: Nodes) -> None:
    """This must be the last test of the module, because it removes the second node."""

    async def run() -> None:
        lost: asyncio.Queue[ShardAddress] = asyncio.Queue()
        async with running_shards([nodes.here, nodes.there], lost.put_nowait) as shards:
            store = StreamStore(
                tensors=["ids", "flags"],
                scalars=[],
                stages=[
                    StageSpec(name="generate", writes=("ids", "flags")),
                    StageSpec(name="train", reads=("ids", "flags")),
                ],
                group_size=2,
                max_bytes=1000,
                max_row_bytes=100,
                on_free=shards.free,
            )
            store.add_node("n")
            train = store.subscribe("train", at_most=2)
            local = StoreClient(shards.address)
            remote = start_writer(shards.address, nodes.there)
            blocks = {
                10: await local.put_async(rows([10, 10], 3)),
                11: await answer(remote.put.remote([11, 11], 3)),
            }
            for group_id, block in blocks.items():
                added = store.add_group(group_id, node="n")
                store.write(
                    "generate", added, block=block, versions=[(0, 0)] * 2, num_tokens=[3, 3]
                )
            nodes.cluster.remove_node(nodes.there_node, allow_graceful=False)
            name = (await asyncio.wait_for(lost.get(), TIMEOUT_S)).name
            assert name == blocks[11].shard
            assert store.lost(name) == [11]
            assert [shard.name for shard in shards.address.shards] == [blocks[10].shard]
            with pytest.raises(ShardLost) as dead:
                await read(local, [(blocks[11], 0)])
            assert name in str(dead.value)

            # The other rows are processed; after their release the arena is empty.
            batch = await train.take(timeout_s=TIMEOUT_S)
            assert batch.group_ids == [10, 10]
            columns = await local.get_batch_async(batch.cells)
            assert [ids.tolist() for ids in columns["ids"]] == [[10] * 3] * 2
            store.release("train", batch.rows)
            local.close()
            await shards.reclaim("nobody", store.live_rows)  # sends freed rows too
            handle = ray.get_actor(blocks[10].shard)
            assert await answer(handle.bytes_leased.remote()) == 0

    asyncio.run(run())
