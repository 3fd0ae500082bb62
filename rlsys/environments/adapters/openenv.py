"""Adapter for environments of an OpenEnv server (https://github.com/meta-pytorch/OpenEnv).

In: the address of a running server. An episode is a session of its WebSocket protocol (reset, step,
close), for which OpenEnv need not be installed. The reward of a step is that of the turn.

A server admits max_concurrent_envs sessions, one by default. Set it to at least
rollout.max_running, the number of concurrent episodes.
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
from rlsys.errors import InvalidValue, require

# Maximum length of a message. Observations may be large.
MAX_MESSAGE_BYTES = 2**27
TIMEOUT_S = 60.0

# Fields of a step's answer that are not sent to the policy.
HIDDEN = ("done", "reward", "metadata")


@dataclass(frozen=True, kw_only=True)
class OpenEnv(Foreign):
    """An OpenEnv server.

    Attributes:
        url: URL of the server, http:// or ws://.
        action: Field of an action that contains the reply, such as "message" or "code"; or a
            function from a reply to an action, whose ValueError is a mistake of the policy.
        text: Field of an observation to send to the policy; or a function from an observation to
            text. None: the whole observation, as JSON.
        prompt: Text before the first observation.
        reset: Arguments of the server's `reset`, in addition to the seed.
        timeout_s: Time limit of an answer of the server.
    """

    url: str
    action: str | Callable[[str], Mapping[str, Any]] = "message"
    text: str | Callable[[Mapping[str, Any]], str] | None = None
    prompt: str = ""
    reset: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        require(
            self.url.partition("://")[0] in ("http", "https", "ws", "wss"),
            "OpenEnv: url",
            self.url,
            rule="must begin with http://, https://, ws:// or wss://",
            fix="For example: http://127.0.0.1:8000.",
        )

    @property
    def name(self) -> str:
        """Name of the environment in metrics and failures."""
        return "openenv"

    def tasks(self, num: int, *, seed: int = 0) -> list[dict[str, Any]]:
        """Return seeds with which the environment is reset."""
        return [{"seed": seed + n} for n in range(num)]

    async def __call__(self, chat: Chat, task: Mapping[str, Any]) -> None:
        """Play one rollout of a task."""
        connect = required("websockets.asyncio.client", "openenv").connect
        address = f"{self.url.replace('http', 'ws', 1).rstrip('/')}/ws"
        async with connect(
            address, max_size=MAX_MESSAGE_BYTES, open_timeout=self.timeout_s
        ) as socket:
            session = _Session(socket, self.timeout_s)
            step = await session.ask("reset", {**self.reset, "seed": int(task["seed"])})
            text = self.prompt + self._observation_text(step)
            while not step.get("done") and not chat.done:
                action = await chat(text, parse=self._action)
                try:
                    step = await session.ask("step", action)
                except _Invalid as error:
                    if isinstance(self.action, str):
                        raise InvalidValue(
                            "OpenEnv: action",
                            self.action,
                            rule=f"the environment at {self.url} rejects the action: {error}",
                            fix="See its /schema for the fields of an action.",
                        ) from error
                    raise RefusedTurn(f"the environment rejected {action!r}: {error}") from None
                chat.reward(float(step.get("reward") or 0.0))
                text = self._observation_text(step)
            await session.close()

    def _action(self, reply: str) -> Mapping[str, Any]:
        return {self.action: reply} if isinstance(self.action, str) else self.action(reply)

    def _observation_text(self, step: Mapping[str, Any]) -> str:
        observation = step.get("observation") or {}
        if callable(self.text):
            return self.text(observation)
        shown = {name: value for name, value in observation.items() if name not in HIDDEN}
        if self.text is None:
            return dump_json(shown, ensure_ascii=False)
        if self.text not in observation:
            raise KeyError(
                f"OpenEnv: text={self.text!r}: an observation of {self.url} has the fields "
                f"{', '.join(shown)}. Use one of them."
            )
        return str(observation[self.text])


class _Invalid(Exception):
    """An action that the server rejected."""


class _Session:
    """Session of one episode."""

    def __init__(self, socket: Any, timeout_s: float) -> None:
        self._socket = socket
        self._timeout_s = timeout_s

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request and return the data of its answer.

        Raises _Invalid for a rejected action, ConnectionError for other errors of the server, and
        TimeoutError.
        """
        closed = required("websockets.exceptions", "openenv").ConnectionClosed
        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.suppress(closed):  # its last message can still be read
                    await self._socket.send(dump_json({"type": kind, "data": dict(data)}))
                answer = parse_json(await self._socket.recv())
        except closed as error:
            raise ConnectionError(
                f"the environment's server closed the session: {error}"
            ) from error
        content: Mapping[str, Any] = answer.get("data") or {}
        if answer.get("type") != "error":
            return content
        if content.get("code") == "VALIDATION_ERROR":
            raise _Invalid(content.get("errors") or content.get("message"))
        hint = ""
        if content.get("code") == "CAPACITY_REACHED":
            hint = " Raise max_concurrent_envs of the server, or lower rollout.max_running."
        raise ConnectionError(
            f"the environment's server: {content.get('message')} ({content.get('code')}).{hint}"
        )

    async def close(self) -> None:
        """End the session."""
        await self._socket.send(dump_json({"type": "close"}))
