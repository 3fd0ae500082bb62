"""Main loop of the process of reward functions: receives calls and sends their outcomes.

    socket ──► this thread ──► CallScheduler ──► [ outcomes ] ──► a thread that sends ──► socket

User code shares this process, and may close its descriptors or replace functions of the standard
library. So the functions that this module needs are bound at import. An error of either thread ends
the process, and the runner starts another.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import threading
from queue import Empty, SimpleQueue
from typing import Any

from rlsys.common.background_tasks import guarded
from rlsys.common.safe_json import dump_json
from rlsys.rewards.outcome import Outcome, RewardFailure
from rlsys.rewards.process.call_scheduler import CallScheduler, ScheduledCall, begin_thread, now
from rlsys.rewards.process.reward_messages import LENGTH, frame
from rlsys.rewards.process.running_calls import RunningCalls
from rlsys.rewards.reward import Reward

_exit, _loads, _WAITALL = os._exit, pickle.loads, socket.MSG_WAITALL
_recv, _recv_into, _sendall = socket.socket.recv, socket.socket.recv_into, socket.socket.sendall


def serve(
    channel: socket.socket,
    table: RunningCalls,
    rewards: tuple[Reward, ...],
    concurrency: int,
    max_stuck: int,
) -> None:
    """Run calls until the runner closes the socket, then end the process."""
    outcomes: SimpleQueue[tuple[int, Outcome | None]] = SimpleQueue()
    scheduler = CallScheduler(
        table,
        lambda number, outcome: outcomes.put((number, outcome)),
        concurrency=concurrency,
        max_stuck=max_stuck,
        channel_fd=channel.fileno(),
    )
    if any(reward.is_async for reward in rewards):
        scheduler.start_loop()
    sending = threading.Lock()  # two threads send: outcomes and replies

    def send(message: dict[str, Any]) -> None:
        with sending:
            try:
                _sendall(channel, frame(dump_json(message).encode()))
            except ConnectionError:  # the runner is gone
                _exit(0)

    def send_outcomes() -> None:
        while True:
            ended = [outcomes.get()]
            while True:
                try:
                    ended.append(outcomes.get_nowait())
                except Empty:
                    break
            send({"outcomes": [(number, _plain(outcome)) for number, outcome in ended]})

    begin_thread(guarded(send_outcomes, name="outcomes", returns=False), ())
    send({"ready": True})
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    wait_s: float | None = None
    while True:
        if poller.poll(None if wait_s is None else 1000 * wait_s):
            message = _receive(channel)
            if message is None:
                _exit(0)
            name, *arguments = message
            if name == "run":
                rollouts, numbered = arguments
                now_s = now()
                scheduler.add(
                    [
                        ScheduledCall(
                            number=number,
                            reward=rewards[reward],
                            rollouts=rollouts,
                            place=place,
                            queued_s=now_s,
                        )
                        for number, reward, place in numbered
                    ]
                )
            elif name == "cancel":
                scheduler.cancel(arguments[0])
            elif name == "return_pending":
                send({"returned": scheduler.take_pending()})
            else:
                raise AssertionError(name)
        wait_s = scheduler.spread()


def _plain(outcome: Outcome | None) -> object:
    """Return the JSON of an outcome: numbers by name, [kind, message], or null if cancelled."""
    if isinstance(outcome, RewardFailure):
        return [outcome.kind, outcome.message]
    return outcome


def _receive(channel: socket.socket) -> tuple[Any, ...] | None:
    """Return the next message, or None if the runner has closed the socket or is gone."""
    try:
        head = _recv(channel, LENGTH.size, _WAITALL)
        if len(head) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(head)
        body = bytearray(length)
        view = memoryview(body)
        while view:
            received = _recv_into(channel, view)
            if received == 0:
                return None
            view = view[received:]
    except ConnectionError:
        return None
    message: tuple[Any, ...] = _loads(body)
    return message
