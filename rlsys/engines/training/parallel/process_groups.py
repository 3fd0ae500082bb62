"""Process groups of a layout, and this rank's position in them."""

from __future__ import annotations

import logging
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlsys.config.parallel_layout import DIMENSIONS, ParallelLayout
from rlsys.engines.training.parallel.collectives import Group

# Silence the warning that gathering a tensor split over data and tensor ranks takes two steps.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


# Dimensions along which ranks communicate.
ALONG = (
    *(("dp_replicate",), ("tp",), ("pp",), ("cp",)),
    *(("cp", "tp"), ("ep", "tp"), ("dp_shard", "cp"), ("dp_shard", "ep", "cp")),
)


# Process groups of a pipeline. NCCL has one queue per pair of ranks in a group, in which sends and
# receives would wait for each other; so each group carries one kind of message in one direction.
NUM_CHANNELS = 4


class Mesh:
    """Process groups of the ranks that have joined. Creating it is a collective."""

    def __init__(self, layout: ParallelLayout, rank: int, device: torch.device | str) -> None:
        self.layout = layout
        self.rank = rank
        self.device = torch.device(device)
        self._at = layout.coordinates(rank)
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        sizes = tuple(layout.size(name) for name in DIMENSIONS)
        self._root = init_device_mesh(torch.device(device).type, sizes, mesh_dim_names=DIMENSIONS)

        # All at once: creating a group is a collective of all ranks.
        for dimensions in ALONG:
            self._meshes[dimensions] = self._made(dimensions)
        self._channels = [self._copy("pp") for _ in range(NUM_CHANNELS)] if layout.pp > 1 else []

    def index(self, *dimensions: str) -> int:
        """Return this rank's number along these dimensions together."""
        index = 0
        for name in dimensions:
            index = index * self.layout.size(name) + self._at[name]
        return index

    def along(self, *dimensions: str) -> DeviceMesh:
        """Return the ranks that differ from this one in these dimensions only, as one dimension.

        Ranks of several dimensions are in the order of the dimensions.
        """
        return self._meshes[dimensions]

    def _made(self, dimensions: tuple[str, ...]) -> DeviceMesh:
        if len(dimensions) == 1:
            return self._root[dimensions[0]]
        return self._root[dimensions]._flatten("_".join(dimensions))

    def group(self, *dimensions: str) -> Group:
        """Return the process group along these dimensions."""
        return self.along(*dimensions).get_group()

    def channel(self, *, gradient: bool, source: int) -> Group:
        """Return the group for hidden states, or gradients, that pipeline rank `source` sends."""
        return self._channels[2 * gradient + source % 2]

    def _copy(self, dimension: str) -> Group:
        """Create another group of the same ranks."""
        of_each: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.layout.num_ranks):
            at = self.layout.coordinates(rank) | {dimension: 0}
            of_each.setdefault(tuple(at.values()), []).append(rank)
        group: Group = dist.new_subgroups_by_enumeration(list(of_each.values()))[0]
        return group

    def sharding(self, *dimensions: str) -> DeviceMesh:
        """Return the mesh over which FSDP shards; with replicas, a mesh of two dimensions."""
        shards = self.along(*dimensions)
        if self.layout.dp_replicate == 1:
            return shards
        return DeviceMesh._concatenate([self.along("dp_replicate"), shards])

    @cached_property
    def num_token_shards(self) -> int:
        """Number of ranks that share the tokens of a pass."""
        return self.layout.num_token_shards
