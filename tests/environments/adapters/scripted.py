"""Scripted policy, and chats for environments that use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlsys.environments.chat import parsed
from rlsys.environments.episode import EpisodeOver
from rlsys.environments.workers.sync_worker_chat import SyncChat

Policy = Callable[[str], str]  # last message -> reply


class Script:
    """Messages of all chats, and the rewards of turns by name."""

    def __init__(self, replies: Sequence[str] | Policy, max_turns: int = 1000) -> None:
        waiting = None if callable(replies) else iter(replies)
        self.reply: Policy = replies if callable(replies) else lambda text: next(waiting)  # type: ignore[arg-type]
        self.max_turns = max_turns
        self.num_turns = 0
        self.messages: list[list[dict[str, Any]]] = [[]]
        self.rewards: list[tuple[int, str, float]] = []  # (chat, name, value)
        self.seats: list[str] = []

    def say(self, chat: int, text: str | None, role: str = "user") -> str:
        if self.num_turns >= self.max_turns:
            raise EpisodeOver
        self.num_turns += 1
        messages = self.messages[chat]
        if text is not None:
            messages.append({"role": role, "content": text})
        reply = self.reply(messages[-1]["content"])
        messages.append({"role": "assistant", "content": reply})
        return reply

    @property
    def is_over(self) -> bool:
        return self.num_turns >= self.max_turns

    def request(self, chat: int, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of a SyncChat."""
        value: Any = None
        match method:
            case "call":
                value = self.say(chat, arguments["text"], arguments["role"])
            case "system":
                self.messages[chat].append({"role": "system", "content": arguments["text"]})
            case "reward":
                self.rewards.append((chat, arguments["name"], arguments["value"]))
            case "seat":
                self.seats.append(arguments["name"])
                self.messages.append([])
                value = len(self.messages) - 1
            case _:
                raise AssertionError(method)
        state = {"done": self.is_over, "truncated": False, "num_tool_calls": 0}
        return {"value": value, "state": state, "is_frozen": False}

    def plain(self) -> SyncChat:
        return SyncChat(self.request)

    def received(self, chat: int = 0) -> list[str]:
        return [m["content"] for m in self.messages[chat] if m["role"] != "assistant"]


class AsyncChat:
    """Chat for async environments."""

    def __init__(self, script: Script) -> None:
        self.script = script

    @property
    def done(self) -> bool:
        return self.script.is_over

    async def __call__(self, text: str | None = None, *, parse: Any = None) -> Any:
        reply = self.script.say(0, text)
        return reply if parse is None else parsed(parse, reply)

    def reward(self, value: float, name: str = "turns") -> None:
        self.script.rewards.append((0, name, value))
