"""Loading of weights: each rank reads its own part, directly into its master weights.

    model on the meta device ─► sharded (sharding.py) ─► memory for this rank's parts
                                                              ▲ read_weights, piece by piece
                                lazy tensors (weight_files.py) ┘

A rank does not read shards, experts or layers of other ranks.
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
    lazy_tensors: Mapping[str, LazyTensor],
    path: str | Path,
    ranks: Ranks,
) -> None:
    """Fill a model's parameters and buffers on this rank from lazy tensors. A collective.

    Raises ValueError, the same on every rank, for weights that are not finite.
    """
    bad = []
    for name, tensor in tensors.items():
        if name in lazy_tensors and local_part(tensor).numel():
            own = local_part(tensor).detach()
            _fill(own, local_box(tensor).slices, lazy_tensors[name])
            # Finite weights have a finite sum; only if it is not finite, each weight is checked.
            if isinstance(tensor, torch.nn.Parameter) and not torch.isfinite(own.sum()):
                bad += [name] if _num_bad(lazy_tensors[name]) else []
    if ranks.world_size > 1:
        bad = ranks.union(bad)
    if bad:
        first = min(bad, key=list(lazy_tensors).index)
        lazy = lazy_tensors[first]
        raise damaged(path, first, _num_bad(lazy), lazy.numel())


def _fill(own: torch.Tensor, index: Index, lazy: LazyTensor) -> None:
    for piece in pieces(index, lazy.itemsize):
        place = tuple(
            slice(part.start - all_.start, part.stop - all_.start)
            for part, all_ in zip(piece, index, strict=True)
        )
        own[place].copy_(lazy.read(piece))


def _num_bad(lazy: LazyTensor) -> int:
    return sum(int((~torch.isfinite(part)).sum()) for part in _parts(lazy))


def _parts(lazy: LazyTensor) -> Iterator[torch.Tensor]:
    for piece in pieces(whole_index(lazy.shape), lazy.itemsize):
        yield lazy.read(piece)
