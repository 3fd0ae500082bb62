"""Imports of weights into nodes, over fake workers."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from actors.cluster.calls import InputLost, Worker, WorkerDied
from actors.trainer.trainer_proxy import send_offers
from actors.trainer.weight_imports import OTHER_NODE, WeightImports
from rlsys.config.rollout_config import WeightTransport
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.reallocation.transport.link_epochs import MAX_FAILURES, RETRY_AFTER_S, Link
from rlsys.reallocation.transport.shared_memory import MemoryGone
from rlsys.reallocation.transport.wires import LinkError
from rlsys.types import DeviceHandle, WeightManifest, WeightShare


def manifest(version: int, node: str = "a") -> WeightManifest:
    share = WeightShare(version=version, rank=0, node=node, path="p", num_bytes=1, checksum=0)
    return WeightManifest(version=version, shares=(share,))


@dataclass
class Call:
    """An import that a worker was asked for."""

    worker: str
    version: int
    base: int | None
    link: Link | None


@dataclass
class World:
    """A trainer on node a, and replicas; each call fails with the next of `errors`, if any."""

    transport: WeightTransport = "auto"
    errors: list[BaseException | None] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    now: float = 0.0
    num_sent_again: int = 0
    places: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.imports = WeightImports(
            self, self.transport, clock=lambda: self.now, report=self.reports.append
        )

    def weight_deltas(
        self, manifest: WeightManifest, node_id: str, base: int | None, link: Link | None
    ) -> list[Any]:
        self.places.append(node_id)
        return [] if node_id == "a" else [(base, link)]

    def send_again(self, manifest: WeightManifest) -> None:
        self.num_sent_again += 1

    def bring(self, version: int, reader: FakeWorker, node: str = "b") -> WeightManifest:
        return run_in_virtual_time(self.imports.on_node(manifest(version), node, reader))

    @property
    def bases(self) -> list[int | None]:
        return [one.base for one in self.calls]


class FakeWorker(Worker):
    def __init__(self, name: str, world: World) -> None:
        super().__init__(name, None, timeout_s=600)
        self.world = world
        self.until: asyncio.Event | None = None  # its next import waits for this

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        assert method == "import_weights"
        published, link, (base, of_link) = args
        assert link == of_link
        self.world.calls.append(Call(self.name, published.version, base, link))
        if self.until is not None:
            await self.until.wait()
        if self.world.errors and (error := self.world.errors.pop(0)) is not None:
            if isinstance(error, WorkerDied):
                self.end("killed")
            raise error
        return tuple(replace(one, node="b", path=self.name) for one in published.shares)

    def _end_process(self) -> None:
        pass


def died() -> WorkerDied:
    return WorkerDied("rollout-0 died during import_weights: killed")


def test_a_node_imports_each_version_once_for_all_readers() -> None:
    world = World()
    readers = [FakeWorker(f"rollout-{number}", world) for number in range(3)]
    for version in (1, 2):
        found = [world.bring(version, reader) for reader in readers]
        assert {share.path for local in found for share in local.shares} == {"rollout-0"}
    assert [(one.worker, one.version, one.base) for one in world.calls] == [
        ("rollout-0", 1, None),
        ("rollout-0", 2, 1),
    ]
    (link,) = {one.link for one in world.calls}
    assert link is not None
    assert (link.kind, link.node, link.importer) == ("gloo", "b", "rollout-0")


def test_a_node_of_the_trainer_imports_nothing() -> None:
    world = World()
    local = world.bring(1, FakeWorker("rollout-0", world), node="a")
    assert local == manifest(1)
    assert world.calls == []


def test_a_reader_takes_over_from_an_importer_that_dies() -> None:
    world = World(errors=[None, died()])
    first, second = FakeWorker("rollout-0", world), FakeWorker("rollout-1", world)
    world.bring(1, first)
    local = world.bring(2, second)
    assert local.shares[0].path == "rollout-1"
    assert [(one.worker, one.version, one.base) for one in world.calls] == [
        ("rollout-0", 1, None),
        ("rollout-0", 2, 1),
        ("rollout-1", 2, None),  # it has no version that changes are based on
    ]
    assert world.calls[2].link != world.calls[1].link
    assert world.bring(2, second) is local


def test_the_death_of_an_importer_is_its_own_failure() -> None:
    world = World(errors=[died()])
    with pytest.raises(WorkerDied):
        world.bring(1, FakeWorker("rollout-0", world))
    successor = FakeWorker("rollout-0.1", world)
    assert world.bring(1, successor).shares[0].path == "rollout-0.1"


def test_a_node_whose_importer_hangs_delays_no_other_node() -> None:
    world = World()
    hanging, living = FakeWorker("rollout-0", world), FakeWorker("rollout-1", world)

    async def scenario() -> None:
        hanging.until = asyncio.Event()
        waiting = asyncio.create_task(world.imports.on_node(manifest(1), "b", hanging))
        await asyncio.sleep(0)
        for version in (1, 2):
            local = await world.imports.on_node(manifest(version), "c", living)
            assert local.version == version
        assert not waiting.done()
        hanging.until.set()
        await waiting

    run_in_virtual_time(scenario())


def test_links_that_fail_are_made_again_and_then_replaced_by_objects() -> None:
    world = World(errors=[LinkError("no link"), LinkError("no link")])
    reader = FakeWorker("rollout-0", world)
    world.bring(1, reader)
    links = [one.link for one in world.calls]
    assert [None if one is None else one.number for one in links] == [1, 2, None]
    assert world.bases == [None, None, None]
    assert len(world.reports) == 1
    assert world.reports[0].startswith("no link")
    world.now = RETRY_AFTER_S
    world.bring(2, reader)
    assert world.calls[-1].link is not None
    assert world.calls[-1].base == 1  # objects and links send changes of the same versions


def test_a_transport_that_was_asked_for_reports_its_failure() -> None:
    world = World("gloo", errors=[LinkError("rank 1 at b")] * MAX_FAILURES)
    with pytest.raises(LinkError) as found:
        world.bring(1, FakeWorker("rollout-0", world))
    assert str(found.value) == "rank 1 at b"
    assert len(world.calls) == MAX_FAILURES


def test_objects_use_no_links() -> None:
    world = World("objects")
    world.bring(1, FakeWorker("rollout-0", world))
    assert [one.link for one in world.calls] == [None]


@pytest.mark.parametrize("error", [InputLost("rank 0 died"), FileNotFoundError("version 1")])
def test_a_version_that_is_gone_is_reported_and_its_link_replaced(error: Exception) -> None:
    world = World(errors=[error])
    reader = FakeWorker("rollout-0", world)
    with pytest.raises(type(error)):
        world.bring(1, reader)
    world.bring(2, reader)
    numbers = [one.link.number for one in world.calls if one.link is not None]
    assert numbers == [1, 2]  # the ranks may have sent a part of version 1
    assert world.bases == [None, None]


def test_a_reader_takes_over_what_it_cannot_open() -> None:
    world = World()
    first, second = FakeWorker("rollout-0", world), FakeWorker("rollout-1", world)
    local = world.bring(1, first)
    assert not world.imports.take_over("b", local, first)
    assert world.imports.take_over("b", local, second)
    assert not world.imports.take_over("b", local, second)
    assert world.bring(1, second).shares[0].path == "rollout-1"


def test_a_reader_does_not_take_over_a_version_of_its_own_node_or_an_outdated_one() -> None:
    world = World()
    first, second = FakeWorker("rollout-0", world), FakeWorker("rollout-1", world)
    near = world.bring(1, first, node="a")
    assert not world.imports.take_over("a", near, second)
    outdated = world.bring(1, first)
    world.bring(2, first)
    assert not world.imports.take_over("b", outdated, second)


def test_damage_is_imported_again_once_for_all_readers() -> None:
    world = World()
    reader = FakeWorker("rollout-0", world)
    local = world.bring(1, reader)
    for _ in range(2):  # two readers found it
        world.imports.damaged(manifest(1), "b", local)
    world.bring(1, reader)
    assert world.num_sent_again == 1
    assert world.bases == [None, None]
    world.bring(2, reader)
    assert world.bases[-1] == 1


def test_nothing_of_a_restarted_trainer_is_used_as_a_base() -> None:
    world = World()
    reader = FakeWorker("rollout-0", world)
    world.bring(1, reader)
    world.imports.trainer_restarted()
    world.bring(1, reader)
    assert world.bases == [None, None]
    first, second = (one.link for one in world.calls)
    assert first != second


def test_a_late_reader_of_an_older_version_does_not_replace_the_newer_one() -> None:
    world = World()
    reader = FakeWorker("rollout-0", world)
    world.bring(1, reader)
    newer = world.bring(2, reader)
    with pytest.raises(FileNotFoundError):
        world.bring(1, FakeWorker("rollout-1", world))
    assert world.bring(2, reader) is newer
    world.imports.trainer_restarted()
    assert world.bring(1, reader).version == 1


def test_an_import_that_a_restart_overtakes_is_no_base() -> None:
    world = World()
    reader = FakeWorker("rollout-0", world)

    async def scenario() -> None:
        reader.until = asyncio.Event()
        waiting = asyncio.create_task(world.imports.on_node(manifest(1), "b", reader))
        await asyncio.sleep(0)
        world.imports.trainer_restarted()
        reader.until.set()
        await waiting
        await world.imports.on_node(manifest(2), "b", reader)

    run_in_virtual_time(scenario())
    assert world.bases == [None, None]


def test_a_cancelled_import_replaces_its_link() -> None:
    world = World()
    reader = FakeWorker("rollout-0", world)

    async def scenario() -> None:
        reader.until = asyncio.Event()
        waiting = asyncio.create_task(world.imports.on_node(manifest(1), "b", reader))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        reader.until = None
        await world.imports.on_node(manifest(1), "b", reader)

    run_in_virtual_time(scenario())
    first, second = (one.link for one in world.calls)
    assert first != second


def on_device(version: int) -> WeightManifest:
    (share,) = manifest(version).shares
    memory = DeviceHandle(handle=b"", num_bytes=1, owner=0)
    return WeightManifest(version=version, shares=(replace(share, on_device=memory),))


def test_memory_of_gpus_that_a_reader_cannot_open_is_imported_instead() -> None:
    world = World()
    first, second = FakeWorker("rollout-0", world), FakeWorker("rollout-1", world)

    def bring(published: WeightManifest, reader: FakeWorker) -> WeightManifest:
        return run_in_virtual_time(world.imports.on_node(published, "a", reader))

    assert bring(on_device(1), first) == on_device(1)
    for reader in (first, second):  # both have tried to open it
        world.imports.refuse_devices(f"{reader.name}: no peer access")
    assert not world.imports.reads_devices
    for reader in (first, second):
        assert [one.path for one in bring(on_device(1), reader).shares] == ["rollout-0"]
    assert world.bases == [None]
    assert world.places == ["a", OTHER_NODE]
    assert [report.count("rollout-0: no peer access") for report in world.reports] == [1]
    # Later versions are in host memory.
    assert bring(manifest(2), second) == manifest(2)
    assert len(world.calls) == 1


def test_memory_of_gpus_is_imported_by_other_nodes() -> None:
    world = World("cuda_ipc", errors=[LinkError("no link"), LinkError("no link")])
    reader = FakeWorker("rollout-0", world)
    run_in_virtual_time(world.imports.on_node(on_device(1), "b", reader))
    kinds = [None if one.link is None else one.link.kind for one in world.calls]
    assert kinds == ["gloo", "gloo", None]
    assert world.imports.reads_devices


class GoneRank:
    """A rank whose calls fail, because it has died."""

    class send_weights:
        @staticmethod
        def remote(offer: Any, link: Link) -> asyncio.Future[None]:
            return failed()


def failed() -> asyncio.Future[None]:
    future = asyncio.get_running_loop().create_future()
    future.set_exception(MemoryGone("version 1 of the weights is gone"))
    return future


def test_errors_of_ranks_that_send_are_read() -> None:
    """An error that nobody reads is logged with its traceback."""

    async def run(reads: bool) -> int:
        unread: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))
        link = Link(kind="gloo", node="b", importer="here", trainer=0, number=1)
        if reads:
            send_offers([GoneRank(), GoneRank()], [failed(), failed()], link)
        else:
            failed()
        await asyncio.sleep(0)
        gc.collect()
        return len(unread)

    assert asyncio.run(run(reads=True)) == 0
    assert asyncio.run(run(reads=False)) == 1
