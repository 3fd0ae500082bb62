"""Choice of the network interface for communication between ranks.

By default gloo uses the interface that the machine's host name resolves to. On many systems that is
the loopback interface, which other nodes cannot reach. On others it is one that anyone can reach,
and gloo listens there even for a group of one rank. NCCL by default uses an outer interface.
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
    """Return environment variables that restrict gloo and NCCL to the loopback interface.

    Processes of one node use them. The result is empty if the interface's name is unknown.
    """
    name = interface_towards(LOOPBACK)
    # Without "=" NCCL would use every interface whose name has this prefix.
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}


@contextmanager
def on_loopback() -> Iterator[None]:
    """Make gloo groups that are created in the block use the loopback interface.

    NCCL chooses its interface at a group's first collective.
    """
    with variables(loopback_variables()):
        yield


def interface_towards(address: str) -> str | None:
    """Return the name of the interface that packets to an IPv4 address or host name leave from.

    None if it is unknown: over IPv6, or on systems other than Linux.
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
            except OSError:  # no IPv4 address
                continue
            if socket.inet_ntoa(reply[20:24]) == here:
                return name
    return None
