"""The process that runs reward functions. supervisor.py starts this script.

In: as arguments, the descriptors of its socket and of the table of calls. On the socket, first the
functions to load, then calls (reward_messages.py). Out: whether the functions were loaded, then the
outcomes of the calls.
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

# Bound before user code is imported, which may replace them.
_exit, _loads, _pack, _sendall = os._exit, pickle.loads, struct.pack, socket.socket.sendall
_format = traceback.format_exception


def main() -> None:
    """Load the functions, then run calls until the socket closes."""
    faulthandler.enable()  # a crash in C writes its traceback to the actor's log
    channel = socket.socket(fileno=int(sys.argv[1]))
    table_fd = int(sys.argv[2])
    os.set_inheritable(channel.fileno(), False)
    os.set_inheritable(table_fd, False)
    try:
        (length,) = struct.unpack("<Q", channel.recv(8, socket.MSG_WAITALL))
        load = pickle.loads(channel.recv(length, socket.MSG_WAITALL))
    except (ConnectionError, struct.error, EOFError, pickle.UnpicklingError):
        os._exit(0)  # the supervisor is gone
    try:
        sys.path[:] = load["path"]
        from rlsys.common.background_tasks import guarded
        from rlsys.rewards.process.reward_service import serve
        from rlsys.rewards.process.running_calls import RunningCalls, close_files

        table = RunningCalls(table_fd, load["num_rows"])
        close_files(table_fd)
        rewards = _loads(load["rewards"])
    # A user's module may raise anything when it is imported.
    except BaseException as error:  # noqa: BLE001
        lines = _format(error, limit=-3, chain=False)
        answer = dumps({"failed": f"{lines[-1]}{''.join(lines[:-1])}".rstrip()}).encode()
        _sendall(channel, _pack("<Q", len(answer)) + answer)
        _exit(0)
    concurrency = load["concurrency"]
    guarded(serve, name="rewards", returns=False)(
        channel, table, rewards, concurrency, load["num_rows"] - concurrency
    )


if __name__ == "__main__":
    main()
