"""Time of collectives between the GPUs of a cluster.

    group of `ranks` GPUs, `per_node` of them in one fast domain
      fast part:  bytes (g-1)/g over NVLink         ┐ the slower of both: they are pipelined
      slow part:  bytes (nodes-1)/nodes over g NICs ┘ + latency per node or rank

Sizes are bytes of the whole tensor that a group gathers or scatters: an all-gather of `size` leaves
`size` bytes on every rank. An all-reduce is a reduce-scatter and an all-gather. Small messages
inside a node use measured latencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlsys.planner.hardware import GB, Cluster
from rlsys.planner.kernels import kernels_of

LINK_EFFICIENCY = 0.78  # of NVLink's rate, for large NCCL messages
NETWORK_EFFICIENCY = 0.75  # of the NICs' rate
HOP_S = 12e-6  # of one node in a ring
BUCKET_BYTES = 256e6  # of data parallel communication
RING_HOP_S = 60e-6  # of one node and bucket in a ring of nodes, with its synchronisation


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks of a collective.

    Attributes:
        ranks: Number of ranks.
        per_domain: Ranks that share a fast domain.
    """

    ranks: int
    per_domain: int

    @property
    def domains(self) -> int:
        """Number of fast domains."""
        return -(-self.ranks // self.per_domain)


def group_of(cluster: Cluster, ranks: int, stride: int = 1) -> Group:
    """Return the group of `ranks` GPUs that are `stride` GPUs apart."""
    per_domain = max(1, min(ranks, cluster.domain // max(stride, 1)))
    return Group(ranks, per_domain)


def gather_time(cluster: Cluster, group: Group, size: float) -> float:
    """Return the seconds of an all-gather, or a reduce-scatter, of `size` bytes."""
    if group.ranks <= 1 or size <= 0:
        return 0.0
    fast = cluster.gpu.link * GB * LINK_EFFICIENCY
    inside, domains = group.per_domain, group.domains
    seconds = size * (inside - 1) / inside / fast + cluster.gpu.hop_s * inside
    if domains == 1:
        return seconds
    slow = cluster.gpu.network * GB * NETWORK_EFFICIENCY * inside
    return max(seconds, size * (domains - 1) / domains / slow) + HOP_S * math.log2(2 * domains)


def ring_time(cluster: Cluster, group: Group, size: float) -> float:
    """Return the seconds of gathering `size` bytes in buckets, with a ring's latency per rank.

    Large groups are bound by latency: each bucket passes all ranks.
    """
    if group.ranks <= 1 or size <= 0:
        return 0.0
    buckets = max(1.0, size / BUCKET_BYTES)
    latency = buckets * (group.domains - 1) * RING_HOP_S
    return gather_time(cluster, group, size) + latency


def all_reduce_time(cluster: Cluster, group: Group, size: float) -> float:
    """Return the seconds of an all-reduce of `size` bytes."""
    return 2 * gather_time(cluster, group, size)


def engine_all_reduce_time(cluster: Cluster, ranks: int, size: float) -> float:
    """Return the seconds of an all-reduce with an inference engine's own kernel.

    Latency dominates: measured times inside a node, with a ring between nodes on top.
    """
    if ranks <= 1:
        return 0.0
    inside = min(ranks, cluster.domain)
    if cluster.gpu.products:  # cores have no kernel of their own
        return all_reduce_time(cluster, Group(ranks, inside), size)
    table = kernels_of(cluster.gpu).tables["engine_all_reduce"]
    seconds = math.exp(table.at(inside, max(size, 1))) * 1e-6
    if inside > 8:
        seconds *= 1 + 0.15 * math.log2(inside / 8)
    if ranks > inside:
        group = Group(ranks, inside)
        seconds += all_reduce_time(cluster, group, size) + HOP_S
    return seconds


def all_to_all_time(cluster: Cluster, group: Group, sent: float) -> float:
    """Return the seconds of an all-to-all in which each rank sends `sent` bytes."""
    if group.ranks <= 1 or sent <= 0:
        return 0.0
    outside = 1 - group.per_domain / group.ranks
    fast = sent * (1 - outside) / (cluster.gpu.link * GB * LINK_EFFICIENCY)
    slow = sent * outside / (cluster.gpu.network * GB * NETWORK_EFFICIENCY)
    return max(fast, slow) + cluster.gpu.hop_s * group.per_domain + HOP_S * (group.domains > 1)
