"""Bytes over a process group of two processes: a rank of the trainer and an importer.

    send(wire, parts) ──► [ bucket ][ bucket ] ... ──► receive(wire, parts)
                          wire.depth at a time

Each link has a group of its own, outside of torch's default group. So groups form and end one by
one, a dead process breaks only its own links, and each operation has a time limit.

gloo sends from and receives into the host memory of the caller, without another copy. NCCL needs
memory of the GPU: `DeviceWire` copies each bucket through one of two buffers there, so that one
bucket is copied while the other one is in transit. NCCL has not been run yet: the tests run
`DeviceWire` over gloo, with buffers in host memory.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rlsys.common.environment_variables import variables
from rlsys.reallocation.transport.link_epochs import Link
from rlsys.reallocation.transport.shared_memory import Bytes

# Small enough that two of them fit next to an engine on a GPU, large enough for full bandwidth.
BUCKET_BYTES = 32 * 2**20
# Buckets in transit at a time. Buffers on a GPU take its memory; buckets in host memory take none,
# and with several of them, the network does not wait for a thread to be scheduled.
DEVICE_DEPTH = 2
HOST_DEPTH = 8

# As cluster.heartbeat_timeout_s: a process that is silent for so long counts as dead.
FORM_LIMIT_S = 30.0
BUCKET_LIMIT_S = 30.0

_nccl_lock = threading.Lock()  # of the variables

SENDER, RECEIVER = 0, 1  # ranks in a group

# With these, torch raises NCCL's errors and timeouts in the thread that waits. By default it ends
# the whole process.
NCCL_VARIABLES = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}

Finish = Callable[[], object]


class LinkError(ConnectionError):
    """A link that did not form, broke or took too long. The message has both ends."""


class Wire(Protocol):
    """End of a link. Each method starts a transfer and returns the function that ends it."""

    depth: int
    """Maximum number of transfers that have not ended."""

    def send(self, number: int, bucket: torch.Tensor) -> Finish:
        """Send host bytes, which must not change until the end."""

    def receive(self, number: int, bucket: torch.Tensor) -> Finish:
        """Receive into host bytes."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Time limits in seconds: of forming a link, and of a bucket."""

    form_s: float = FORM_LIMIT_S
    bucket_s: float = BUCKET_LIMIT_S


DEFAULT_LIMITS = Limits()


def buckets(parts: Sequence[Bytes], bucket_bytes: int) -> Iterator[Bytes]:
    """Yield consecutive pieces of the parts, in order, each of at most `bucket_bytes`."""
    for part in parts:
        for begin in range(0, len(part), bucket_bytes):
            yield part[begin : begin + bucket_bytes]


def send(wire: Wire, parts: Sequence[Bytes]) -> None:
    """Send all parts."""
    _transfer(wire.send, parts, wire.depth)


def receive(wire: Wire, parts: Sequence[Bytes]) -> None:
    """Fill all parts, which have the sizes of the sender's."""
    _transfer(wire.receive, parts, wire.depth)


def _transfer(
    start: Callable[[int, torch.Tensor], Finish], parts: Sequence[Bytes], depth: int
) -> None:
    pending: deque[Finish] = deque()
    for number, bucket in enumerate(buckets(parts, BUCKET_BYTES)):
        if len(pending) == depth:
            pending.popleft()()
        pending.append(start(number, torch.from_numpy(bucket)))
    while pending:
        pending.popleft()()


class HostWire:
    """A group that transfers host memory."""

    depth = HOST_DEPTH

    def __init__(self, group: Any, side: int, limits: Limits) -> None:
        self._group = group
        self._other = 1 - side
        self._limit = timedelta(seconds=limits.bucket_s)

    def send(self, number: int, bucket: torch.Tensor) -> Finish:
        """See `Wire.send`."""
        return self._finish(self._group.send([bucket], self._other, number))

    def receive(self, number: int, bucket: torch.Tensor) -> Finish:
        """See `Wire.receive`."""
        return self._finish(self._group.recv([bucket], self._other, number))

    def _finish(self, work: dist.Work) -> Finish:
        return lambda: work.wait(self._limit)


