"""The ranks of one trainer: how they meet, and the few small things that they agree on.

Gradients and parameters travel inside FSDP2. What is left, counts and sums of one step, goes
through the methods of `Ranks`, on the CPU. One rank sends nothing and needs no process group.
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

T = TypeVar("T")


def init_process_group(
    rank: int, world_size: int, master_address: str, port: int, device: str, timeout_s: float
) -> None:
    """Meet the other ranks at rank 0's address; gloo on the CPU, NCCL beside it for "cuda:...".

    `timeout_s` also limits every later collective. Raises TimeoutError if they do not all come.
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
            # Else it would listen on every interface.
            master_listen_fd=_listening(master_address, port) if rank == 0 else None,
        )
        dist.init_process_group(
            _backend(device), store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise TimeoutError(
            f"trainer rank {rank} of {world_size} did not meet the others at "
            f"{master_address}:{port} within {timeout_s:g} s ({error}); see whether every rank "
            "started and reaches that address, or allow more time."
        ) from error


def _listening(address: str, port: int) -> int:
    """The descriptor of a socket that takes connections at this address alone."""
    family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where[:2], family=family).detach()


def init_single_process_group(device: str) -> None:
    """A group of one rank, for what cannot do without: nobody to meet, nothing to wait for."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)


def lost_contact(error: BaseException) -> bool:
    """Whether a collective failed because another rank, or the way to it, is gone."""
    # NCCL and the rendezvous have exceptions of their own; gloo says it in a plain RuntimeError.
    if isinstance(error, dist.DistError):
        return True
    said = str(error)
    return type(error) is RuntimeError and ("gloo" in said or "caused pair closure" in said)


def _backend(device: str) -> str:
    if torch.device(device).type != "cuda":
        return "gloo"
    torch.cuda.set_device(torch.device(device).index or 0)
    return "cpu:gloo,cuda:nccl"


@dataclass(frozen=True)
class Ranks:
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} lies outside 0 .. {self.world_size - 1}.")
        met = dist.get_world_size() if dist.is_initialized() else 1
        if met != self.world_size:
            raise ValueError(
                f"world_size={self.world_size}, but {met} ranks have met; call init_process_group "
                "with the same world_size first."
            )

    def max(self, value: int) -> int:
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def gather(self, vector: torch.Tensor) -> torch.Tensor:
        """Every rank's vector [K], by rank: [world_size, K], the same on all of them."""
        if self.world_size == 1:
            return vector[None]
        gathered = vector.new_empty(self.world_size * len(vector))
        dist.all_gather_single(gathered, vector)
        return gathered.view(self.world_size, -1)

    def all(self, own: T) -> list[T]:
        """Every rank's object, by rank: the same on all of them."""
        if self.world_size == 1:
            return [own]
        found = [own] * self.world_size
        dist.all_gather_object(found, own)
        return found

    def union(self, names: Iterable[str]) -> list[str]:
        """Of all ranks' names, sorted. They travel only where not all ranks have the same, which a
        digest tells.
        """
        own = sorted(names)
        digest = hashlib.blake2b("\0".join(own).encode(), digest_size=8).digest()
        digests = self.gather(torch.tensor([int.from_bytes(digest, signed=True)]))
        if bool((digests == digests[0]).all()):
            return own
        return sorted({name for some in self.all(own) for name in some})

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every rank if any of them has an error: none waits for one that gave up."""
        if not self.max(error is not None):
            return
        raise error or RuntimeError(
            f"trainer rank {self.rank} stopped because another rank failed; see its error."
        )
