"""A rank's weights that lie where readers find them, so that nothing is copied to publish them.

    tensors ── move_in ──► Stage ── publish: sums them where they are
       ▲                     │
       └── move_out ◄────────┘ before they change: nothing, or, where a reader still computes with
                               what was published, a copy in other memory, which the tensors move to

That is possible for whole tensors in the precision in which they are published, in the memory of
the CPU: one rank in float32. All other weights are copied into their share (publisher.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlsys.engines.devices.offload import return_freed_memory
from rlsys.reallocation.transport.staging import StagingBuffer, copy_parts


def lying_in_share(
    tensors: Mapping[str, object], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.Tensor] | None:
    """The tensors, if all of them can lie there; `dtypes`: in which each is published."""
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
    """`tensors` that `lying_in_share` gave; they are the trainer's own, and keep their identity."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._stage: StagingBuffer | None = None
        self._versions: int | None = None  # of what was published last, as torch counts

    @torch.no_grad()
    def move(self, stage: StagingBuffer) -> None:
        """Be in memory of the stage that nobody reads, and keep readers out of it. Raises OSError
        where memory is short; the tensors stay where they are then.
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
        """The tensors are not to change before the next `move`."""
        self._versions = self._count()

    def check(self) -> None:
        """They have not changed since, as far as torch knows."""
        assert self._versions in (None, self._count()), (
            "weights have changed where readers may compute with them; call before_change first"
        )

    def changing(self) -> None:
        self._versions = None

    def _count(self) -> int:
        return sum(one._version for one in self._tensors.values())
