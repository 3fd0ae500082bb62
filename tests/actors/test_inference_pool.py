"""Pool of a frozen model's workers, over fakes that answer or die."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.cluster.calls import Worker, WorkerDied
from actors.store.store_actor import StoreAddress
from actors.workers.inference_actor import RayPool
from rlsys.controller.worker_protocols import PoolDied, Written
from rlsys.engines.generation.generation_protocol import EngineError
from tests.actors.no_rows import NO_ROWS

DONE = Written(scalars={"score": []})


class FakeWorker(Worker):
    """Worker that dies in the method `dies_at`."""

    def __init__(self, number: int, dies_at: str = "") -> None:
        super().__init__(f"reference-{number}", None, timeout_s=1)
        self.dies_at = dies_at
        self.killed = False

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        await asyncio.sleep(0)  # lets other tasks run, as a remote call does
        if self.killed or method == self.dies_at:
            raise WorkerDied(f"{self.name} died during {method}")
        return DONE if method == "run" else "node"

    def kill(self) -> None:
        self.killed = True


async def open_store(node_id: str) -> StoreAddress:
    return StoreAddress(shards=(), timeout_s=1)


def test_rows_with_which_every_worker_dies_are_an_error() -> None:
    deaths: list[str] = []

    async def run() -> None:
        pool = RayPool(
            lambda place: FakeWorker(place, "run"),
            open_store,
            num_workers=2,
            on_death=deaths.append,
            runs="ask and parse",
        )
        await pool.start(1.0)
        with pytest.raises(PoolDied) as died:
            await pool.run(NO_ROWS)
        assert "ask and parse" in str(died.value)
        assert len(deaths) == 3

    asyncio.run(run())


def test_the_error_of_a_worker_that_dies_while_loading_names_its_model() -> None:
    async def run() -> None:
        pool = RayPool(
            lambda place: FakeWorker(place, "start"),
            open_store,
            num_workers=1,
            on_death=lambda _: None,
            model="judge",
        )
        with pytest.raises(WorkerDied) as died:
            await pool.start(1.0)
        assert "'judge'" in str(died.value)
        assert "(reference-0 died" in str(died.value)

    asyncio.run(run())


def test_a_worker_whose_engine_dies_is_replaced() -> None:
    # A judge's engine may be vLLM, which has processes of its own.
    class Broken(FakeWorker):
        async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
            if method == "run":
                raise EngineError("vLLM cannot go on")
            return await super().call(method, *args, timeout_s=timeout_s)

    workers = [Broken(0), FakeWorker(0)]
    deaths: list[str] = []

    async def run() -> None:
        left = iter(workers)
        pool = RayPool(lambda _: next(left), open_store, num_workers=1, on_death=deaths.append)
        await pool.start(1.0)
        assert await pool.run(NO_ROWS) == DONE

    asyncio.run(run())
    assert workers[0].killed
    assert [one.partition(";")[0] for one in deaths] == ["vLLM cannot go on"]
