"""Which network interface leads to another rank, and how libraries are kept to the loopback one.

Gloo by itself takes the one that the machine's own name resolves to. On many systems that is the
loopback interface, over which no other node answers; on others one on which anybody else does. It
listens there even for one rank, which has nobody to hear. NCCL takes an outer one by itself.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rlsys.common.environment_variables import variables

LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's IPv4 address


def loopback_variables() -> dict[str, str]:
    """Environment variables for processes of one node: gloo and NCCL meet on the loopback interface
    alone. Empty where its name cannot be told.
    """
    name = interface_towards(LOOPBACK)
    # NCCL would take every interface whose name begins so.
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}


@contextmanager
def on_loopback() -> Iterator[None]:
    """Groups of gloo's that are made in the block meet on the loopback interface, whatever the
    environment says. (NCCL chooses at a group's first collective.)
    """
    with variables(loopback_variables()):
        yield


def interface_towards(address: str) -> str | None:
    """Name of the interface that packets to an IPv4 address or host name leave from. None where
    that cannot be told: over IPv6, or on systems other than Linux.
    """
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 1))  # sends nothing: it only chooses a route
        except OSError:
            return None
        here = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                reply = fcntl.ioctl(probe, SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(reply[20:24]) == here:
                return name
    return None
