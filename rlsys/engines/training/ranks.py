"""The ranks of one trainer: process group and small collectives.

FSDP2 exchanges gradients and parameters. Counts and sums of a step go through the methods of
`Ranks`, on the CPU. A single rank sends nothing and needs no process group.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from rlsys.engines.devices.network import interface_towards
from rlsys.errors import InvalidValue

T = TypeVar("T")


def init_process_group(
    rank: int, world_size: int, master_address: str, port: int, device: str, timeout_s: float
) -> None:
    """Join the other ranks at rank 0's address: gloo on the CPU, plus NCCL for "cuda:...".

    `timeout_s` also limits every later collective. Raises TimeoutError if a rank does not join.
    """
    if interface := interface_towards(master_address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            master_address,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timeout,
            # Otherwise the store would listen on every interface.
            master_listen_fd=_listening(master_address, port) if rank == 0 else None,
        )
        dist.init_process_group(
            _backend(device), store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise TimeoutError(
            f"trainer rank {rank} of {world_size} did not reach the other ranks at "
            f"{master_address}:{port} within {timeout_s:g} s ({error}). Check that every rank "
            "started and can connect to that address, or raise the timeout."
        ) from error


def _listening(address: str, port: int) -> int:
    """Return the descriptor of a socket that listens at this address only."""
    family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where[:2], family=family).detach()


def init_single_process_group(device: str) -> None:
    """Create a group of one rank, for code that requires a process group."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)


def lost_contact(error: BaseException) -> bool:
    """Return whether a collective failed because another rank or the network is gone."""
    # NCCL and the rendezvous have exceptions of their own; gloo raises a plain RuntimeError.
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return type(error) is RuntimeError and ("gloo" in text or "caused pair closure" in text)


def _backend(device: str) -> str:
    if torch.device(device).type != "cuda":
        return "gloo"
    torch.cuda.set_device(torch.device(device).index or 0)
    return "cpu:gloo,cuda:nccl"


@dataclass(frozen=True)
class Ranks:
    """Collectives of the trainer's ranks."""

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise InvalidValue(
                "rank",
                self.rank,
                rule=f"must be from 0 to {self.world_size - 1}",
                fix="Number the ranks from 0.",
            )
        joined = dist.get_world_size() if dist.is_initialized() else 1
        if joined != self.world_size:
            raise InvalidValue(
                "world_size",
                self.world_size,
                rule=f"{joined} ranks have joined",
                fix="Call init_process_group with the same world_size first.",
            )

    def max(self, value: int) -> int:
        """Return the maximum over all ranks."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def gather(self, vector: torch.Tensor) -> torch.Tensor:
        """Return every rank's vector [K], by rank: [world_size, K]."""
        if self.world_size == 1:
            return vector[None]
        gathered = vector.new_empty(self.world_size * len(vector))
        dist.all_gather_single(gathered, vector)
        return gathered.view(self.world_size, -1)

    def all(self, own: T) -> list[T]:
        """Return every rank's object, by rank."""
        if self.world_size == 1:
            return [own]
        found = [own] * self.world_size
        dist.all_gather_object(found, own)
        return found

    def union(self, names: Iterable[str]) -> list[str]:
        """Return the names of all ranks, sorted.

        Ranks exchange a digest first, and the names only if digests differ.
        """
        own = sorted(names)
        digest = hashlib.blake2b("\0".join(own).encode(), digest_size=8).digest()
        digests = self.gather(torch.tensor([int.from_bytes(digest, signed=True)]))
        if bool((digests == digests[0]).all()):
            return own
        return sorted({name for some in self.all(own) for name in some})

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every rank if any has an error, so that none waits for a failed rank."""
        if not self.max(error is not None):
            return
        raise error or RuntimeError(
            f"trainer rank {self.rank} stopped because another rank failed; see its error."
        )
