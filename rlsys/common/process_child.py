"""Entry point of a local process of user code. process_supervisor.py runs it as a script.

In: as arguments, the descriptors of its socket and of other files. On the socket, first the module
to import and its arguments (local_process.py), then calls. Out: whether they were loaded, then the
messages of the module.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import socket
import struct
import sys
import traceback
from importlib import import_module
from json import dumps

# Bound before user code is imported, which may replace them.
_exit, _pack, _sendall = os._exit, struct.pack, socket.socket.sendall
_format = traceback.format_exception


def main() -> None:
    """Load the user's code, then serve calls until the socket closes."""
    faulthandler.enable()  # a crash in C writes its traceback to the log
    channel, *shared = (int(fd) for fd in sys.argv[1:])
    for fd in (channel, *shared):
        os.set_inheritable(fd, False)
    parent = socket.socket(fileno=channel)
    try:
        (length,) = struct.unpack("<Q", parent.recv(8, socket.MSG_WAITALL))
        load = pickle.loads(parent.recv(length, socket.MSG_WAITALL))
    except (ConnectionError, struct.error, EOFError, pickle.UnpicklingError):
        os._exit(0)  # the parent process has ended
    try:
        sys.path[:] = load["path"]
        from rlsys.common.background_tasks import guarded
        from rlsys.common.child_channel import ChildChannel

        serve = import_module(load["module"]).load(*shared, **load["arguments"])
    # A user's module may raise anything when it is imported.
    except BaseException as error:  # noqa: BLE001
        lines = _format(error, limit=-3, chain=False)
        answer = dumps({"failed": f"{lines[-1]}{''.join(lines[:-1])}".rstrip()}).encode()
        _sendall(parent, _pack("<Q", len(answer)) + answer)
        _exit(0)
    guarded(serve, name="calls", returns=False)(ChildChannel(parent))


if __name__ == "__main__":
    main()
