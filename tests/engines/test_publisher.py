"""Staging and sending of weights by the ranks of a trainer, on threads in place of processes."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlsys.engines.training.adapters import AdaptedWeight
from rlsys.engines.training.publisher import Publisher
from rlsys.reallocation.transport.shared_memory import MemoryGone
from rlsys.reallocation.transport.staging import StagingBuffer
from rlsys.reallocation.transport.weight_deltas import Inbox, WeightDelta
from rlsys.reallocation.transport.weight_views import Weights, open_verified
from rlsys.types import WeightManifest
from tests.reallocation.fake_device import FakeDevice

FIRST = {"embedding": torch.randn(3000, 64), "layers.0": torch.randn(64, 64)}
LAST = {"layers.1": torch.randn(64, 64), "embedding": FIRST["embedding"]}  # tied
ALL = FIRST | LAST
TIMEOUT_S = 60


class Threads:
    """Ranks on threads of this process."""

    def __init__(self, rank: int, meeting: threading.Barrier, gathered: dict[int, Any]) -> None:
        self.rank, self._meeting, self._gathered = rank, meeting, gathered

    def all(self, own: Any) -> list[Any]:
        self._gathered[self.rank] = own
        self._meeting.wait(TIMEOUT_S)
        found = [self._gathered[rank] for rank in sorted(self._gathered)]
        self._meeting.wait(TIMEOUT_S)
        return found

    def raise_together(self, error: Exception | None) -> None:
        if any(self.all(error)):
            raise error or RuntimeError("another rank failed")


class Trainer:
    """Publishers of ranks on nodes, each with some tensors and a device, if there are any."""

    def __init__(
        self,
        ranks: Sequence[tuple[str, Mapping[str, Any]]],
        dtype: torch.dtype,
        devices: Sequence[FakeDevice],
    ) -> None:
        meeting, gathered = threading.Barrier(len(ranks)), dict[int, Any]()
        self._threads = ThreadPoolExecutor(len(ranks))

        def make(rank: int) -> Publisher:
            node, tensors = ranks[rank]
            met: Any = Threads(rank, meeting, gathered)
            return Publisher(
                tensors,
                dict.fromkeys(tensors, dtype),
                met,
                node=node,
                device=devices[rank] if devices else None,
                report=self.reports.append,
            )

        self.reports: list[str] = []
        self.publishers = list(self._threads.map(make, range(len(ranks))))
        self.nodes = [node for node, _ in ranks]

    def publish(self, version: int, *nodes: str, on_device: bool = True) -> WeightManifest:
        def one(publisher: Publisher) -> WeightManifest | None:
            return publisher.publish(version, nodes, on_device=on_device)

        first, *others = self._threads.map(one, self.publishers)
        assert first is not None
        assert others == [None] * len(others)
        return first

    def weight_deltas(
        self, manifest: WeightManifest, node: str, base: int | None
    ) -> list[WeightDelta]:
        pairs = zip(self.publishers, self.nodes, strict=True)
        found = [one.weight_delta(manifest, node, base) for one, own in pairs if own != node]
        return [one for one in found if one is not None]

    def arrived(
        self, manifest: WeightManifest, node: str, inbox: Inbox, base: int | None = None
    ) -> WeightManifest:
        """Return the tensors as a reader on the node sees them."""
        here = [share for share in manifest.shares if share.node == node]
        here += [
            inbox.take(weight_delta) for weight_delta in self.weight_deltas(manifest, node, base)
        ]
        return replace(manifest, shares=tuple(here))

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()
        self._threads.shutdown()


@contextmanager
def trainer(
    *ranks: tuple[str, Mapping[str, Any]],
    dtype: torch.dtype = torch.float32,
    devices: Sequence[FakeDevice] = (),
) -> Iterator[Trainer]:
    made = Trainer(ranks, dtype, devices)
    try:
        yield made
    finally:
        made.close()


def assert_is_whole(
    manifest: WeightManifest,
    dtype: torch.dtype = torch.float32,
    device: FakeDevice | None = None,
) -> None:
    with open_verified(manifest, ALL) as weights:
        weights.open_on(device)
        for name, box, part in weights.parts():
            assert torch.equal(part, ALL[name].to(dtype)[box.slices]), name


PIPELINES = [("a", FIRST), ("a", LAST), ("b", FIRST), ("b", LAST)]  # two ranks on one node


def test_a_node_that_has_everything_gets_nothing() -> None:
    with trainer(*PIPELINES) as pipelines:
        manifest = pipelines.publish(3, "a", "b")
        assert_is_whole(replace(manifest, shares=manifest.shares[:2]))
        assert_is_whole(replace(manifest, shares=manifest.shares[2:]))
        assert pipelines.weight_deltas(manifest, "a", None) == []
        # Two ranks have the embedding and share the work.
        sizes = [share.num_bytes for share in manifest.shares]
        assert max(sizes) < 1.25 * min(sizes)


def test_remote_readers_get_each_element_once_and_replicas_share_the_work() -> None:
    with trainer(*PIPELINES) as pipelines:
        manifest = pipelines.publish(3, "c", "d")
        assert manifest.num_bytes < 1.1 * sum(tensor.nbytes for tensor in ALL.values())
        assert_is_whole(pipelines.arrived(manifest, "c", Inbox()))
        # A node that joins after the plan.
        assert_is_whole(pipelines.arrived(manifest, "a", Inbox()))


def test_a_node_gets_what_its_own_ranks_lack() -> None:
    with trainer(("a", FIRST), ("b", LAST)) as stages:
        manifest = stages.publish(1, "a")
        (weight_delta,) = stages.weight_deltas(manifest, "a", None)
        layer = LAST["layers.1"].nbytes
        assert layer < weight_delta.num_bytes < layer + 1000
        assert_is_whole(stages.arrived(manifest, "a", Inbox()))


def test_changes_are_sent_in_the_published_precision() -> None:
    moving = {name: tensor.clone() for name, tensor in ALL.items()}
    with trainer(("a", moving), dtype=torch.bfloat16) as single:
        inbox, base = Inbox(), None
        for version in range(3):
            manifest = single.publish(version, "b")
            (weight_delta,) = single.weight_deltas(manifest, "b", base)
            assert (weight_delta.num_bytes < 0.1 * manifest.num_bytes) == (version > 0)
            arrived = replace(manifest, shares=(inbox.take(weight_delta),))
            with open_verified(arrived, ALL) as weights:
                for name, box, part in weights.parts():
                    assert torch.equal(part, moving[name].to(torch.bfloat16)[box.slices])
            base = version
            moving["layers.1"][7] += 1


def test_an_outdated_version_is_not_sent() -> None:
    with trainer(("a", ALL)) as single:
        old = single.publish(1, "b")
        new = single.publish(2, "b")
        with pytest.raises(MemoryGone):
            single.weight_deltas(old, "b", None)
        assert_is_whole(single.arrived(new, "b", Inbox()))


def test_adapters_are_added_to_the_part_that_each_rank_stages() -> None:
    a, b = torch.randn(3, 64), torch.randn(3000, 3)
    adapted = AdaptedWeight(
        base=FIRST["embedding"].to(torch.bfloat16), a=a, b=b, scaling=0.5, is_transposed=False
    )
    expected = (FIRST["embedding"].to(torch.bfloat16).float() + 0.5 * b @ a).to(torch.bfloat16)
    tensors = {"embedding": adapted}
    with trainer(("a", tensors), ("a", tensors), dtype=torch.bfloat16) as both:
        manifest = both.publish(1, "a")
        assert all(share.num_bytes > 100_000 for share in manifest.shares)
        with Weights(manifest) as weights:
            for _, box, part in weights.parts():
                assert torch.equal(part, expected[box.slices])


def test_a_rank_without_memory_fails_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    write: Callable[..., Any] = StagingBuffer.write

    def on_the_second(self: StagingBuffer, *arguments: Any) -> Any:
        if self._rank == 1:
            raise OSError("no room")
        return write(self, *arguments)

    monkeypatch.setattr(StagingBuffer, "write", on_the_second)
    with ExitStack() as closing, trainer(*PIPELINES) as pipelines:
        closing.enter_context(pytest.raises((OSError, RuntimeError)))
        pipelines.publish(1, "a")


def test_a_share_larger_than_the_machine_fails_at_the_start_on_every_rank() -> None:
    huge = {"embedding": torch.zeros(1, 1).expand(2**25, 2**25)}  # appears to have 2 ** 52 bytes
    with pytest.raises(OSError) as found, trainer(("a", huge), ("a", LAST)):  # noqa: PT011 - asserted below
        pass
    assert "4194304.00 GiB" in str(found.value)
    assert found.value.errno == errno.ENOMEM
    with pytest.raises(RuntimeError), trainer(("a", LAST), ("a", huge)):
        pass


def are_on_devices(manifest: WeightManifest) -> list[bool]:
    return [share.on_device is not None for share in manifest.shares]


def test_ranks_with_devices_stage_in_their_memory() -> None:
    devices = [FakeDevice() for _ in PIPELINES]
    with trainer(*PIPELINES, dtype=torch.bfloat16, devices=devices) as pipelines:
        for version in (1, 2):
            manifest = pipelines.publish(version, "a", "b", "c")
            assert are_on_devices(manifest) == [True] * 4
            for shares in (manifest.shares[:2], manifest.shares[2:]):
                here = replace(manifest, shares=shares)
                assert_is_whole(here, torch.bfloat16, FakeDevice())
            # Other nodes get the same version over the network.
            assert_is_whole(pipelines.arrived(manifest, "c", Inbox()), torch.bfloat16)
        assert [len(one.allocated) for one in devices] == [1] * 4
        manifest = pipelines.publish(3, "a", "b", on_device=False)
        assert are_on_devices(manifest) == [False] * 4
        assert_is_whole(replace(manifest, shares=manifest.shares[:2]), torch.bfloat16)
        assert [len(one.allocated) for one in devices] == [0] * 4
        assert pipelines.reports == []
        pipelines.publish(4, "a", "b")
    assert [len(one.allocated) + len(one.opened) for one in devices] == [0] * 4


def test_a_rank_whose_device_has_no_memory_stages_in_host_memory() -> None:
    devices = [FakeDevice(), FakeDevice(room=0)]
    with trainer(("a", ALL), ("a", ALL), devices=devices) as both:
        for version in (1, 2):
            manifest = both.publish(version, "a")
            assert are_on_devices(manifest) == [True, False]
            assert_is_whole(manifest, device=FakeDevice())
        (report,) = both.reports
        assert "trainer-1" in report
        assert "all 0 places are taken" in report


def test_a_version_that_is_still_read_on_the_device_is_followed_by_one_in_host_memory() -> None:
    device = FakeDevice(room=1)
    with trainer(("a", ALL), devices=[device]) as single:
        manifest = single.publish(1, "a")
        with Weights(manifest) as reading:
            reading.open_on(device)
            assert are_on_devices(single.publish(2, "a")) == [False]
            reading.require_owners()
        assert are_on_devices(single.publish(3, "a")) == [True]
        assert len(single.reports) == 1
