"""Weights over process groups: between threads, and between processes of which one is killed."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rlsys.reallocation.plan import Segment
from rlsys.reallocation.shards import Box
from rlsys.reallocation.transport import wires
from rlsys.reallocation.transport.group_transport import GroupReceiver, GroupSender
from rlsys.reallocation.transport.link_epochs import Link
from rlsys.reallocation.transport.staging import Share, pack
from rlsys.reallocation.transport.weight_deltas import Inbox, Outbox, WeightOffer
from rlsys.reallocation.transport.wires import (
    RECEIVER,
    SENDER,
    DeviceWire,
    Limits,
    LinkError,
    Meeting,
    buckets,
    make_wire,
    receive,
    send,
)
from rlsys.types import WeightShare

HOST = "127.0.0.1"
SHORT = Limits(form_s=3.0, bucket_s=3.0)
LONG = Limits(form_s=120.0, bucket_s=120.0)  # for a busy machine
NUM_ROWS = 40_000  # 1.28 MB in bfloat16
SEGMENT = Segment(
    buffer="", offset=0, name="w", dtype=torch.bfloat16, box=Box(((0, NUM_ROWS), (0, 16)))
)


def link(node: str = "b", number: int = 1) -> Link:
    return Link(kind="gloo", node=node, importer=f"rollout-{node}", trainer=0, number=number)


def tensor(seed: int) -> torch.Tensor:
    return torch.randn(NUM_ROWS, 16, generator=torch.Generator().manual_seed(seed))


@dataclass
class Rank:
    """A rank that packs one tensor per version and offers it to other nodes."""

    number: int
    sender: GroupSender

    def __post_init__(self) -> None:
        self.outbox = Outbox()
        self.tensor = tensor(self.number)

    def offer(self, version: int, base: int | None = None) -> WeightOffer:
        empty = WeightShare(
            version=version, rank=self.number, node="a", path="", num_bytes=0, checksum=0
        )
        weight_delta = self.outbox.weight_delta(
            "b", base, lambda: pack([SEGMENT], empty, lambda one: self.tensor)
        )
        return self.sender.offer(weight_delta)

    def change(self) -> None:
        self.tensor = self.tensor.clone()
        self.tensor[7, 3] += 1


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "BUCKET_BYTES", 2**18)


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    made = [Rank(number, GroupSender(HOST, LONG)) for number in range(2)]
    yield made
    for one in made:
        one.sender.close()


class Importer:
    """The importer of a node."""

    def __init__(self, node: str, limits: Limits = LONG) -> None:
        self.inbox = Inbox()
        self.receiver = GroupReceiver(HOST, limits)
        self.link = link(node)

    def take(self, *offers: WeightOffer) -> list[WeightShare]:
        return self.receiver.receive(self.inbox, offers, self.link)


def assert_holds(share: WeightShare, expected: torch.Tensor) -> None:
    opened = Share(share)
    opened.verify()
    ((_, part),) = opened.parts()
    assert torch.equal(part, expected.to(torch.bfloat16))
    opened.close()


def test_two_ranks_send_whole_versions_and_changes_to_two_nodes(
    ranks: list[Rank], small_buckets: None
) -> None:
    importers = [Importer("b"), Importer("c")]
    base = None
    with ThreadPoolExecutor(2) as threads:
        for version in (1, 2, 3):
            offers = [rank.offer(version, base) for rank in ranks]
            for offer in offers:
                assert (offer.num_bytes < 0.2 * offer.share.num_bytes) == (version > 1)
            for rank, offer in zip(ranks, offers, strict=True):
                for one in importers:
                    rank.sender.send(offer, one.link)
            taking = [threads.submit(one.take, *offers) for one in importers]
            for shares in (one.result() for one in taking):
                for rank, share in zip(ranks, shares, strict=True):
                    assert_holds(share, rank.tensor)
            base = version
            for rank in ranks:
                rank.change()


def test_an_importer_that_connects_late_delays_no_other(ranks: list[Rank]) -> None:
    rank = ranks[0]
    offer = rank.offer(1)
    for node in ("late", "b"):
        rank.sender.send(offer, link(node))
    for node in ("b", "late"):
        (share,) = Importer(node).take(offer)
        assert_holds(share, rank.tensor)


def test_what_an_interrupted_link_has_sent_is_not_read_by_the_next(ranks: list[Rank]) -> None:
    rank = ranks[0]
    importer = Importer("b")
    rank.sender.send(first := rank.offer(1), importer.link)
    importer.take(first)
    rank.sender.send(rank.offer(2, 1), importer.link)  # is never read
    rank.tensor = tensor(9)
    importer.link = link("b", number=2)
    rank.sender.send(third := rank.offer(3), importer.link)
    (share,) = importer.take(third)
    assert_holds(share, rank.tensor)


def test_an_offer_that_a_newer_version_replaced_ends_at_once(ranks: list[Rank]) -> None:
    rank = ranks[0]
    outdated = rank.offer(1)
    rank.offer(2)
    importer = Importer("b")
    rank.sender.send(outdated, importer.link)
    with pytest.raises(LinkError):
        importer.take(outdated)


def test_a_link_that_does_not_form_names_ranks_and_addresses() -> None:
    with socket.create_server((HOST, 0)) as closed:
        port = closed.getsockname()[1]
    rank = Rank(5, GroupSender(HOST))
    silent = rank.offer(1)  # nothing is sent
    gone = replace(silent, share=replace(silent.share, rank=3), meeting=(HOST, port))
    importer = Importer("b", SHORT)
    with pytest.raises(LinkError) as found:
        importer.take(silent, gone)
    message = str(found.value)
    for end in ("rollout-b", f"rank 3 at {HOST}:{port}", f"rank 5 at {HOST}:{silent.meeting[1]}"):
        assert end in message
    rank.sender.close()


def test_a_reader_keeps_its_version_while_the_next_ones_arrive(ranks: list[Rank]) -> None:
    """The torch engine computes with the weights in place."""
    rank, importer = ranks[0], Importer("b")
    before = rank.tensor

    def arrive(version: int, base: int | None) -> WeightShare:
        rank.sender.send(offer := rank.offer(version, base), importer.link)
        return importer.take(offer)[0]

    reading = Share(arrive(1, None))
    for version in (2, 3):
        rank.change()
        assert_holds(arrive(version, version - 1), rank.tensor)
        ((_, part),) = reading.parts()
        assert torch.equal(part, before.to(torch.bfloat16))
    reading.close()


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 9))
def test_buckets_are_all_bytes_in_order(sizes: list[int], bucket_bytes: int) -> None:
    numbers = iter(range(256 * 2))
    parts = [np.array([next(numbers) % 256 for _ in range(size)], np.uint8) for size in sizes]
    found = list(buckets(parts, bucket_bytes))
    assert all(0 < len(one) <= bucket_bytes for one in found)
    together = np.concatenate([np.empty(0, np.uint8), *found])
    assert np.array_equal(together, np.concatenate([np.empty(0, np.uint8), *parts]))
    assert len(found) == sum(-(-size // bucket_bytes) for size in sizes)
    assert all(any(np.shares_memory(one, part) for part in parts) for one in found)


def both_ends(make: Callable[[int, Meeting], Any]) -> tuple[Any, Any]:
    meeting = Meeting(HOST)
    with ThreadPoolExecutor(2) as threads:
        sender, receiver = threads.map(lambda side: make(side, meeting), (SENDER, RECEIVER))
    return sender, receiver


def gloo_group(side: int, meeting: Meeting) -> Any:
    wire: Any = make_wire(link(), side, meeting.address, HOST, LONG)
    return wire._group


@pytest.mark.parametrize("sizes", [[1], [100], [64, 0, 65], [1000, 3, 3]])
def test_bytes_pass_through_two_buffers_of_a_device(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for NCCL, but over gloo, with buffers in host memory."""
    monkeypatch.setattr(wires, "BUCKET_BYTES", 64)
    groups = both_ends(gloo_group)
    device = torch.device("cpu")
    ends = [DeviceWire(group, side, LONG, device) for side, group in enumerate(groups)]
    sent = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]
    received = [np.zeros(size, np.uint8) for size in sizes]
    with ThreadPoolExecutor(2) as threads:
        sending = threads.submit(send, ends[0], sent)
        threads.submit(receive, ends[1], received).result()
        sending.result()
    for one, other in zip(sent, received, strict=True):
        assert np.array_equal(one, other)


