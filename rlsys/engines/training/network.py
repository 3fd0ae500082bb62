"""Which network interface leads to another rank.

Gloo by itself takes the one that the machine's own name resolves to. On many systems that is the
loopback interface, over which no other node answers.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys

SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's IPv4 address


def interface_towards(address: str) -> str | None:
    """Name of the interface that packets to an IPv4 address or host name leave from. None where
    that cannot be told: over IPv6, or on systems other than Linux."""
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
