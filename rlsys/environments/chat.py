"""The `chat` argument of an environment: a conversation with the policy.

n = await chat("a number?", parse=int)      send a text, get the policy's reply
chat.reward(-0.1)                           reward of the last turn
answer = await chat.until_answer(question)  run tool calls until a reply has none
other = chat.fork()                         a second conversation that starts from this one
first = chat.seat("first")                  the conversation of another seat
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from rlsys.environments.episode import Episode, EpisodeOver, Turn
from rlsys.environments.tools.tool_use import ToolUse
from rlsys.errors import InvalidValue, require
from rlsys.text.messages import Message

T = TypeVar("T")

# Errors with which `parse` rejects a reply. Any other error is a bug in `parse`.
PARSE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


class RefusedTurn(EpisodeOver):
    """End of an episode whose reply `parse` rejected."""


class UnreadableError(EpisodeOver):
    """End of an episode whose policy made a wrong call and has no tokens for the error."""


class Chat:
    """A conversation of an episode.

    Its methods raise EpisodeOver when the episode is over. Environments need not catch it.
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
        # Shared by all chats of the episode. The environment's `chat` is that of the first seat.
        self._seats = {episode.environment.seats[0]: self} if seats is None else seats
        self._messages: list[Message] = list(messages)
        self._turn: Turn | None = None

    @property
    def messages(self) -> list[Message]:
        """The messages so far, in OpenAI's format."""
        return list(self._messages)

    @property
    def done(self) -> bool:
        """Return whether turns, tokens or context are used up: no further reply is possible."""
        return self._episode.is_over

    @property
    def truncated(self) -> bool:
        """Return whether the episode ended because tokens or context were used up."""
        return self._episode.is_truncated

    def system(self, text: str) -> None:
        """Set the system message. It must be the first message.

        Raises:
            InvalidValue: There are messages already.
        """
        require(
            not self._messages,
            "chat.system",
            text,
            rule="must come before all other messages",
            fix="Call it before the first chat(...).",
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
        """Send `text` and return the policy's reply.

        Args:
            text: The message to send. None: none, sample the reply to the messages so far.
            parse: Function that converts the reply. If it raises a ValueError, TypeError,
                LookupError, AttributeError or ArithmeticError, the episode ends with the
                environment's format_reward; for a frozen model's reply the error is raised.
            max_tokens: Maximum number of tokens of the reply.
            role: Role of the message.

        Returns:
            The text of the reply, or the result of `parse`.
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
        """Send `text`, run the tool calls of each reply and return the first reply without calls.

        The calls of one reply run concurrently. A wrong call gives an error as output; if the
        policy has no tokens for its text, the episode ends with the environment's format_reward.
        The arguments are those of calling the chat.
        """
        if text is not None:
            self._add("user", text)
        reply = await self._reply(max_tokens)
        while self._turn is not None and (calls := self._turn.message.get("tool_calls")):
            if self._episode.is_over:
                break
            self._messages += await self._tools.call_all(calls, check_error=self._check_readable)
            reply = await self._reply(max_tokens)
        return reply if parse is None else parsed(parse, reply, is_frozen=self.is_frozen)

    @property
    def is_frozen(self) -> bool:
        """Return whether a frozen model, not the policy, plays this seat."""
        partner = self._episode.partners.get(self._seat)
        return partner is not None and partner.codec is not None

    @property
    def num_tool_calls(self) -> int:
        """Number of tool calls in this conversation so far."""
        return sum(len(message.get("tool_calls") or ()) for message in self._messages)

    def reward(self, value: float, name: str = "turns") -> None:
        """Add a reward to the last turn. Rewards of a frozen model's turns are ignored."""
        self._episode.reward(self._turn, value, name)

    def fork(self) -> Chat:
        """Return a new conversation that starts with the messages of this one.

        It is a trained branch of the same rollout. Both share the tokens of their common prefix.
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
        """Return the conversation of a seat, the same one at each call.

        That of the first seat is the chat that the environment was called with.
        """
        seats = self._episode.environment.seats
        require(
            name in seats,
            "chat.seat",
            name,
            rule=f"the seats of the environment are {list(seats)}",
            fix=f"Use one of them, or add it with @environment(seats=[..., {name!r}]).",
        )
        if name not in self._seats:
            self._seats[name] = Chat(
                self._episode, self._tools, seat=seats.index(name), seats=self._seats
            )
        return self._seats[name]

    def _add(self, role: str, text: str) -> None:
        if not isinstance(text, str):
            raise InvalidValue(
                "chat", text, rule="messages must be texts", fix="Use chat(str(...))."
            )
        self._messages.append({"role": role, "content": text})

    def _check_readable(self, error: str) -> None:
        """Raise UnreadableError if the policy has no token for a character of an error text.

        A model of a few characters has none for the words of the system. The mistake is the
        policy's, so its episode gets a reward instead of failing.
        """
        lost = None
        if not self.is_frozen:
            lost = self._episode.codec.boundary.alphabet.first_lost(error)
        if lost is not None:
            raise UnreadableError(
                f"a tool call failed, and the model has no token for {lost!r} in {error!r}"
            )

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
    """Return the parsed reply.

    Raises RefusedTurn if `parse` rejects it, or the error of `parse` for a frozen model's reply.
    """
    try:
        return parse(reply)
    except PARSE_ERRORS as error:
        if is_frozen:
            raise
        raise RefusedTurn(f"parse rejected {reply!r}: {type(error).__name__}: {error}") from None
