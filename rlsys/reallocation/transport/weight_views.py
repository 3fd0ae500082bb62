"""A version of a model's weights as readers see it: the shares of several ranks as one model.

manifest ──► Weights ── check(model), verify() ──► parts(), read(name, box) ──► close()
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise

import torch

from rlsys.errors import require
from rlsys.reallocation.plan import Segment, plan
from rlsys.reallocation.shards import Box, Holder, holdings
from rlsys.reallocation.traffic import without
from rlsys.reallocation.transport.device_staging import DeviceShare
from rlsys.reallocation.transport.shared_device import DeviceSharingError, SharedDevice
from rlsys.reallocation.transport.shared_memory import Bytes, MemoryGone
from rlsys.reallocation.transport.staging import (
    DamagedWeightsError,
    Mappings,
    Share,
    StagingBuffer,
)
from rlsys.types import WeightManifest, WeightShare

Tensors = Mapping[str, torch.Tensor]  # by Hugging Face name, see model_tensors

# Errors of a version, by name, which engines pass on from their processes.
UPDATE_ERRORS: Mapping[str, type[Exception]] = {
    one.__name__: one for one in (DamagedWeightsError, DeviceSharingError, MemoryGone)
}


class Weights:
    """A version, opened at once; the trainer does not change it until `close`.

    Tensors in the memory of devices can be read after `open_on`.

    Raises MemoryGone if a share is gone, DamagedWeightsError if one is not what was written.
    """

    def __init__(self, manifest: WeightManifest, mappings: Mappings | None = None) -> None:
        self.version = manifest.version
        self._shares: list[Share] = []
        self._parts: dict[str, list[tuple[Segment, Share]]] = defaultdict(list)
        if mappings is not None:
            mappings.keep([one.rank for one in manifest.shares])
        with ExitStack() as opened:
            for one in manifest.shares:
                share = DeviceShare(one) if one.on_device else Share(one, mappings)
                opened.callback(share.close)
                self._shares.append(share)
                for segment in share.segments:
                    self._parts[segment.name].append((segment, share))
            self._opened = opened.pop_all()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Allow the trainer to reuse the memory."""
        self._parts.clear()
        self._opened.close()

    @property
    def local(self) -> WeightManifest:
        """The manifest with paths that this process keeps open."""
        return WeightManifest(
            version=self.version, shares=tuple(share.local for share in self._shares)
        )

    def contents(self) -> Iterator[tuple[WeightShare, Bytes]]:
        """Yield each share and its bytes, to send them to another node."""
        for share in self._shares:
            yield share.share, share.content

    def verify(self) -> None:
        """Raise DamagedWeightsError unless all bytes are those that were staged.

        Bytes in the memory of devices are verified by `open_on`.
        """
        for share in self._shares:
            share.verify()

    def open_on(self, device: SharedDevice | None) -> None:
        """Open and verify what is in the memory of devices, for the reader's `device`, if any.

        Raises DeviceSharingError if the device cannot read it, DamagedWeightsError as `verify`.
        """
        for share in self._shares:
            if isinstance(share, DeviceShare):
                share.open_on(device)

    def require_owners(self) -> None:
        """Raise MemoryGone if a process has died whose device's memory is opened."""
        for share in self._shares:
            if isinstance(share, DeviceShare):
                share.require_owner()

    def check(self, model: Tensors) -> None:
        """Raise InvalidValue unless the version has each element of these tensors exactly once.

        The tensors may be on the meta device. Types must fit, and other tensors must be absent. The
        error has the first names.
        """
        found = self.shapes
        some = {name for name, tensor in model.items() if tensor.numel()}
        problems = [
            *(f"{name} is missing" for name in some - found.keys()),
            *(f"{name} is not in the model" for name in found.keys() - model.keys()),
            *(
                f"{name} has {problem}"
                for name in found.keys() & model.keys()
                if (problem := self._misfit(name, found[name], model[name]))
            ),
        ]
        require(
            not problems,
            "weights of version",
            self.version,
            rule=f"do not match the model in {len(problems)} tensors: "
            f"{'; '.join(sorted(problems)[:4])}",
            fix="Load the same model in trainer and generation engines.",
        )

    def _misfit(self, name: str, found: tuple[int, ...], tensor: torch.Tensor) -> str | None:
        shape = tuple(tensor.shape)
        if found != shape:
            return f"shape {found} instead of {shape}"
        for dtype in {segment.dtype for segment, _ in self._parts[name]} - {tensor.dtype}:
            if not (dtype.is_floating_point and tensor.dtype.is_floating_point):
                return f"dtype {dtype} instead of {tensor.dtype}"
        boxes = [segment.box for segment, _ in self._parts[name]]
        num_elements = sum(box.num_elements for box in boxes)
        if num_elements != Box.whole(shape).num_elements or without([Box.whole(shape)], boxes):
            return f"{num_elements} elements in parts that do not cover {shape} exactly once"
        return None

    def parts(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Yield each tensor's name, box and values, in place.

        The values must not be changed, or used after `close`.
        """
        for name, parts in self._parts.items():
            for segment, share in parts:
                yield name, segment.box, share.view(segment)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor, as far as its parts reach."""
        found: dict[str, tuple[int, ...]] = {}
        for name, parts in self._parts.items():
            for segment, _ in parts:
                stops = tuple(stop for _, stop in segment.box.bounds)
                found[name] = tuple(map(max, stops, found.get(name, stops)))
        return found

    def joined(self, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor | None:
        """Return consecutive tensors in memory as one tensor of all their rows, without a copy.

        None unless one rank staged them consecutively, in this precision.
        """
        parts = [share.view(one) for name in names for one, share in self._parts[name]]
        if len(parts) != len(names) or not all(one.numel() and one.dtype is dtype for one in parts):
            return None
        if not all(_follows(one, before) for before, one in pairwise(parts)):
            return None
        first = parts[0]
        if len(parts) == 1:
            return first
        shape = (sum(map(len, parts)), *first.shape[1:])
        return first.as_strided(shape, first.stride())

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor: a view if one rank staged all of it, else a copy."""
        overlaps = [
            (shared, share.view(segment)[shared.slices_in(segment.box)])
            for segment, share in self._parts[name]
            if (shared := segment.box.overlap(box)) is not None
        ]
        if len(overlaps) == 1:
            return overlaps[0][1]
        first, share = self._parts[name][0]
        whole = share.view(first).new_empty(box.shape)
        for shared, part in overlaps:
            whole[shared.slices_in(box)] = part
        return whole


def _follows(one: torch.Tensor, before: torch.Tensor) -> bool:
    """Return whether a tensor begins in memory where another ends."""
    is_same = one.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    return is_same and one.data_ptr() == before.data_ptr() + before.nbytes


def open_verified(
    manifest: WeightManifest, model: Tensors, mappings: Mappings | None = None
) -> Weights:
    """Open a version, and check that it fits a model and is undamaged.

    `open_on` must follow for what is in the memory of devices.

    Raises as Weights, `check` and `verify` do.
    """
    with ExitStack() as opened:
        weights = opened.enter_context(Weights(manifest, mappings))
        weights.check(model)
        weights.verify()
        opened.pop_all()
    return weights


def stage_whole(
    version: int, tensors: Mapping[str, torch.Tensor], *, node: str = ""
) -> tuple[StagingBuffer, WeightManifest]:
    """Stage a version of weights that one process has whole, without a trainer.

    The version lasts as long as the returned buffer. Raises OSError if there is too little memory.
    """
    held = tuple(holdings(tensors))
    staging = plan((Holder("rank", node, held),), (Holder("reader", node, held),))
    stage = StagingBuffer(staging.staged("rank"), node=node)
    share = stage.write(version, lambda one: tensors[one.name][one.box.slices])
    return stage, WeightManifest(version=version, shares=(share,))
