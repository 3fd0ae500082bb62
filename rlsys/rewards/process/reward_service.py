"""The process of reward functions: takes calls from its supervisor, tells their outcomes.

socket ──► this thread ──► Lanes ──► [ outcomes ] ──► a thread that sends ──► socket
"""

from __future__ import annotations

import os
import pickle
import queue
import select
import socket
import threading
import time
from typing import Any

from rlsys.common.background_tasks import start_thread
from rlsys.common.safe_json import dump_json
from rlsys.rewards.outcome import Outcome, RewardFailure
from rlsys.rewards.process.call_scheduler import CallScheduler, ScheduledCall
from rlsys.rewards.process.reward_messages import LENGTH, frame
from rlsys.rewards.process.running_calls import RunningCalls
from rlsys.rewards.reward import Reward


def serve(
    channel: socket.socket,
    table_fd: int,
    rewards: tuple[Reward, ...],
    *,
    concurrency: int,
    num_rows: int,
) -> None:
    """Until the supervisor closes the socket; then ends the process."""
    table = RunningCalls(table_fd, num_rows)
    os.close(table_fd)
    outcomes: queue.SimpleQueue[tuple[int, Outcome | None]] = queue.SimpleQueue()
    lanes = CallScheduler(
        table,
        lambda number, outcome: outcomes.put((number, outcome)),
        concurrency=concurrency,
        max_stuck=num_rows - concurrency,
    )
    if any(reward.is_async for reward in rewards):
        lanes.start_loop()
    sending = threading.Lock()  # two threads send: outcomes, and answers

    def send(message: dict[str, Any]) -> None:
        with sending:
            try:
                channel.sendall(frame(dump_json(message).encode()))
            except ConnectionError:  # the supervisor is gone
                os._exit(0)

    def send_outcomes() -> None:
        while True:
            ended = [outcomes.get()]
            while True:
                try:
                    ended.append(outcomes.get_nowait())
                except queue.Empty:
                    break
            send({"outcomes": [(number, _plain(outcome)) for number, outcome in ended]})

    start_thread(send_outcomes, name="outcomes", returns=False)
    send({"ready": True})
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    wait_s: float | None = None
    while True:
        if poller.poll(None if wait_s is None else 1000 * wait_s):
            message = _receive(channel)
            if message is None:
                os._exit(0)
            name, *arguments = message
            if name == "run":
                rollouts, numbered = arguments
                now_s = time.monotonic()
                lanes.add(
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
            elif name == "give_up":
                lanes.give_up(arguments[0])
            elif name == "hand_back":
                send({"handed_back": lanes.hand_back()})
            else:
                raise AssertionError(name)
        wait_s = lanes.spread()


def _plain(outcome: Outcome | None) -> object:
    """As JSON carries it: numbers by name, [kind, message], or null for a call given up."""
    if isinstance(outcome, RewardFailure):
        return [outcome.kind, outcome.message]
    return outcome


def _receive(channel: socket.socket) -> tuple[Any, ...] | None:
    """The next message; None when the supervisor has closed the socket, or is gone."""
    try:
        head = channel.recv(LENGTH.size, socket.MSG_WAITALL)
        if len(head) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(head)
        body = bytearray(length)
        view = memoryview(body)
        while view:
            received = channel.recv_into(view)
            if received == 0:
                return None
            view = view[received:]
    except ConnectionError:
        return None
    message: tuple[Any, ...] = pickle.loads(body)
    return message
