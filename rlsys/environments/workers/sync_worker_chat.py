"""A chat for plain functions: its methods block the thread until the policy has replied.

It lives in the process of plain functions; what it is asked, the Chat on the event loop of the
environment's worker does (sync_worker.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlsys.environments.chat import parsed

# Asks the worker: (number of the chat, method, arguments) -> its answer.
Ask = Callable[[int, str, dict[str, Any]], dict[str, Any]]


class SyncChat:
    """What rlsys.environments.chat.Chat is, without await."""

    def __init__(
        self, ask: Ask, number: int = 0, *, episode: dict[str, bool] | None = None
    ) -> None:
        self._ask = ask
        self._number = number
        # Of all chats of an episode: what ends for one of them has ended for the others.
        self._episode = {"done": False, "truncated": False} if episode is None else episode
        self._is_frozen = False  # known from the first answer on

    @property
    def messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = self._do("messages")
        return messages

    @property
    def done(self) -> bool:
        return self._episode["done"]

    @property
    def truncated(self) -> bool:
        return self._episode["truncated"]

    @property
    def num_tool_calls(self) -> int:
        num_tool_calls: int = self._do("num_tool_calls")
        return num_tool_calls

    def system(self, text: str) -> None:
        self._do("system", text=text)

    def __call__(
        self,
        text: str | None = None,
        *,
        parse: Callable[[str], Any] | None = None,
        max_tokens: int | None = None,
        role: str = "user",
    ) -> Any:
        reply = self._do("say", text=text, max_tokens=max_tokens, role=role)
        return reply if parse is None else parsed(parse, reply, is_frozen=self._is_frozen)

    def until_answer(
        self,
        text: str | None = None,
        *,
        parse: Callable[[str], Any] | None = None,
        max_tokens: int | None = None,
    ) -> Any:
        reply = self._do("until_answer", text=text, max_tokens=max_tokens)
        return reply if parse is None else parsed(parse, reply, is_frozen=self._is_frozen)

    def reward(self, value: float, name: str = "turns") -> None:
        self._do("reward", value=float(value), name=name)

    def fork(self) -> SyncChat:
        return SyncChat(self._ask, self._do("fork"), episode=self._episode)

    def seat(self, name: str) -> SyncChat:
        return SyncChat(self._ask, self._do("seat", name=name), episode=self._episode)

    def _do(self, method: str, **arguments: Any) -> Any:
        answer = self._ask(self._number, method, arguments)
        self._episode.update(answer["state"])
        self._is_frozen = answer["is_frozen"]
        return answer["value"]
