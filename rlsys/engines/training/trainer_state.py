"""The trainer's state on disk, readable with any number of ranks.

    parameters, Adam moments (sharded) + persistent buffers, step, policy_version, RNG
        ──► a rank's memory ──► HeldState.write, on every rank ──► finish_state ──► load_state

Every rank writes its own shards without communication: the distribution is planned once, before the
first step. A reader with other shards reads the pieces that it needs. The format is that of
torch.distributed.checkpoint. Names are the Hugging Face names; tied parameters occur once.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult

from rlsys.engines.training.optimizer import MOMENTS, AdamW
from rlsys.engines.training.ranks import Ranks
from rlsys.errors import InvalidValue


@dataclass(frozen=True)
class StatePlan:
    """The shards that this rank writes, and those that all ranks write together."""

    own: SavePlan
    whole: Metadata


def plan_state(state: Mapping[str, torch.Tensor], ranks: Ranks) -> StatePlan:
    """Plan which rank writes which shard of states with these names and shapes. A collective.

    One rank writes what several ranks have.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state) | _extra_tensors(policy_version=0))
    plans, whole = planner.create_global_plan(ranks.all(planner.create_local_plan()))
    return StatePlan(_Writer("").prepare_global_plan(plans)[ranks.rank], whole)


@dataclass(frozen=True, kw_only=True)
class HeldState:
    """A rank's part of a state in host memory, which does not change until `release`."""

    plan: StatePlan
    tensors: Mapping[str, torch.Tensor]
    policy_version: int
    release: Callable[[], None]

    def write(self, directory: Path) -> bytes:
        """Write this rank's shards and return the input of `finish_state`. Any thread may call it.

        Raises OSError for an unwritable directory or a full disk.
        """
        writer = _Writer(directory)
        writer.prepare_local_plan(self.plan.own)
        tensors = dict(self.tensors) | _extra_tensors(policy_version=self.policy_version)
        try:
            results = writer.write_data(self.plan.own, _Planner(tensors)).value()
        except RuntimeError as error:
            # torch's zip writer raises an error of its own if the disk is full.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        return pickle.dumps((self.plan.whole, results))


def finish_state(directory: Path, parts: Sequence[bytes]) -> None:
    """Complete a state that every rank has written; `parts` are what `write` returned."""
    results: list[list[WriteResult]] = []
    for part in parts:
        whole, written = pickle.loads(part)
        results.append(written)
    _Writer(directory).finish(whole, results)


class _Writer(FileSystemWriter):
    def __init__(self, directory: Path | str) -> None:
        # Without this argument it waits for the GPU's stream.
        super().__init__(directory, per_thread_copy_ahead=0)


class _Planner(DefaultSavePlanner):
    """Planner that finds tensors by name, because they are this rank's parts already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._tensors[index.fqn]


def _extra_tensors(policy_version: int) -> dict[str, torch.Tensor]:
    """Return the tensors that a state on disk has in addition."""
    return {"policy_version": torch.tensor(policy_version)}


def load_state(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    optimizer: AdamW,
    *,
    sharded: bool,
) -> int:
    """Fill tensors and optimizer in place and return the policy_version.

    Raises ValueError if the directory has no state, or one of another model.
    """
    if not (directory / ".metadata").is_file():
        raise InvalidValue(
            str(directory),
            rule="the directory has no trainer state",
            fix="Name a directory that save() wrote.",
        )
    state = state_tensors(tensors, optimizer)
    _check_names(directory, state)
    state |= {"rng": torch.get_rng_state()} | _extra_tensors(policy_version=0)
    with _plain_errors(sharded):
        load(state, checkpoint_id=directory, no_dist=not sharded)
    torch.set_rng_state(state["rng"])
    return int(state["policy_version"])


def state_tensors(tensors: Mapping[str, torch.Tensor], optimizer: AdamW) -> dict[str, Any]:
    """Return views of the whole state; missing moments are created as zeros."""
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, nn.Parameter):
            state[f"buffer.{name}"] = tensor
            continue
        moments = optimizer.moments(tensor)
        state[f"parameter.{name}"] = tensor.detach()
        for key in ("step", *MOMENTS):
            state[f"{key}.{name}"] = moments[key].detach()
    return state


def stored_sizes(directory: Path) -> dict[str, torch.Size]:
    """Return the sizes of the tensors in a state, by name; empty without a state."""
    if not (directory / ".metadata").is_file():
        return {}
    stored = FileSystemReader(directory).read_metadata().state_dict_metadata
    sizes = {name: getattr(one, "size", None) for name, one in stored.items()}
    return {name: size for name, size in sizes.items() if size is not None}


def _check_names(directory: Path, state: Mapping[str, torch.Tensor]) -> None:
    stored = stored_sizes(directory)
    for name, tensor in state.items():
        size = stored.get(name)
        if size != tensor.shape:
            raise InvalidValue(
                str(directory),
                rule=f"the state is of another model: {name} has shape {size and tuple(size)} "
                f"there and {tuple(tensor.shape)} here",
                fix="Load it with the model.path and model.lora that it was saved with.",
            )


@contextmanager
def _plain_errors(sharded: bool) -> Iterator[None]:
    """Raise the first failed rank's own error in place of torch's CheckpointException.

    That one derives from BaseException and passes every handler of errors.
    """
    try:
        with warnings.catch_warnings():
            if not sharded:
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise first from error