def test_nccl_reports_its_errors_to_the_thread_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default torch ends the process, which would be the trainer's rank."""
    seen: list[tuple[str | None, ...]] = []

    class Options:
        _timeout: Any = None

    def nccl(store: Any, side: int, size: int, options: Options) -> None:
        seen.append(tuple(os.environ.get(name) for name in wires.NCCL_VARIABLES))
        assert size == 2
        assert options._timeout.total_seconds() == wires.FORM_LIMIT_S

    nccl.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(wires, "gpu", lambda: torch.device("cpu"))
    over_nccl = replace(link(), kind="nccl")
    ends = both_ends(lambda side, meeting: make_wire(over_nccl, side, meeting.address, HOST))
    assert all(isinstance(one, DeviceWire) for one in ends)
    assert seen == [("1", "0")] * 2
    assert not any(name in os.environ for name in wires.NCCL_VARIABLES)


def import_in_process(pipe: Any, dies: bool) -> None:
    """Import what the pipe asks for; if it `dies`, in the middle of the first version."""
    importer = Importer("")
    wires.BUCKET_BYTES = 2**18
    unpatched = wires.HostWire.receive

    def receive_or_die(self: wires.HostWire, number: int, bucket: torch.Tensor) -> wires.Finish:
        if dies and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return unpatched(self, number, bucket)

    wires.HostWire.receive = receive_or_die  # type: ignore[method-assign]
    pipe.send("started")
    while (asked := pipe.recv()) is not None:
        importer.link, offers, expected = asked
        for share, one in zip(importer.take(*offers), expected, strict=True):
            assert_holds(share, one)
        pipe.send("arrived")


