"""Chat for synchronous functions: its methods block the thread until the policy has replied.

It runs in the process of synchronous functions and forwards each call to a `Chat` on the event loop
of the parent process (sync_worker.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlsys.environments.chat import parsed

# Sends a request to the parent: (number of the chat, method, arguments) -> answer.
Request = Callable[[int, str, dict[str, Any]], dict[str, Any]]


class SyncChat:
    """`rlsys.environments.chat.Chat` without await."""

    def __init__(
        self, request: Request, number: int = 0, *, episode: dict[str, bool] | None = None
    ) -> None:
        self._request = request
        self._number = number
        # Shared by all chats of an episode: it ends for all of them at once.
        self._episode = {"done": False, "truncated": False} if episode is None else episode
        self._is_frozen = False  # known after the first answer

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far, in OpenAI's format."""
        messages: list[dict[str, Any]] = self._call("messages")
        return messages

    @property
    def done(self) -> bool:
        """Return whether no further reply is possible."""
        return self._episode["done"]

    @property
    def truncated(self) -> bool:
        """Return whether the episode ended because tokens or context were used up."""
        return self._episode["truncated"]

    @property
    def num_tool_calls(self) -> int:
        """Number of tool calls in this conversation so far."""
        num_tool_calls: int = self._call("num_tool_calls")
        return num_tool_calls

    def system(self, text: str) -> None:
        """Set the system message."""
        self._call("system", text=text)

    def __call__(
        self,
        text: str | None = None,
        *,
        parse: Callable[[str], Any] | None = None,
        max_tokens: int | None = None,
        role: str = "user",
    ) -> Any:
        """Send `text` and return the policy's reply."""
        reply = self._call("call", text=text, max_tokens=max_tokens, role=role)
        return reply if parse is None else parsed(parse, reply, is_frozen=self._is_frozen)

    def until_answer(
        self,
        text: str | None = None,
        *,
        parse: Callable[[str], Any] | None = None,
        max_tokens: int | None = None,
    ) -> Any:
        """Send `text`, run the tool calls of each reply and return the first without calls."""
        reply = self._call("until_answer", text=text, max_tokens=max_tokens)
        return reply if parse is None else parsed(parse, reply, is_frozen=self._is_frozen)

    def reward(self, value: float, name: str = "turns") -> None:
        """Add a reward to the last turn."""
        self._call("reward", value=float(value), name=name)

    def fork(self) -> SyncChat:
        """Return a new conversation that starts with the messages of this one."""
        return SyncChat(self._request, self._call("fork"), episode=self._episode)

    def seat(self, name: str) -> SyncChat:
        """Return the conversation of a seat."""
        return SyncChat(self._request, self._call("seat", name=name), episode=self._episode)

    def _call(self, method: str, **arguments: Any) -> Any:
        answer = self._request(self._number, method, arguments)
        self._episode.update(answer["state"])
        self._is_frozen = answer["is_frozen"]
        return answer["value"]
