"""Modules that a local process loads, as its `load`: what it does is an argument."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from rlsys.common.child_channel import ChildChannel


def load(*shared: int, does: str) -> Callable[[ChildChannel], None]:
    """Return the function that serves, or fail in one of several ways."""
    if does == "raise":
        raise ZeroDivisionError("the cause")
    if does == "exit":
        os._exit(3)
    if does == "hang":
        time.sleep(3600)

    def serve(channel: ChildChannel) -> None:
        channel.send({"ready": os.getpid()})
        while True:
            act, value = channel.receive()
            if act == "echo":
                channel.send({"echo": value})
            elif act == "share":
                socket.socket(fileno=shared[0]).sendall(value)
            elif act == "forge":
                os.write(channel.fileno(), b"\x08\0\0\0\0\0\0\0not json")
                time.sleep(3600)
            elif act == "fork":
                if os.fork() == 0:
                    os.setsid()
                    time.sleep(3600)
                channel.send({"forked": True})
            elif act == "take memory":
                os.fork()  # each of both has less than the limit
                taken = b"x" * value
                time.sleep(3600)
                del taken
            elif act == "raise":
                raise ZeroDivisionError
            elif act == "exit":
                os._exit(value)

    return serve