class DeviceWire:
    """A group that transfers memory of a device, here of host bytes.

    Bucket n uses buffer n mod `depth`. It is free again, because `_transfer` ends bucket n - depth
    before it starts bucket n.
    """

    depth = DEVICE_DEPTH

    def __init__(self, group: Any, side: int, limits: Limits, device: torch.device) -> None:
        self._wire = HostWire(group, side, limits)
        # Copies on the default stream would wait for the trainer's kernels.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers = [
            torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device) for _ in range(self.depth)
        ]

    def send(self, number: int, bucket: torch.Tensor) -> Finish:
        """See `Wire.send`."""
        buffer = self._buffer(number, bucket)
        with torch.cuda.stream(self._stream):
            buffer.copy_(bucket)
            return self._wire.send(number, buffer)

    def receive(self, number: int, bucket: torch.Tensor) -> Finish:
        """See `Wire.receive`."""
        buffer = self._buffer(number, bucket)
        with torch.cuda.stream(self._stream):
            arrived = self._wire.receive(number, buffer)

        def finish() -> None:
            with torch.cuda.stream(self._stream):
                arrived()
                bucket.copy_(buffer)

        return finish

    def _buffer(self, number: int, bucket: torch.Tensor) -> torch.Tensor:
        return self._buffers[number % self.depth][: len(bucket)]


class Meeting:
    """Address at which importers meet a rank: a key-value store in the rank's process.

    `host` is the address of the rank's node.
    """

    def __init__(self, host: str) -> None:
        listening = socket.create_server((host, 0), family=_family(host))
        port: int = listening.getsockname()[1]
        self.address = host, port
        # With the descriptor, the store listens at this address only.
        self._server = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )


def joined(address: tuple[str, int], limits: Limits) -> Any:
    """Return the store of a Meeting.

    Each link needs its own, because a call waits for the calls of other threads to the same store.
    """
    limit = timedelta(seconds=limits.form_s)
    return dist.TCPStore(*address, is_master=False, timeout=limit)  # type: ignore[attr-defined]


def make_wire(
    link: Link, side: int, meeting: tuple[str, int], host: str, limits: Limits = DEFAULT_LIMITS
) -> Wire:
    """Connect one end of a link and return it.

    Args:
        link: The link, equal on both sides.
        side: SENDER or RECEIVER.
        meeting: Address of the sender's Meeting.
        host: Address of this process's node.
        limits: Time limits.
    """
    own = dist.PrefixStore(link.name, joined(meeting, limits))  # type: ignore[attr-defined]
    limit = timedelta(seconds=limits.form_s)
    own.set_timeout(limit)
    if link.kind == "gloo":
        return HostWire(_gloo(own, side, host, limit), side, limits)
    return DeviceWire(_nccl(own, side, limit), side, limits, gpu())


def gpu() -> torch.device:
    """Return the GPU of this process."""
    return torch.device("cuda", torch.cuda.current_device())


def _gloo(store: Any, side: int, host: str, limit: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._threads = 1
    options._timeout = limit
    return gloo(store, side, 2, options)


def _nccl(store: Any, side: int, limit: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = limit
    with _nccl_lock, variables(NCCL_VARIABLES):
        return nccl(store, side, 2, options)  # connects when it is used


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]


class Wires:
    """Connected ends of links, at most one per key.

    A link to the same place replaces the previous one.
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[Link, Wire]] = {}
        self._lock = threading.Lock()

    def get(self, key: str, link: Link, make: Callable[[], Wire]) -> Wire:
        """Return the end of a link, after connecting it if necessary."""
        with self._lock:
            found = self._open.get(key)
        if found is not None and found[0] == link:
            return found[1]
        wire = make()  # takes as long as the other end
        with self._lock:
            found = self._open.get(key)
            if found is None or found[0].order < link.order:
                self._open[key] = link, wire
        return wire

    def drop(self, key: str, link: Link) -> None:
        """Close the end of a link, which the other end notices."""
        with self._lock:
            found = self._open.get(key)
            if found is not None and found[0] == link:
                del self._open[key]

    def keep(self, keys: Collection[str]) -> None:
        """Close the links of all other keys."""
        with self._lock:
            for key in self._open.keys() - set(keys):
                del self._open[key]
