"""What an environment talks to: `chat`.

n = await chat("a number?", parse=int)      text in, the policy's reply out
chat.reward(-0.1)                           for the turn just sampled
answer = await chat.until_answer(question)  with tools: calls them until it answers
other = chat.fork()                         goes on from here, beside this one
first = chat.seat("first")                  another seat's own conversation
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from rlsys.environments.episode import Episode, EpisodeOver, Turn
from rlsys.environments.tools.tool_use import ToolUse
from rlsys.text.messages import Message

T = TypeVar("T")

# What `parse` raises for a reply that is not as it should be; anything else is a bug of it.
REFUSALS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


class RefusedTurn(EpisodeOver):
    """`parse` refused the reply."""


class Chat:
    """One conversation of an episode. Every call of it raises what ends the episode where it cannot
    go on; environments let that pass.
    """

    def __init__(
        self,
        episode: Episode,
        tools: ToolUse,
        *,
        seat: int = 0,
        seats: dict[str, Chat] | None = None,
        messages: Sequence[Message] = (),
    ) -> None:
        self._episode = episode
        self._tools = tools
        self._seat = seat
        # Those of the episode that somebody has asked for; the first one's is what it begins with.
        self._seats = {episode.environment.seats[0]: self} if seats is None else seats
        self._messages: list[Message] = list(messages)
        self._turn: Turn | None = None

    @property
    def messages(self) -> list[Message]:
        """All so far, in OpenAI's shape."""
        return list(self._messages)

    @property
    def done(self) -> bool:
        """No further reply can come: turns, tokens or context are used up."""
        return self._episode.is_over

    @property
    def truncated(self) -> bool:
        """Tokens or context were used up in the middle of it."""
        return self._episode.is_truncated

    def system(self, text: str) -> None:
        """What stands before everything; to be said first."""
        if self._messages:
            raise ValueError(
                "chat.system comes after other messages; call it before the first chat(...)."
            )
        self._add("system", text)

    @overload
    async def __call__(
        self, text: str | None = None, *, max_tokens: int | None = None, role: str = "user"
    ) -> str: ...
    @overload
    async def __call__(
        self,
        text: str | None = None,
        *,
        parse: Callable[[str], T],
        max_tokens: int | None = None,
        role: str = "user",
    ) -> T: ...
    async def __call__(
        self,
        text: str | None = None,
        *,
        parse: Callable[[str], Any] | None = None,
        max_tokens: int | None = None,
        role: str = "user",
    ) -> Any:
        """Say `text` and return the policy's reply, a text, or what `parse` makes of it. A reply
        that `parse` refuses (by a ValueError or the like) is the policy's mistake, and ends the
        episode with the environment's format_reward; where a frozen model plays the seat, what
        `parse` raised comes out of here.
        """
        if text is not None:
            self._add(role, text)
        reply = await self._reply(max_tokens)
        return reply if parse is None else parsed(parse, reply, is_frozen=self.is_frozen)

    async def until_answer(
        self,
        text: str | None = None,
        *,
        parse: Callable[[str], Any] | None = None,
        max_tokens: int | None = None,
    ) -> Any:
        """Say `text`, carry out the tool calls of each reply, several of one side by side, and
        return the first reply without any.
        """
        if text is not None:
            self._add("user", text)
        reply = await self._reply(max_tokens)
        while self._turn is not None and (calls := self._turn.message.get("tool_calls")):
            if self._episode.is_over:
                break
            self._messages += await self._tools.call_all(calls)
            reply = await self._reply(max_tokens)
        return reply if parse is None else parsed(parse, reply, is_frozen=self.is_frozen)

    @property
    def is_frozen(self) -> bool:
        """A frozen model replies here, in the policy's place."""
        partner = self._episode.partners.get(self._seat)
        return partner is not None and partner.codec is not None

    @property
    def num_tool_calls(self) -> int:
        """Of this conversation, so far."""
        return sum(len(message.get("tool_calls") or ()) for message in self._messages)

    def reward(self, value: float, name: str = "turns") -> None:
        """For the turn just sampled; several add up. Of a frozen model's it counts for
        nothing.
        """
        self._episode.reward(self._turn, value, name)

    def fork(self) -> Chat:
        """A conversation that begins with this one, and goes on by itself: a branch of the same
        rollout, trained too. Both share what stands before.
        """
        forked = Chat(
            self._episode,
            self._tools,
            seat=self._seat,
            seats=self._seats,
            messages=self._messages,
        )
        forked._turn = self._turn
        return forked

    def seat(self, name: str) -> Chat:
        """The conversation of a seat, the same one at each call; that of the first seat is the
        chat which the environment was given.
        """
        seats = self._episode.environment.seats
        if name not in seats:
            raise ValueError(
                f"chat.seat({name!r}) is none of {list(seats)}; name it in "
                f"@environment(seats=[..., {name!r}])."
            )
        if name not in self._seats:
            self._seats[name] = Chat(
                self._episode, self._tools, seat=seats.index(name), seats=self._seats
            )
        return self._seats[name]

    def _add(self, role: str, text: str) -> None:
        if not isinstance(text, str):
            raise ValueError(
                f"chat({text!r}) is given a {type(text).__name__}; say a text, such as "
                f"chat(str(...))."
            )
        self._messages.append({"role": role, "content": text})

    async def _reply(self, max_tokens: int | None) -> str:
        turn = await self._episode.turn(
            self._messages, seat=self._seat, tools=self._tools.schemas, max_tokens=max_tokens
        )
        self._turn = turn
        self._tools.split_calls(turn.message, num_before=self._episode.num_tool_calls)
        self._episode.num_tool_calls += len(turn.message.get("tool_calls") or ())
        self._messages.append(turn.message)
        return turn.text


def parsed(parse: Callable[[str], Any], reply: str, *, is_frozen: bool = False) -> Any:
    """Raises Refused for what `parse` refuses; of a frozen model's reply, what it raised."""
    try:
        return parse(reply)
    except REFUSALS as error:
        if is_frozen:
            raise
        raise RefusedTurn(f"parse refused {reply!r}: {type(error).__name__}: {error}") from None
