"""The trainer's state on disk, readable with any number of ranks.

    parameters, Adam moments (sharded) + persistent buffers, step, policy_version, RNG
        ──► a rank's memory ──► HeldState.write, on every rank ──► finish_state ──► load_state

Every rank writes its own shards, without a word to the others: who writes what is agreed upon once,
before the first step. A reader with other shards takes the pieces that it needs. The format is that
of torch.distributed.checkpoint. Names are the Hugging Face names; tied parameters stand once.
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


@dataclass(frozen=True)
class StatePlan:
    """Which of a state's shards this rank writes, and what all ranks together write."""

    own: SavePlan
    whole: Metadata


def plan_state(state: Mapping[str, torch.Tensor], ranks: Ranks) -> StatePlan:
    """Who writes what of all states with these names and shapes: of what several ranks have, one of
    them. A collective.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state) | _also(policy_version=0))
    plans, whole = planner.create_global_plan(ranks.all(planner.create_local_plan()))
    return StatePlan(_Writer("").prepare_global_plan(plans)[ranks.rank], whole)


@dataclass(frozen=True, kw_only=True)
class HeldState:
    """A rank's part of a state in the host's memory, which stays as it is until `let_go`."""

    plan: StatePlan
    tensors: Mapping[str, torch.Tensor]
    policy_version: int
    let_go: Callable[[], None]

    def write(self, directory: Path) -> bytes:
        """Write what falls to this rank, in whatever thread. Returns what `finish_state` needs to
        know. Raises OSError for an unwritable directory or a full disk.
        """
        writer = _Writer(directory)
        writer.prepare_local_plan(self.plan.own)
        tensors = dict(self.tensors) | _also(policy_version=self.policy_version)
        try:
            results = writer.write_data(self.plan.own, _Planner(tensors)).value()
        except RuntimeError as error:
            # torch's zip writer ends with an error of its own where the disk is full.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        return pickle.dumps((self.plan.whole, results))


def finish_state(directory: Path, parts: Sequence[bytes]) -> None:
    """Make what every rank has written a state, by what their `write` returned."""
    results: list[list[WriteResult]] = []
    for part in parts:
        whole, written = pickle.loads(part)
        results.append(written)
    _Writer(directory).finish(whole, results)


class _Writer(FileSystemWriter):
    def __init__(self, directory: Path | str) -> None:
        super().__init__(directory, per_thread_copy_ahead=0)  # else it waits for the GPU's stream


class _Planner(DefaultSavePlanner):
    """Knows the tensors by their names alone: they are this rank's parts already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._tensors[index.fqn]


def _also(policy_version: int) -> dict[str, torch.Tensor]:
    """What a state on disk has beside its tensors."""
    return {"policy_version": torch.tensor(policy_version)}


def load_state(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    optimizer: AdamW,
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
    state |= {"rng": torch.get_rng_state()} | _also(policy_version=0)
    with _plain_errors(sharded):
        load(state, checkpoint_id=directory, no_dist=not sharded)
    torch.set_rng_state(state["rng"])
    return int(state["policy_version"])


def state_tensors(tensors: Mapping[str, torch.Tensor], optimizer: AdamW) -> dict[str, Any]:
    """Views of all state; moments that the optimizer has not made yet are made here, as zeros."""
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


def _check_names(directory: Path, state: Mapping[str, torch.Tensor]) -> None:
    stored = FileSystemReader(directory).read_metadata().state_dict_metadata
    for name, tensor in state.items():
        size = getattr(stored.get(name), "size", None)
        if size != tensor.shape:
            raise ValueError(
                f"{directory} does not fit this model: {name} is {size and tuple(size)} there and "
                f"{tuple(tensor.shape)} here; load it with the model.path and model.lora that it "
                "was saved with."
            )


@contextmanager
def _plain_errors(sharded: bool) -> Iterator[None]:
    """What went wrong on the first rank that failed, an OSError for instance, in place of torch's
    exception, which derives from BaseException and passes every handler of errors.
    """
    try:
        with warnings.catch_warnings():
            if not sharded:
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise first from error
