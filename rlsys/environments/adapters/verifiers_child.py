"""Script that runs environments of verifiers, in the Python that has the package.

verifiers.py starts it and does not import it. In, one JSON object per line: first the environment's
configuration, then {"id", "task", "url", "key", "model"} to play a task with an endpoint, {"id",
"cancel"} to cancel that, or {"id", "tasks"} to list some tasks. Out: {"ready"}, then {"id",
"rewards"}, {"id", "rows"} or {"id", "error"}. It ends when its input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from typing import Any

# An environment of verifiers keeps a client for each endpoint and key, so it is replaced after this
# many episodes.
MAX_EPISODES = 500

# Maximum length of a request.
MAX_LINE_BYTES = 2**24


class Served:
    """A running environment of verifiers."""

    def __init__(self, config: dict[str, Any]) -> None:
        import verifiers.v1 as vf

        self._vf = vf
        self.env = vf.load_environment(vf.resolve_env_config(config))
        self._stack = contextlib.AsyncExitStack()
        self._tasks: list[Any] = []
        self._rest = iter(self.env.taskset)
        self.num_started = self.num_running = 0

    async def start(self) -> None:
        """Start the environment."""
        await self._stack.enter_async_context(self.env.serving())

    async def stop(self) -> None:
        """Stop the environment."""
        await self._stack.aclose()

    def tasks(self, num: int) -> list[Any]:
        """Return the first tasks of the taskset."""
        self._tasks += itertools.islice(self._rest, max(0, num - len(self._tasks)))
        return self._tasks[:num]

    async def play(self, request: dict[str, Any]) -> dict[str, float]:
        """Play a task and return the rewards by name; their sum is that of the episode."""
        found = self.tasks(request["task"] + 1)
        if len(found) <= request["task"]:
            raise IndexError(f"task {request['task']}: the taskset has {len(found)} tasks")
        variable = f"RLSYS_ENDPOINT_KEY_{request['id']}"
        os.environ[variable] = request["key"]
        try:
            client = self._vf.EvalClientConfig(base_url=request["url"], api_key_var=variable)
            context = self._vf.ModelContext(model=request["model"], client=client)
            episode = await self.env.run_episode(found[request["task"]], context)
        finally:
            del os.environ[variable]
        return rewards(episode)


def rewards(episode: Any) -> dict[str, float]:
    """Return the rewards of the trained agent by name, the mean if there are several agents.

    Raises RuntimeError if the episode has failed.
    """
    if not episode.ok:
        errors = [*episode.errors, *(one for trace in episode.traces for one in trace.errors)]
        reasons = "; ".join(f"{one.type}: {one.message}" for one in errors[-2:])
        raise RuntimeError(f"verifiers' episode failed: {reasons or 'no reason given'}")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    found: dict[str, float] = {}
    for trace in traces:
        for name, reward in trace.rewards.items():
            if reward is not None:
                found[name] = found.get(name, 0.0) + reward.value / len(traces)
    return found


class Child:
    """Handler of requests, with the current environment and those that are being replaced."""

    def __init__(self, config: dict[str, Any], out: Any) -> None:
        self._config = config
        self._out = out
        self._served = Served(config)
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._renewing = asyncio.Lock()

    async def start(self) -> None:
        """Start the environment and report that it is ready."""
        await self._served.start()
        self.send({"ready": True})

    async def stop(self) -> None:
        """Cancel all episodes and stop the environment."""
        for task in list(self._playing.values()):
            task.cancel()
        await asyncio.gather(*self._playing.values(), return_exceptions=True)
        await self._served.stop()

    def handle(self, request: dict[str, Any]) -> None:
        """Start to handle a request."""
        number = request["id"]
        if "cancel" in request:
            if (playing := self._playing.get(number)) is not None:
                playing.cancel()
        elif "tasks" in request:
            rows = [
                {"index": index, "prompt": task.data.prompt_text}
                for index, task in enumerate(self._served.tasks(request["tasks"]))
            ]
            self.send({"id": number, "rows": rows})
        else:
            self._playing[number] = asyncio.create_task(self._play(request))

    async def _play(self, request: dict[str, Any]) -> None:
        served: Served | None = None
        try:
            served = await self._current()
            served.num_running += 1
            self.send({"id": request["id"], "rewards": await served.play(request)})
        # Any error of an environment is the outcome of its episode.
        except Exception as error:  # noqa: BLE001
            self.send({"id": request["id"], "error": f"{type(error).__name__}: {error}"})
        finally:
            del self._playing[request["id"]]
            if served is not None:
                served.num_running -= 1
            if served is not None and served is not self._served and not served.num_running:
                stopping = asyncio.create_task(served.stop())
                self._stopping.add(stopping)
                stopping.add_done_callback(self._stopping.discard)

    async def _current(self) -> Served:
        async with self._renewing:
            if self._served.num_started >= MAX_EPISODES:
                fresh = Served(self._config)
                await fresh.start()
                worn, self._served = self._served, fresh
                if not worn.num_running:
                    await worn.stop()
            self._served.num_started += 1
            return self._served

    def send(self, answer: dict[str, Any]) -> None:
        """Write an answer."""
        self._out.write(json.dumps(answer).encode() + b"\n")
        self._out.flush()


async def main() -> None:
    """Serve requests until the input ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # stdout is for answers only: redirect the prints of other code
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    config = json.loads(await reader.readline())
    try:
        child = Child(config, out)
        await child.start()
    # Any error of the environment's modules is reported to the parent.
    except Exception as error:  # noqa: BLE001
        out.write(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        out.flush()
        return
    try:
        while line := await reader.readline():
            child.handle(json.loads(line))
    finally:
        await child.stop()


if __name__ == "__main__":
    asyncio.run(main())
