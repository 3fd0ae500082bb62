"""The process of plain functions; run as a script, by rlsys/rewards/process/supervisor.py alone.

In: as an argument, the descriptor of its socket; on it first what to load, then what to do. Out:
whether that could be loaded, then what the functions ask of their chats, and how they end.
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
    faulthandler.enable()  # a crash in C says where, in the actor's log
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    try:
        (length,) = struct.unpack("<Q", channel.recv(8, socket.MSG_WAITALL))
        load = pickle.loads(channel.recv(length, socket.MSG_WAITALL))
    except (ConnectionError, struct.error, EOFError, pickle.UnpicklingError):
        os._exit(0)  # the worker is gone
    try:
        sys.path[:] = load["path"]
        from rlsys.environments.workers.sync_worker_service import serve

        environment = pickle.loads(load["environment"])
    # Whatever a module of the user's raises when it is imported.
    except BaseException as error:  # noqa: BLE001
        lines = traceback.format_exception(error, limit=-3, chain=False)
        answer = dumps({"failed": f"{lines[-1]}{''.join(lines[:-1])}".rstrip()}).encode()
        channel.sendall(struct.pack("<Q", len(answer)) + answer)
        os._exit(0)
    serve(channel, environment)


if __name__ == "__main__":
    main()
