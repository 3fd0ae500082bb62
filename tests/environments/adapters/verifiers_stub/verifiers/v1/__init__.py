"""What the adapter uses of verifiers 0.4, with the same names and meanings, for the default suite:
the real package wants other versions of what rlsys uses. Its one environment is that of
verifiers_plugin/little.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class EvalClientConfig:
    base_url: str
    api_key_var: str


@dataclass
class ModelContext:
    model: str
    client: EvalClientConfig


@dataclass
class Data:
    prompt_text: str
    answer: str


@dataclass
class Task:
    data: Data


@dataclass
class Reward:
    score: float
    weight: float = 1.0

    @property
    def value(self) -> float:
        return self.score * self.weight


@dataclass
class Error:
    type: str
    message: str


@dataclass
class AgentInfo:
    trainable: bool = True


@dataclass
class Trace:
    rewards: dict[str, Reward | None]
    agent: AgentInfo = field(default_factory=AgentInfo)
    errors: list[Error] = field(default_factory=list)


@dataclass
class Episode:
    ok: bool
    traces: list[Trace]
    errors: list[Error] = field(default_factory=list)


class Taskset:
    def __iter__(self) -> Iterator[Task]:
        return (Task(Data(f"Say {n}.", str(n))) for n in range(5))


class Env:
    def __init__(self) -> None:
        self.taskset = Taskset()
        self.is_serving = False

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        print("what others print is no answer")
        self.is_serving = True
        try:
            yield
        finally:
            self.is_serving = False

    async def run_episode(self, task: Task, ctx: ModelContext) -> Episode:
        assert self.is_serving
        try:
            reply = await asyncio.to_thread(said, task.data.prompt_text, ctx)
        except OSError as error:
            return Episode(ok=False, traces=[], errors=[Error("ProviderError", str(error))])
        right = Reward(float(reply == task.data.answer), weight=2.0)
        return Episode(
            ok=True, traces=[Trace({"right": right, "short": Reward(float(len(reply) < 3))})]
        )


def said(prompt: str, ctx: ModelContext) -> str:
    request = urllib.request.Request(
        f"{ctx.client.base_url}/chat/completions",
        json.dumps(
            {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        ).encode(),
        {
            "Authorization": f"Bearer {os.environ[ctx.client.api_key_var]}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: str = json.load(answer)["choices"][0]["message"]["content"]
        return content


def resolve_env_config(data: dict[str, Any]) -> dict[str, Any]:
    return data


def load_environment(config: dict[str, Any]) -> Env:
    if config["taskset"]["id"] != "little":
        raise ModuleNotFoundError(f"taskset {config['taskset']['id']!r} not found")
    return Env()
