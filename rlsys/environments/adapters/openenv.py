"""Environments behind a server of OpenEnv (https://github.com/meta-pytorch/OpenEnv).

In: the address of a running server. An episode is a session of it, over its WebSocket protocol
(reset, step, close), which needs no package of OpenEnv's here. A step's reward is that turn's.

A server admits as many sessions as its max_concurrent_envs says, one by default: give it as many as
rollout.max_running allows episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.environments.adapters import Foreign, required
from rlsys.environments.chat import Chat, RefusedTurn

# Of one message; observations may be large.
MAX_MESSAGE_BYTES = 2**27
TIMEOUT_S = 60.0

# Fields of a step's answer that are no part of what the policy is told.
UNTOLD = ("done", "reward", "metadata")


@dataclass(frozen=True, kw_only=True)
class OpenEnv(Foreign):
    """url: of the server, http:// or ws://.
    action: the field of an action that takes the reply, such as "message" or "code"; or a function
        from a reply to an action, whose ValueError is the policy's mistake.
    text: the field of an observation that the policy is told; or a function from an observation to
        a text; None: the whole observation, as JSON.
    prompt: stands before the first observation.
    reset: what the server's `reset` is given beside the seed.
    timeout_s: of one answer of the server.
    """

    url: str
    action: str | Callable[[str], Mapping[str, Any]] = "message"
    text: str | Callable[[Mapping[str, Any]], str] | None = None
    prompt: str = ""
    reset: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        if self.url.partition("://")[0] not in ("http", "https", "ws", "wss"):
            raise ValueError(
                f"OpenEnv(url={self.url!r}) is no address of a server; give one such as "
                "http://127.0.0.1:8000."
            )

    @property
    def name(self) -> str:
        return "openenv"

    def tasks(self, num: int, *, seed: int = 0) -> list[dict[str, Any]]:
        """Seeds that the environment is reset with."""
        return [{"seed": seed + place} for place in range(num)]

    async def __call__(self, chat: Chat, task: Mapping[str, Any]) -> None:
        connect = required("websockets.asyncio.client", "openenv").connect
        address = f"{self.url.replace('http', 'ws', 1).rstrip('/')}/ws"
        async with connect(
            address, max_size=MAX_MESSAGE_BYTES, open_timeout=self.timeout_s
        ) as socket:
            session = _Session(socket, self.timeout_s)
            step = await session.ask("reset", {**self.reset, "seed": int(task["seed"])})
            text = self.prompt + self._told(step)
            while not step.get("done") and not chat.done:
                action = await chat(text, parse=self._action)
                try:
                    step = await session.ask("step", action)
                except _Invalid as error:
                    if isinstance(self.action, str):
                        raise ValueError(
                            f"the environment at {self.url} takes no action with a text "
                            f"{self.action!r}: {error}. See its /schema for the fields, and give "
                            "OpenEnv(action=...)."
                        ) from error
                    raise RefusedTurn(f"the environment refused {action!r}: {error}") from None
                chat.reward(float(step.get("reward") or 0.0))
                text = self._told(step)
            await session.close()

    def _action(self, reply: str) -> Mapping[str, Any]:
        return {self.action: reply} if isinstance(self.action, str) else self.action(reply)

    def _told(self, step: Mapping[str, Any]) -> str:
        observation = step.get("observation") or {}
        if callable(self.text):
            return self.text(observation)
        if self.text is None:
            told = {name: value for name, value in observation.items() if name not in UNTOLD}
            return dump_json(told, ensure_ascii=False)
        if self.text not in observation:
            raise KeyError(
                f"an observation of {self.url} has no {self.text!r}; it has "
                f"{', '.join(name for name in observation if name not in UNTOLD)}. Give "
                "OpenEnv(text=...) one of these."
            )
        return str(observation[self.text])


class _Invalid(Exception):
    """The server refused an action."""


class _Session:
    def __init__(self, socket: Any, timeout_s: float) -> None:
        self._socket = socket
        self._timeout_s = timeout_s

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises _Invalid, ConnectionError for another error of the server's, or TimeoutError."""
        closed = required("websockets.exceptions", "openenv").ConnectionClosed
        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.suppress(closed):  # what it said before is still to be read
                    await self._socket.send(dump_json({"type": kind, "data": dict(data)}))
                answer = parse_json(await self._socket.recv())
        except closed as error:
            raise ConnectionError(
                f"the environment's server closed the session: {error}"
            ) from error
        told: Mapping[str, Any] = answer.get("data") or {}
        if answer.get("type") != "error":
            return told
        if told.get("code") == "VALIDATION_ERROR":
            raise _Invalid(told.get("errors") or told.get("message"))
        hint = ""
        if told.get("code") == "CAPACITY_REACHED":
            hint = "; give the server more max_concurrent_envs, or lower rollout.max_running"
        raise ConnectionError(
            f"the environment's server: {told.get('message')} ({told.get('code')}){hint}."
        )

    async def close(self) -> None:
        await self._socket.send(dump_json({"type": "close"}))
