"""A layout as process groups: this rank's place in it, and with whom it exchanges what."""

from __future__ import annotations

import logging
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlsys.config.parallel_layout import DIMENSIONS, ParallelLayout
from rlsys.engines.training.parallel.collectives import Group

# That gathering what is cut twice, over data and tensor ranks, takes two steps.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


# Dimensions along which something is exchanged.
ALONG = (
    *(("dp_replicate",), ("tp",), ("pp",), ("cp",)),
    *(("cp", "tp"), ("ep", "tp"), ("dp_shard", "cp"), ("dp_shard", "ep", "cp")),
)


# Of a pipeline. NCCL has one queue for a pair of ranks in a group, in which what one rank sends and
# what it receives would wait for each other; so a group carries but one kind from one of two ranks.
NUM_CHANNELS = 4


class Mesh:
    """Of the ranks that have met. A collective."""

    def __init__(self, layout: ParallelLayout, rank: int, device: torch.device | str) -> None:
        self.layout = layout
        self.rank = rank
        self.device = torch.device(device)
        self._at = layout.coordinates(rank)
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        sizes = tuple(layout.size(name) for name in DIMENSIONS)
        self._root = init_device_mesh(torch.device(device).type, sizes, mesh_dim_names=DIMENSIONS)

        # At once, and all of them: making a group is a collective of all ranks.
        for dimensions in ALONG:
            self._meshes[dimensions] = self._made(dimensions)
        self._channels = [self._copy("pp") for _ in range(NUM_CHANNELS)] if layout.pp > 1 else []

    def index(self, *dimensions: str) -> int:
        """This rank's number along these dimensions together."""
        index = 0
        for name in dimensions:
            index = index * self.layout.size(name) + self._at[name]
        return index

    def along(self, *dimensions: str) -> DeviceMesh:
        """The ranks that differ from this one in these dimensions only, as one dimension; those of
        several dimensions in their order.
        """
        return self._meshes[dimensions]

    def _made(self, dimensions: tuple[str, ...]) -> DeviceMesh:
        if len(dimensions) == 1:
            return self._root[dimensions[0]]
        return self._root[dimensions]._flatten("_".join(dimensions))

    def group(self, *dimensions: str) -> Group:
        return self.along(*dimensions).get_group()

    def channel(self, *, gradient: bool, source: int) -> Group:
        """For the hidden states that the pipeline's rank `source` sends, or the gradients."""
        return self._channels[2 * gradient + source % 2]

    def _copy(self, dimension: str) -> Group:
        """Another group of the same ranks."""
        of_each: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.layout.num_ranks):
            at = self.layout.coordinates(rank) | {dimension: 0}
            of_each.setdefault(tuple(at.values()), []).append(rank)
        group: Group = dist.new_subgroups_by_enumeration(list(of_each.values()))[0]
        return group

    def sharding(self, *dimensions: str) -> DeviceMesh:
        """Over which FSDP shards; with copies of it, a mesh of two dimensions."""
        shards = self.along(*dimensions)
        if self.layout.dp_replicate == 1:
            return shards
        return DeviceMesh._concatenate([self.along("dp_replicate"), shards])

    @cached_property
    def num_token_shards(self) -> int:
        return self.layout.num_token_shards
