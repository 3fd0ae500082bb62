"""The socket between a local process and its parent, as the process sees it.

Frames: eight bytes of length, then the message. To the process: pickled objects. From it: JSON,
because user code may have tampered with it, so it must not be unpickled.

User code shares the process, and may replace functions of the standard library. So the functions
that this module needs are bound at import.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from typing import Any

from rlsys.common.safe_json import dump_json

LENGTH = struct.Struct("<Q")

_exit, _loads, _WAITALL = os._exit, pickle.loads, socket.MSG_WAITALL
_recv, _recv_into, _sendall = socket.socket.recv, socket.socket.recv_into, socket.socket.sendall


def frame(message: bytes) -> bytes:
    """Return a message with its length."""
    return LENGTH.pack(len(message)) + message


class ChildChannel:
    """The process's end of the socket. Several threads may send."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._channel.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. End this process if the parent has ended."""
        with self._sending:
            try:
                _sendall(self._channel, frame(dump_json(message).encode()))
            except ConnectionError:
                _exit(0)

    def receive(self) -> Any:
        """Return the next message. End this process if the parent has closed the socket."""
        try:
            head = _recv(self._channel, LENGTH.size, _WAITALL)
            if len(head) < LENGTH.size:
                _exit(0)
            (length,) = LENGTH.unpack(head)
            body = bytearray(length)
            view = memoryview(body)
            while view:
                received = _recv_into(self._channel, view)
                if received == 0:
                    _exit(0)
                view = view[received:]
        except ConnectionError:
            _exit(0)
        return _loads(body)
