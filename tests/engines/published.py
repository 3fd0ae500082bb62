"""Versions of weights for tests: published without a trainer, and read as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from rlsys.reallocation.shards import Box
from rlsys.reallocation.transport.shared_device import SharedDevice
from rlsys.reallocation.transport.shared_memory import Bytes, map_shared
from rlsys.reallocation.transport.staging import StagingBuffer
from rlsys.reallocation.transport.weight_views import Weights, stage_whole
from rlsys.types import WeightManifest, WeightShare

STAGES: list[StagingBuffer] = []  # each keeps its version until the tests end


def publish(version: int, named: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
    stage, manifest = stage_whole(version, {name: tensor.detach() for name, tensor in named})
    STAGES.append(stage)
    return manifest


def read_all(
    manifest: WeightManifest, device: SharedDevice | None = None
) -> dict[str, torch.Tensor]:
    """Return copies of all tensors. Raises MemoryGone."""
    with Weights(manifest) as weights:
        weights.verify()
        weights.open_on(device)
        shapes = weights.shapes
        weights.check({n: part.new_empty(shapes[n]) for n, _, part in weights.parts()})
        return {n: weights.read(n, Box.whole(shape)).clone() for n, shape in shapes.items()}


def writable(share: WeightShare) -> Bytes:
    """Return the bytes of a share in host memory, for a test that damages them."""
    descriptor = os.open(share.path, os.O_RDWR)
    try:
        return map_shared(descriptor)
    finally:
        os.close(descriptor)


def is_there(manifest: WeightManifest) -> bool:
    try:
        Weights(manifest).close()
    except FileNotFoundError:
        return False
    return True
