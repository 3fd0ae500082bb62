"""The room that an episode has for replies, with calls under way side by side.

    prompt ──► take ──► (an engine samples) ──► give_back, added
                 │ waits while calls under way hold what may be left

In tokens: all that stands beyond the first prompt, in all branches, is bounded together, since the
store keeps that much for a rollout, and so many branches. What a call asks for is held until it has
ended, and what it did not need is there for others. No clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from rlsys.common.async_condition import AsyncCondition
from rlsys.environments.tokens.conversation import Conversation, Path, TextTooLong
from rlsys.types import MAX_BRANCHES


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """In tokens, of a whole rollout."""

    max_prompt_tokens: int  # of what stands before the first reply
    max_tokens: int  # of all that follows, in all branches
    max_context: int  # of one branch


class UsedUp(StrEnum):
    """Limit of an episode that has no room for another reply."""

    TURNS = "turns"
    BRANCHES = "branches"
    TOKENS = "tokens or context"


class NoRoom(Exception):
    """Turns, branches, tokens or context are used up. `why`: more about it."""

    def __init__(self, used_up: UsedUp, why: str = "") -> None:
        told = f"{used_up} are used up"
        super().__init__(f"{told}: {why}" if why else told)
        self.used_up = used_up


class FirstTooLong(Exception):
    """The first prompt, which no fresh attempt makes shorter."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBudget:
    """For one reply."""

    conversation: Conversation
    path: Path
    num_new: int  # tokens of the path that are not there yet
    most: int  # tokens that may stand behind it
    wanted: int  # of these; where it wants fewer, to be cut is no truncation


class Rooms:
    """Rooms of one episode. `turn_tokens`: limit of one reply. `max_branches`: limit of all
    conversations together, that of a rollout in the store; None: no limit.
    """

    def __init__(
        self,
        limits: EpisodeLimits,
        *,
        max_turns: int | None,
        turn_tokens: int | None,
        max_branches: int | None = MAX_BRANCHES,
    ) -> None:
        self._limits = limits
        self._max_branches = max_branches
        self._num_sampling = 0  # calls under way, each of which may begin a branch
        self._max_turns = max_turns
        self._turn_tokens = turn_tokens
        self._conversations: list[Conversation] = []  # in the order of their first replies
        self._first: TokenBudget | None = None  # beyond whose prompt all is counted
        self._num_held = 0  # tokens that calls under way may still add
        self._num_calls = 0  # under way, or ended with a reply
        self._changed = AsyncCondition()

    @property
    def has_turns(self) -> bool:
        return self._max_turns is None or self._num_calls < self._max_turns

    async def take(
        self, conversation: Conversation, prompt: Callable[[], Path], max_tokens: int | None
    ) -> TokenBudget:
        """`prompt` is asked again where others have ended meanwhile, whose tokens it may share.
        `give_back` must follow. Raises NoRoom, FirstTooLong, and what `prompt` raises.
        """
        limits = self._limits
        while True:
            if not self.has_turns:
                raise NoRoom(UsedUp.TURNS)
            try:
                path = prompt()
            except TextTooLong as error:
                raise self._too_long(error) from None
            context = limits.max_context - len(path.token_ids)
            asked = (context, self._turn_tokens, max_tokens)
            wanted = min(limit for limit in asked if limit is not None)
            is_first = self._is_first(conversation, path)
            num_new = 0 if is_first else len(path.token_ids) - path.num_reused
            left = limits.max_tokens - self._num_stored - self._num_held - num_new
            has_begun = bool(self._conversations) or is_first
            has_branch = self._has_branch(path)
            if not (has_branch or self._num_sampling):
                raise NoRoom(
                    UsedUp.BRANCHES,
                    f"a rollout has at most {self._max_branches}, and this prompt needs another",
                )
            if has_branch and ((has_begun and left >= wanted) or not self._num_held):
                break
            await self._changed.next()
        most = min(left, context)
        if is_first and len(path.token_ids) > limits.max_prompt_tokens:
            raise FirstTooLong(
                f"begins with {len(path.token_ids)} tokens; it may have {limits.max_prompt_tokens} "
                "(data.max_prompt_tokens). Shorten its first text, or raise that."
            )
        if most < 1:
            raise NoRoom(UsedUp.TOKENS)
        room = TokenBudget(
            conversation=conversation,
            path=path,
            num_new=num_new,
            most=most,
            wanted=min(most, wanted),
        )
        if is_first:
            self._first = room
        self._num_held += room.wanted + num_new
        self._num_calls += 1
        self._num_sampling += 1
        return room

    def give_back(self, room: TokenBudget, *, has_reply: bool) -> None:
        """Its call has ended. Without a reply it is as if it had not been; with one, the reply is
        put into its conversation before anybody else runs.
        """
        self._num_held -= room.wanted + room.num_new
        self._num_sampling -= 1
        if not has_reply:
            self._num_calls -= 1
        elif room.conversation not in self._conversations:
            self._conversations.append(room.conversation)
        self._changed.notify()

    def _has_branch(self, path: Path) -> bool:
        """Return whether the branches are within the limit, however the calls under way end: of two
        that go on from the same branch, one begins another.
        """
        if self._max_branches is None:
            return True
        num_branches = sum(one.num_branches for one in self._conversations) + self._num_sampling
        if self._num_sampling or path.begins_branch:
            num_branches += 1
        return num_branches <= self._max_branches

    def _is_first(self, conversation: Conversation, path: Path) -> bool:
        """Whether it is the prompt that all is counted beyond: the first one, which calls at the
        same time may share.
        """
        first = self._first
        if self._conversations:
            return False
        if first is None or not self._num_held:
            return True
        return conversation is first.conversation and (path.seat, path.token_ids) == (
            first.path.seat,
            first.path.token_ids,
        )

    def _too_long(self, error: TextTooLong) -> Exception:
        """Whoever begins with it has made a mistake, whoever goes on with it no room."""
        limits = self._limits
        if not self._conversations and not self._num_held:
            return FirstTooLong(
                f"begins with {error}; it may have {limits.max_prompt_tokens} "
                "(data.max_prompt_tokens). Shorten its first text, or raise that."
            )
        return NoRoom(
            UsedUp.TOKENS,
            f"the environment says {error}; a conversation may have {limits.max_context} "
            "(data.max_prompt_tokens + sampling.max_tokens). Let it say less, such as "
            "text[:8000], or raise these.",
        )

    @property
    def _num_stored(self) -> int:
        if not self._conversations:
            return 0
        assert self._first is not None
        num_tokens = sum(one.num_tokens for one in self._conversations)
        return num_tokens - len(self._first.path.token_ids)
