"""Adapter for verifiers (https://github.com/PrimeIntellect-ai/verifiers), version 0.4 (its v1).

In: an environment's configuration in the format of verifiers' command line, and the Python that
has verifiers and the environment's package. It is a separate Python, since verifiers and rlsys need
different versions of some packages. Its programs use the endpoint of an episode (`rlsys.agent`).
Each worker has one process that plays all of its episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsys.common.background_tasks import report, start_task
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.environments.adapters import Foreign
from rlsys.environments.environment import Environment, agent
from rlsys.errors import InvalidValue
from rlsys.rewards.process_environment import without_secrets

CHILD = Path(__file__).with_name("verifiers_child.py")

# -P: do not import from the folder of the script, since this file has the name of the package.
ALONE = ("-P", "-u")

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0  # after SIGKILL
DIED = "the process of verifiers has died. See its log."

# Maximum length of an answer of the process, such as the rows of a large taskset.
MAX_LINE_BYTES = 2**28


@dataclass(frozen=True, kw_only=True)
class Verifiers(Foreign):
    """An environment of verifiers.

    Attributes:
        env: Configuration of the environment, [env] in verifiers' TOML. For example:
            {"taskset": {"id": "gsm8k-v1"}, "agent": {"runtime": {"type": "subprocess"}}}.
        python: Python that has verifiers; the current one by default.
        variables: Environment variables of the process, added to inherited ones without secrets.
        model: Model name that the programs use.
        start_timeout_s: Time limit for the process to start.
    """

    env: Mapping[str, Any]
    python: str = sys.executable
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    model: str = "policy"
    start_timeout_s: float = START_TIMEOUT_S

    @property
    def name(self) -> str:
        """Name of the environment in metrics and failures."""
        taskset = self.env.get("taskset") or {}
        return str(taskset.get("id") or self.env.get("id") or "verifiers")

    def environment(self, **options: Any) -> Environment:
        """Return the environment. The options are those of `rlsys.agent`."""
        return agent(**{"name": self.name, **options})(self)

    def tasks(self, num: int, *, seed: int = 0) -> list[dict[str, Any]]:
        """Return the first tasks of the taskset. `seed` does not change their order.

        Raises InvalidValue if verifiers cannot load the environment.
        """
        requests = [dict(self.env), {"id": 0, "tasks": num}]
        ended = subprocess.run(
            [self.python, *ALONE, str(CHILD)],
            input="".join(f"{dump_json(one)}\n" for one in requests).encode(),
            stdout=subprocess.PIPE,
            env=self._variables(),
            timeout=self.start_timeout_s,
            check=False,
        )
        first, *others = [parse_json(line) for line in ended.stdout.splitlines()] or [{}]
        if "ready" not in first or not others:
            raise InvalidValue(
                "Verifiers: env",
                self.env,
                rule=self._not_started(first),
                fix="The Python of Verifiers(python=...) needs verifiers 0.4 and the environment's "
                "package.",
            )
        rows: list[dict[str, Any]] = others[0]["rows"]
        return rows

    async def __call__(self, endpoint: Any, task: Mapping[str, Any]) -> dict[str, float]:
        """Play one rollout of a task."""
        process = await self._process()
        return await process.play(
            task=int(task["index"]), url=endpoint.url, key=endpoint.key, model=self.model
        )

    async def close(self) -> None:
        """End the process of this worker. It also ends with the worker."""
        starting = _PROCESSES.pop(self._key(), None)
        if starting is not None:
            await (await starting).stop()

    async def _process(self) -> _Process:
        key = self._key()
        running = _PROCESSES.get(key)
        if running is None or (running.done() and not _is_alive(running)):
            running = _PROCESSES[key] = asyncio.ensure_future(self._started())
        return await asyncio.shield(running)

    async def _started(self) -> _Process:
        child = await asyncio.create_subprocess_exec(
            self.python,
            *ALONE,
            str(CHILD),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._variables(),
            limit=MAX_LINE_BYTES,
        )
        process = _Process(child)
        try:
            async with asyncio.timeout(self.start_timeout_s):
                first = await process.start(self.env)
        except TimeoutError:
            first = {}
        if "ready" not in first:
            await process.stop()
            raise ConnectionError(self._not_started(first))
        return process

    def _key(self) -> str:
        loop = id(asyncio.get_running_loop())
        return dump_json([loop, self.python, dict(self.env), dict(self.variables)])

    def _variables(self) -> dict[str, str]:
        return {**without_secrets(os.environ), **self.variables}

    def _not_started(self, answer: Mapping[str, Any]) -> str:
        reason = answer.get("failed") or f"no answer within {self.start_timeout_s:g} s, see its log"
        return (
            f"the environment {self.name!r} of verifiers did not start with python="
            f"{self.python!r}: {reason}"
        )


# Processes by environment, shared by the episodes of this worker.
_PROCESSES: dict[str, asyncio.Future[_Process]] = {}


def _is_alive(started: asyncio.Future[_Process]) -> bool:
    return not started.cancelled() and not started.exception() and started.result().is_alive


class _Process:
    """A process that plays episodes."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self._child = child
        self._stdin, self._stdout = child.stdin, child.stdout
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        """Return whether its answers are still read."""
        return self._reading is not None and not self._reading.done()

    async def start(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Send the configuration and return the first answer; {} if the process ended."""
        self._send(dict(config))
        first = await self._stdout.readline()
        if not first:
            return {}
        self._reading = start_task(self._read(), fail=self._failed)
        answer: dict[str, Any] = parse_json(first)
        return answer

    async def play(self, **request: Any) -> dict[str, float]:
        """Play an episode and return its rewards by name.

        Raises RuntimeError if the episode failed, ConnectionError if the process died.
        """
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send({"id": number, **request})
            outcome = await answer
        except asyncio.CancelledError:
            if self.is_alive:
                self._send({"id": number, "cancel": True})
            raise
        finally:
            del self._waiting[number]
        if "error" in outcome:
            raise RuntimeError(outcome["error"])
        rewards: dict[str, float] = outcome["rewards"]
        return rewards

    async def stop(self) -> None:
        """Kill the process and wait for its end."""
        self._stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await self._child.wait()
            if self._reading is not None:
                await asyncio.wait({self._reading})

    def _send(self, request: Mapping[str, Any]) -> None:
        if self._stdin.is_closing():
            raise ConnectionError(DIED)
        self._stdin.write(dump_json(request).encode() + b"\n")

    async def _read(self) -> None:
        while line := await self._stdout.readline():
            answer = parse_json(line)
            if (waiting := self._waiting.get(answer["id"])) is not None and not waiting.done():
                waiting.set_result(answer)
        self._end_waiting()

    def _failed(self, error: BaseException) -> None:
        """End the process, since its answers are not read any more."""
        report(error)
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
        self._end_waiting()

    def _end_waiting(self) -> None:
        self._stdin.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionError(DIED))
