"""Publishing weights to generation engines: each rank stages its own part, nothing is gathered.

all ranks' holdings ─┐
                     ├─► plan ─► this rank's segments ─► shared memory of its node ─► manifest
nodes that sample ───┘                                          └─► packed, to other nodes

Segments are copied, unless the weights are in shared memory anyway (zero_copy_publication.py). With
`rollout.weight_transport = "cuda_ipc"` they are copied into memory of the rank's GPU instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rlsys.common.available_memory import require_memory
from rlsys.engines.training.adapters import AdaptedWeight
from rlsys.engines.training.ranks import Ranks
from rlsys.engines.training.zero_copy_publication import ZeroCopyWeights, zero_copy_tensors
from rlsys.reallocation.plan import ReallocationPlan, Segment, plan
from rlsys.reallocation.shards import Box, Holder, TensorShard, local_box, local_part
from rlsys.reallocation.transport.device_staging import DeviceStage
from rlsys.reallocation.transport.shared_device import DeviceSharingError, SharedDevice
from rlsys.reallocation.transport.shared_memory import Bytes, MemoryGone
from rlsys.reallocation.transport.staging import Read, StagingBuffer, pack
from rlsys.reallocation.transport.weight_deltas import Outbox, WeightDelta
from rlsys.reallocation.transport.weight_views import Weights
from rlsys.types import WeightManifest, WeightShare

logger = logging.getLogger(__name__)

Outward = Mapping[str, torch.Tensor | AdaptedWeight]


@dataclass(frozen=True)
class _Published:
    version: int
    staging: ReallocationPlan
    sending: dict[str, list[Segment]]
    """Segments that are sent to other nodes, by node."""


class Publisher:
    """Publisher of one rank. Creating it is a collective.

    `tensors` are this rank's part of the model by Hugging Face name, `dtypes` the precision in
    which each is published. Versions are staged on the `device`, if there is one and it allows
    that. Raises OSError, on every rank, if memory is short on one of them.
    """

    def __init__(
        self,
        tensors: Outward,
        dtypes: Mapping[str, torch.dtype],
        ranks: Ranks,
        *,
        node: str,
        device: SharedDevice | None = None,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        self._tensors = tensors
        self._boxes = {name: _local_box(tensor) for name, tensor in tensors.items()}
        self._ranks = ranks
        self._node = node
        self._name = _name(ranks.rank)
        held = [
            TensorShard(name=name, shape=tuple(one.shape), dtype=_dtype(one), box=self._boxes[name])
            for name, one in tensors.items()
        ]
        self._sources = tuple(ranks.all(Holder(self._name, node, tuple(held))))
        dtypes = {name: dtype for some in ranks.all(dict(dtypes)) for name, dtype in some.items()}
        self._shapes = {one.name: one.shape for source in self._sources for one in source.holdings}
        self._wanted = tuple(
            TensorShard(name=name, shape=shape, dtype=dtypes[name], box=Box.whole(shape))
            for name, shape in self._shapes.items()
        )
        self._stage = StagingBuffer([], rank=ranks.rank, node=node)
        self._device = device
        self._device_stage = (
            None if device is None else DeviceStage(device, rank=ranks.rank, node=node)
        )
        self._report = report
        self._reported: set[str] = set()
        self._zero_copy: ZeroCopyWeights | None = None
        if len(self._sources) == 1 and (plain := zero_copy_tensors(tensors, dtypes)) is not None:
            self._zero_copy = ZeroCopyWeights(plain)
        self._outbox = Outbox()
        self._published: _Published | None = None
        refusal = None
        try:
            own = sum(box.num_elements * dtypes[n].itemsize for n, box in self._boxes.items())
            require_memory(own, purpose="a version of the weights")
        except OSError as error:
            refusal = error
        ranks.raise_together(refusal)

    def publish(
        self, version: int, nodes: Sequence[str] = (), *, on_device: bool = True
    ) -> WeightManifest | None:
        """Stage a version and return its manifest on rank 0, None on others. A collective.

        `nodes` are those with readers, by default those of the trainer. Without `on_device`, this
        and later versions are staged in host memory. Raises OSError, on every rank, if memory is
        short on one of them; DamagedWeightsError as `verify` does.
        """
        readers = sorted(set(nodes)) or sorted({source.node for source in self._sources})
        staging = plan(self._sources, tuple(map(self._reader, readers)))
        segments = tuple(replace(one, nodes=()) for one in staging.staged(self._name))
        outdated = None
        if segments != self._stage.segments:
            outdated = self._stage
            self._stage = StagingBuffer(segments, rank=self._ranks.rank, node=self._node)
        before, self._published = self._published, None
        share, refusal = None, None
        try:
            if self._zero_copy is not None:
                self._zero_copy.check()
                self.verify()
                self._zero_copy.move(self._stage)
            # Only the factors of adapters are gathered; they are small.
            tensors = {name: _with_whole_factors(one) for name, one in self._tensors.items()}
            share = self._write(
                version, lambda one: self._part(tensors[one.name], one), on_device=on_device
            )
        except OSError as error:
            refusal = error
        if outdated is not None:
            outdated.close()
        if self._zero_copy is not None:
            self._zero_copy.published()
        self._ranks.raise_together(refusal)
        if before is None or before.staging is not staging:
            before = _Published(version, staging, {})
        self._published = replace(before, version=version)
        shares = [share for share in self._ranks.all(share) if share is not None]
        is_first = self._ranks.rank == 0
        return WeightManifest(version=version, shares=tuple(shares)) if is_first else None

    def _write(self, version: int, read: Read, *, on_device: bool) -> WeightShare:
        """Stage this rank's segments, on the device if possible."""
        if self._device_stage is not None and not on_device:
            self._device_stage.close()
        elif self._device_stage is not None:
            try:
                return self._device_stage.write(self._stage.segments, version, read)
            except DeviceSharingError as error:
                if str(error) not in self._reported:
                    self._reported.add(str(error))
                    self._report(
                        f"trainer-{self._ranks.rank}: weights pass through host memory instead of "
                        f"CUDA IPC: {error}."
                    )
        return self._stage.write(version, read)

    def before_change(self) -> None:
        """Prepare for a change of the weights on this rank.

        Weights that a reader still uses in place are copied first. Raises OSError if memory is
        short for the copy; DamagedWeightsError as `verify` does.
        """
        if self._zero_copy is not None and self._published is not None:
            self.verify()
            self._zero_copy.move(self._stage)
            self._zero_copy.mark_changing()

    def verify(self) -> None:
        """Raise DamagedWeightsError if weights in shared memory differ from the published ones.

        Checkpoints and metrics made of such weights would be wrong too.
        """
        if self._zero_copy is not None:
            self._stage.verify()

    def weight_delta(
        self, manifest: WeightManifest, node: str, base: int | None
    ) -> WeightDelta | None:
        """Return the part of this rank's share that a remote node needs; None if it needs nothing.

        `base` is a version whose parts the node still has. May be called from any thread while the
        trainer goes on. Raises MemoryGone.
        """
        published = self._published
        if published is None or published.version != manifest.version:
            raise MemoryGone(f"version {manifest.version} of the weights is no longer available.")
        if node not in published.sending:
            sending = plan(self._as_staged(published.staging), (self._reader(node),))
            staged = sending.staged(self._name)
            published.sending[node] = [one for one in staged if node in one.nodes]
        segments = published.sending[node]
        if not segments:
            return None
        (own,) = (share for share in manifest.shares if share.rank == self._ranks.rank)

        def packed() -> tuple[WeightShare, Bytes]:
            with Weights(WeightManifest(version=manifest.version, shares=(own,))) as weights:
                weights.open_on(self._device)
                return pack(segments, own, lambda one: weights.read(one.name, one.box))

        return self._outbox.weight_delta(node, base, packed)

    def close(self) -> None:
        """Free the shared memory."""
        self._stage.close()
        if self._device_stage is not None:
            self._device_stage.close()

    def _part(self, tensor: torch.Tensor | AdaptedWeight, segment: Segment) -> torch.Tensor:
        if isinstance(tensor, AdaptedWeight):
            return tensor.part(segment.box)
        return local_part(tensor)[segment.box.slices_in(self._boxes[segment.name])]

    def _reader(self, node: str) -> Holder:
        return Holder(f"readers of {node}", node, self._wanted)

    def _as_staged(self, staging: ReallocationPlan) -> tuple[Holder, ...]:
        """Return the content of all ranks' shares."""
        return tuple(
            replace(source, holdings=tuple(map(self._held, staging.staged(source.rank))))
            for source in self._sources
        )

    def _held(self, segment: Segment) -> TensorShard:
        shape = self._shapes[segment.name]
        return TensorShard(name=segment.name, shape=shape, dtype=segment.dtype, box=segment.box)


def _name(rank: int) -> str:
    return f"rank {rank}"


def _local_box(tensor: torch.Tensor | AdaptedWeight) -> Box:
    return local_box(tensor.base if isinstance(tensor, AdaptedWeight) else tensor)


def _dtype(tensor: torch.Tensor | AdaptedWeight) -> torch.dtype:
    return torch.float32 if isinstance(tensor, AdaptedWeight) else tensor.dtype


def _with_whole_factors(tensor: torch.Tensor | AdaptedWeight) -> torch.Tensor | AdaptedWeight:
    return tensor.with_whole_factors() if isinstance(tensor, AdaptedWeight) else tensor
