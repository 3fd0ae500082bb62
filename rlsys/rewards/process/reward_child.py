"""The process that runs reward functions; run as a script, by supervisor.py alone.

In: as arguments, the descriptors of its socket and of the table of calls. On the socket, first what
to load, then calls (see reward_messages.py). Out: whether the functions could be loaded, then their
outcomes.
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
        from rlsys.rewards.process.reward_service import serve

        rewards = pickle.loads(load["rewards"])
    # Whatever a module of the user's raises when it is imported.
    except BaseException as error:  # noqa: BLE001
        lines = traceback.format_exception(error, limit=-3, chain=False)
        answer = dumps({"failed": f"{lines[-1]}{''.join(lines[:-1])}".rstrip()}).encode()
        channel.sendall(struct.pack("<Q", len(answer)) + answer)
        os._exit(0)
    serve(channel, table_fd, rewards, concurrency=load["concurrency"], num_rows=load["num_rows"])


if __name__ == "__main__":
    main()
