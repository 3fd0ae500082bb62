"""Main loop of the process of reward functions: receives calls and sends their outcomes.

    channel ──► this thread ──► CallScheduler ──► [ outcomes ] ──► a thread that sends ──► channel

User code shares this process, and may close its descriptors or replace functions of the standard
library. So the functions that this module needs are bound at import. An error of either thread ends
the process, and the runner starts another.
"""

from __future__ import annotations

import pickle
import select
from collections.abc import Callable
from queue import Empty, SimpleQueue

from rlsys.common.background_tasks import guarded
from rlsys.common.child_channel import ChildChannel
from rlsys.rewards.outcome import Outcome, RewardFailure
from rlsys.rewards.process.call_scheduler import CallScheduler, ScheduledCall, begin_thread, now
from rlsys.rewards.process.running_calls import RunningCalls, close_files
from rlsys.rewards.reward import Reward

_loads = pickle.loads


def load(
    table_fd: int, *, rewards: bytes, concurrency: int, num_rows: int
) -> Callable[[ChildChannel], None]:
    """Load the reward functions, and return the function that serves calls of them."""
    table = RunningCalls(table_fd, num_rows)
    close_files(table_fd)
    loaded: tuple[Reward, ...] = _loads(rewards)
    return lambda channel: serve(channel, table, loaded, concurrency, num_rows - concurrency)


def serve(
    channel: ChildChannel,
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

    def send_outcomes() -> None:
        while True:
            ended = [outcomes.get()]
            while True:
                try:
                    ended.append(outcomes.get_nowait())
                except Empty:
                    break
            channel.send({"outcomes": [(number, _plain(outcome)) for number, outcome in ended]})

    begin_thread(guarded(send_outcomes, name="outcomes", returns=False), ())
    channel.send({"ready": True})
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    wait_s: float | None = None
    while True:
        if poller.poll(None if wait_s is None else 1000 * wait_s):
            name, *arguments = channel.receive()
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
                channel.send({"returned": scheduler.take_pending()})
            else:
                raise AssertionError(name)
        wait_s = scheduler.spread()


def _plain(outcome: Outcome | None) -> object:
    """Return the JSON of an outcome: numbers by name, [kind, message], or null if cancelled."""
    if isinstance(outcome, RewardFailure):
        return [outcome.kind, outcome.message]
    return outcome
