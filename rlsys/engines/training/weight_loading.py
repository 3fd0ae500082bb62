"""Each rank reads its part of the weights, straight into its masters.

    model on the meta device ─► laid out (sharding.py) ─► memory for this rank's parts alone
                                                              ▲ read_weights, piece by piece
                                    promises (weight_files.py) ┘

What a rank does not hold (other shards, other experts, layers of other stages) it does not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from rlsys.engines.models.causal_lm import damaged
from rlsys.engines.models.lazy_tensors import Index, LazyTensor, pieces, whole_index
from rlsys.engines.training.ranks import Ranks
from rlsys.reallocation.shards import local_box, local_part


def read_weights(
    tensors: Mapping[str, torch.Tensor],
    promises: Mapping[str, LazyTensor],
    path: str | Path,
    ranks: Ranks,
) -> None:
    """Fill what of `tensors`, a model's parameters and buffers on this rank, is promised. A
    collective.

    Raises ValueError, the same on every rank, for weights that are no numbers.
    """
    bad = []
    for name, tensor in tensors.items():
        if name in promises and local_part(tensor).numel():
            own = local_part(tensor).detach()
            _fill(own, local_box(tensor).slices, promises[name])
            # The sum of finite weights is finite; only for one that is not, each has to be seen.
            if isinstance(tensor, torch.nn.Parameter) and not torch.isfinite(own.sum()):
                bad += [name] if _num_bad(promises[name]) else []
    if ranks.world_size > 1:
        bad = ranks.union(bad)
    if bad:
        first = min(bad, key=list(promises).index)
        raise damaged(path, first, _num_bad(promises[first]), promises[first].numel())


def _fill(own: torch.Tensor, index: Index, promise: LazyTensor) -> None:
    for piece in pieces(index, promise.itemsize):
        place = tuple(
            slice(part.start - all_.start, part.stop - all_.start)
            for part, all_ in zip(piece, index, strict=True)
        )
        own[place].copy_(promise.read(piece))


def _num_bad(promise: LazyTensor) -> int:
    return sum(int((~torch.isfinite(part)).sum()) for part in _parts(promise))


def _parts(promise: LazyTensor) -> Iterator[torch.Tensor]:
    for piece in pieces(whole_index(promise.shape), promise.itemsize):
        yield promise.read(piece)
