"""Compare transports of weights to another node: Ray objects, links of process groups, and gloo.

    python scripts/bench/links.py [--model-mb 500] [--repeats 5]

Two nodes of one Ray cluster run on this machine, each with its own object store and an actor. One
rank's share of a version goes from one actor to the other, in turn:

ray     as an object of Ray's store over Ray's connections, copied by the importer
link    as `rollout.weight_transport = "gloo"` sends it: an offer, and buckets over a process group
        of the two processes, into the memory that readers map
gloo    gloo's own rate: one send and one receive of all bytes, without anything else

The bytes are packed before, and verified after each transfer, outside of the time.

Prints one line of JSON last:

    ray_gb_per_s, link_gb_per_s, gloo_gb_per_s    medians
    ratio, link_ratio                             of the first two over gloo's
    bytes_sent, bytes_planned                     over the link, and of the plan without alignment
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

# Scripts of this folder have the names of recipes, so the checkout must come first.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlsys.reallocation.plan import ReallocationPlan, plan
from rlsys.reallocation.shards import Box, Holder, TensorShard
from rlsys.reallocation.transport.group_transport import GroupReceiver, GroupSender
from rlsys.reallocation.transport.link_epochs import Link
from rlsys.reallocation.transport.shared_memory import map_shared, open_shared
from rlsys.reallocation.transport.staging import Content, Share, pack
from rlsys.reallocation.transport.version_memory import NAME
from rlsys.reallocation.transport.weight_deltas import Inbox, WeightDelta, WeightOffer
from rlsys.types import WeightShare
from scripts.crashes.nodes import two_nodes

PATIENCE_S = 300.0
SHAPE = (1000, 2000)
LINK = Link(kind="gloo", node="b", importer="receiver", trainer=0, number=1)


def planned(num_bytes: int) -> ReallocationPlan:
    """Return the plan of float32 weights that one node has and another one lacks."""
    count = max(1, num_bytes // (4 * math.prod(SHAPE)))
    held = tuple(
        TensorShard(name=f"layers.{n}", shape=SHAPE, dtype=torch.float32, box=Box.whole(SHAPE))
        for n in range(count)
    )
    return plan((Holder("rank 0", "a", held),), (Holder("readers of b", "b", held),))


class Sender:
    """The rank."""

    def __init__(self, store: str, num_bytes: int) -> None:
        join(store, 0)
        random = np.random.default_rng(0)
        values = torch.from_numpy(random.random(SHAPE, np.float32))
        share = WeightShare(version=1, rank=0, node="a", path="", num_bytes=0, checksum=0)
        share, content = pack(planned(num_bytes).staged("rank 0"), share, lambda one: values)
        self._delta = WeightDelta(share=share, content=content)
        self._content = torch.from_numpy(content)
        self._sender = GroupSender(ray.util.get_node_ip_address())

    def share(self) -> WeightShare:
        """Return the share that is sent."""
        return self._delta.share

    def ray(self) -> WeightDelta:
        """Return the bytes."""
        return self._delta

    def link(self) -> WeightOffer:
        """Offer the bytes and start to send them."""
        offer = self._sender.offer(self._delta)
        self._sender.send(offer, LINK)
        return offer

    def gloo(self) -> None:
        """Send the bytes."""
        dist.send(self._content, 1)


class Receiver:
    """The importer."""

    def __init__(self, store: str) -> None:
        join(store, 1)
        self._inbox = Inbox()
        self._receiver = GroupReceiver(ray.util.get_node_ip_address())

    def expect(self, share: WeightShare) -> None:
        """Prepare for a share."""
        self._share = share
        self._received = np.zeros(share.num_bytes, np.uint8)

    def ray(self, weight_delta: WeightDelta) -> None:
        """Copy the bytes."""
        self._share = self._inbox.take(weight_delta)

    def link(self, offer: WeightOffer) -> int:
        """Receive the bytes; return their number."""
        (self._share,) = self._receiver.receive(self._inbox, [offer], LINK)
        return offer.num_bytes

    def gloo(self, _: None = None) -> None:
        """Receive the bytes."""
        dist.recv(torch.from_numpy(self._received), 0)
        self._share = replace(self._share, path="")

    def verify(self) -> None:
        """Raise DamagedWeightsError unless all bytes have arrived, then clear them."""
        if not self._share.path:
            Content(self._share, self._received).verify()
            self._received[:] = 0
            return
        opened = Share(self._share)
        opened.verify()
        opened.close()
        descriptor = open_shared(self._share.path, NAME, writable=True)
        map_shared(descriptor)[:] = 0
        os.close(descriptor)


def join(store: str, rank: int) -> None:
    """Join the group whose rate is gloo's own."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=PATIENCE_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit
    )


def measure(num_bytes: int, repeats: int) -> dict[str, float]:
    """Return the results."""
    seconds: dict[str, list[float]] = {"ray": [], "link": [], "gloo": []}
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory,
        two_nodes("links", Path(directory), store_bytes=num_bytes + 2**28) as nodes,
    ):
        ray.init(nodes.address, log_to_driver=False, logging_level="ERROR")
        try:
            sender, receiver, size = _ends(os.path.join(directory, "gloo"), num_bytes)
            for _ in range(repeats):
                for name, times in seconds.items():
                    began = time.perf_counter()
                    sent = getattr(sender, name).remote()
                    receive = getattr(receiver, name).remote
                    _done([sent, receive()] if name == "gloo" else receive(sent))
                    times.append(time.perf_counter() - began)
                    _done(receiver.verify.remote())
            num_sent = _done(receiver.link.remote(sender.link.remote()))
        finally:
            ray.shutdown()
    # The first transfer of each also connects.
    speeds = {name: size / median(times[1:]) / 1e9 for name, times in seconds.items()}
    return {
        **{f"{name}_gb_per_s": round(speed, 2) for name, speed in speeds.items()},
        "ratio": round(speeds["ray"] / speeds["gloo"], 2),
        "link_ratio": round(speeds["link"] / speeds["gloo"], 2),
        "bytes_sent": num_sent,
        "bytes_planned": sum(planned(num_bytes).bytes_per_link.imported.values()),
    }


def _ends(store: str, num_bytes: int) -> tuple[Any, Any, int]:
    """Return sender and receiver, each on its own node, and the bytes of a transfer."""
    here, there = (
        {
            "num_cpus": 1,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        }
        for node in ray.nodes()
        if node["Alive"]
    )
    sender: Any = ray.remote(Sender).options(**here).remote(store, num_bytes)
    receiver: Any = ray.remote(Receiver).options(**there).remote(store)
    share = _done(sender.share.remote())
    _done(receiver.expect.remote(share))
    return sender, receiver, share.num_bytes


def _done(references: Any) -> Any:
    return ray.get(references, timeout=PATIENCE_S)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-mb", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(json.dumps(measure(given.model_mb * 10**6, 1 + given.repeats)))


if __name__ == "__main__":
    main()
