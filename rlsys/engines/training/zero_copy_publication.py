"""Publication without a copy: a rank's weights are in the memory that readers map.

    tensors ── move ──► StagingBuffer ── publish: checksums in place
       ▲                     │
       └── move ◄────────────┘ before they change: only if a reader still uses the published
                               weights, the tensors move to a copy in other memory

This is possible for whole tensors in CPU memory, in the precision in which they are published: one
rank in float32. All other weights are copied into their share (publisher.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlsys.engines.devices.offload import return_freed_memory
from rlsys.reallocation.transport.staging import StagingBuffer
from rlsys.reallocation.transport.tensor_copies import copy_parts


def zero_copy_tensors(
    tensors: Mapping[str, object], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.Tensor] | None:
    """Return the tensors if all can be published in place in their `dtypes`, None otherwise."""
    plain = {
        name: one
        for name, one in tensors.items()
        if isinstance(one, torch.Tensor)
        and type(one) in (torch.Tensor, torch.nn.Parameter)
        and one.device.type == "cpu"
        and one.dtype is dtypes[name]
        and one.is_contiguous()
    }
    return plain if len(plain) == len(tensors) else None


class ZeroCopyWeights:
    """The trainer's own tensors, as `zero_copy_tensors` returns them. They keep their identity."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._stage: StagingBuffer | None = None
        self._versions: int | None = None  # torch's version counters at the last publication

    @torch.no_grad()
    def move(self, stage: StagingBuffer) -> None:
        """Move the tensors to memory of `stage` that no reader uses, and lock readers out of it.

        Raises OSError if memory is short; the tensors then stay in place.
        """
        stage.begin()
        parts = [(self._tensors[segment.name], part) for segment, part in stage.parts]
        away = [(part, one.data) for one, part in parts if part.data_ptr() != one.data_ptr()]
        if away:
            copy_parts(away)
            for one, part in parts:
                one.data = part
        if stage is not self._stage:
            self._stage = stage
            away.clear()
            return_freed_memory()

    def published(self) -> None:
        """Record that the tensors must not change before the next `move`."""
        self._versions = self._count()

    def check(self) -> None:
        """Assert that the tensors have not changed since, according to torch's counters."""
        assert self._versions in (None, self._count()), (
            "weights changed while readers may use them; call before_change first"
        )

    def mark_changing(self) -> None:
        """Allow the tensors to change."""
        self._versions = None

    def _count(self) -> int:
        return sum(one._version for one in self._tensors.values())
