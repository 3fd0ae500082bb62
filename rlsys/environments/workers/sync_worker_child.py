"""Entry point of the process of synchronous functions.

rlsys/rewards/process/supervisor.py runs it as a script. In: the descriptor of a socket, as an
argument; on the socket, the environment to load and then calls. Out: whether the environment was
loaded, then the requests of the functions to their chats and their outcomes.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import socket
import struct
import sys
import traceback
from json import dumps


def main() -> None:
    """Load the environment and serve calls."""
    faulthandler.enable()  # log the stack of a crash in C
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    try:
        (length,) = struct.unpack("<Q", channel.recv(8, socket.MSG_WAITALL))
        load = pickle.loads(channel.recv(length, socket.MSG_WAITALL))
    except (ConnectionError, struct.error, EOFError, pickle.UnpicklingError):
        os._exit(0)  # the parent process has ended
    try:
        sys.path[:] = load["path"]
        from rlsys.environments.workers.sync_worker_service import serve

        environment = pickle.loads(load["environment"])
    # Any error of a user's module on import is reported to the parent.
    except BaseException as error:  # noqa: BLE001
        lines = traceback.format_exception(error, limit=-3, chain=False)
        answer = dumps({"failed": f"{lines[-1]}{''.join(lines[:-1])}".rstrip()}).encode()
        channel.sendall(struct.pack("<Q", len(answer)) + answer)
        os._exit(0)
    serve(channel, environment)


if __name__ == "__main__":
    main()
