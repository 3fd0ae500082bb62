"""The trainer's state on disk, readable with any number of ranks.

    parameters, Adam moments (sharded) + persistent buffers, step, policy_version, RNG
        ──► torch.distributed.checkpoint

Every rank writes its own shards; a reader with other shards takes the pieces that it needs. Names
are the Hugging Face names; tied parameters stand once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class _Writer(FileSystemWriter):
    """Raises a full disk's OSError where torch's zip writer ends with an error of its own."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def save_state(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    optimizer: torch.optim.AdamW,
    policy_version: int,
    *,
    sharded: bool,
) -> None:
    """Write `tensors`, a model's parameters and buffers, and what the optimizer has of them; a
    collective if `sharded`. `directory` must not hold a state yet.

    Raises OSError for an unwritable directory or a full disk.
    """
    state = state_tensors(tensors, optimizer)
    state["policy_version"] = torch.tensor(policy_version)
    state["rng"] = torch.get_rng_state()
    with _plain_errors(sharded):
        save(state, storage_writer=_Writer(directory), no_dist=not sharded)


def load_state(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    optimizer: torch.optim.AdamW,
    *,
    sharded: bool,
) -> int:
    """Fill tensors and optimizer in place; returns the policy_version.

    Raises ValueError if the directory holds no state, or one of another model.
    """
    if not (directory / ".metadata").is_file():
        raise ValueError(f"{directory} holds no trainer state; name a directory that save() wrote.")
    state = state_tensors(tensors, optimizer)
    _check_names(directory, state)
    state["policy_version"] = torch.tensor(0)
    state["rng"] = torch.get_rng_state()
    with _plain_errors(sharded):
        load(state, checkpoint_id=directory, no_dist=not sharded)
    torch.set_rng_state(state["rng"])
    return int(state["policy_version"])


def state_tensors(
    tensors: Mapping[str, torch.Tensor], optimizer: torch.optim.AdamW
) -> dict[str, Any]:
    """Views of all state; moments that the optimizer has not made yet are made here, as zeros."""
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, nn.Parameter):
            state[f"buffer.{name}"] = tensor
            continue
        moments = optimizer.state[tensor]
        if not moments:
            moments["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
            moments["exp_avg"] = torch.zeros_like(tensor)
            moments["exp_avg_sq"] = torch.zeros_like(tensor)
        state[f"parameter.{name}"] = tensor.detach()
        for key in ("step", "exp_avg", "exp_avg_sq"):
            state[f"{key}.{name}"] = moments[key].detach()
    return state


def _check_names(directory: Path, state: Mapping[str, torch.Tensor]) -> None:
    stored = FileSystemReader(directory).read_metadata().state_dict_metadata
    for name, tensor in state.items():
        size = getattr(stored.get(name), "size", None)
        if size != tensor.shape:
            raise ValueError(
                f"{directory} does not fit this model: {name} is {size and tuple(size)} there and "
                f"{tuple(tensor.shape)} here; load it with the model.path that it was saved with."
            )


@contextmanager
def _plain_errors(sharded: bool) -> Iterator[None]:
    """What went wrong on the first rank that failed, an OSError for instance, in place of torch's
    exception, which derives from BaseException and passes every handler of errors."""
    try:
        with warnings.catch_warnings():
            if not sharded:
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise first from error