@dataclass
class Process:
    """An importer in a process of its own."""

    node: str
    dies: bool = False

    def __post_init__(self) -> None:
        context = get_context("forkserver")
        self.pipe, other = context.Pipe()
        self.process = context.Process(
            target=import_in_process, args=(other, self.dies), daemon=True
        )
        self.process.start()
        other.close()

    def ask(self, ranks: list[Rank], offers: list[WeightOffer], number: int) -> None:
        to = link(self.node, number)
        for rank, offer in zip(ranks, offers, strict=True):
            rank.sender.send(offer, to)
        self.pipe.send((to, offers, [rank.tensor for rank in ranks]))

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join()
        assert self.process.exitcode == 0


def test_an_importer_that_is_killed_in_mid_transfer_stops_no_other(
    ranks: list[Rank], small_buckets: None
) -> None:
    dying, living, successor = Process("b", dies=True), Process("c"), Process("b")
    for one in (dying, living, successor):
        assert one.pipe.recv() == "started"
    offers = [rank.offer(1) for rank in ranks]
    for one in (dying, living):
        one.ask(ranks, offers, number=1)
    assert living.pipe.recv() == "arrived"
    dying.process.join()
    assert dying.process.exitcode == -signal.SIGKILL
    with pytest.raises(EOFError):
        dying.pipe.recv()
    successor.ask(ranks, offers, number=2)
    assert successor.pipe.recv() == "arrived"
    for rank in ranks:
        rank.change()
    changes = [rank.offer(2, 1) for rank in ranks]
    living.ask(ranks, changes, number=1)  # over the links of the first version
    successor.ask(ranks, changes, number=2)
    for one in (living, successor):
        assert one.pipe.recv() == "arrived"
        one.end()
