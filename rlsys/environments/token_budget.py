"""Token, turn and branch budget of an episode whose calls run concurrently.

    prompt ──► reserve ──► (an engine samples) ──► release
                 │ waits while running calls hold tokens that they may not need

The store reserves a fixed number of tokens and branches for a rollout. So all tokens after the
first prompt, over all branches, share one limit. A call reserves the tokens that it asks for until
it ends; then the unused ones are free for other calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from rlsys.common.async_condition import AsyncCondition
from rlsys.environments.tokens.conversation import Conversation, Path, TextTooLong
from rlsys.types import MAX_BRANCHES


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Limits of a rollout, in tokens."""

    max_prompt_tokens: int  # before the first reply
    max_tokens: int  # after the first prompt, over all branches
    max_context: int  # of one branch


class UsedUp(StrEnum):
    """Limit of an episode that leaves no budget for another reply."""

    TURNS = "turns"
    BRANCHES = "branches"
    TOKENS = "tokens or context"


class NoRoom(Exception):
    """Turns, branches, tokens or context of an episode are used up."""

    def __init__(self, used_up: UsedUp, details: str = "") -> None:
        message = f"{used_up} are used up"
        super().__init__(f"{message}: {details}" if details else message)
        self.used_up = used_up


class FirstTooLong(Exception):
    """A first prompt above the limit, which a new attempt would repeat."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBudget:
    """Tokens reserved for one reply."""

    conversation: Conversation
    path: Path
    num_new: int  # tokens of the path that the conversation does not contain yet
    available: int  # tokens that may follow the path
    requested: int  # at most `available`; if fewer, a reply cut there does not truncate the episode


class EpisodeBudget:
    """Budget of one episode.

    Args:
        turn_tokens: Limit of one reply.
        max_branches: Limit over all conversations, that of a rollout in the store. None: no limit.
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
        self._num_sampling = 0  # running calls, each of which may begin a branch
        self._max_turns = max_turns
        self._turn_tokens = turn_tokens
        self._conversations: list[Conversation] = []  # in the order of their first replies
        self._first: TokenBudget | None = None  # tokens of its prompt are not counted
        self._num_held = 0  # tokens that running calls may still add
        self._num_calls = 0  # whose turn is taken: waiting, running, or ended with a reply
        self._changed = AsyncCondition()

    @property
    def has_turns(self) -> bool:
        """Return whether another reply may be sampled."""
        return self.num_turns_left > 0

    @property
    def num_turns_left(self) -> float:
        """The number of replies that may still be requested; infinity without a limit."""
        return math.inf if self._max_turns is None else self._max_turns - self._num_calls

    def take_turns(self, num: int) -> None:
        """Take the turns of `num` replies. The caller must return those without a reply.

        Raises NoRoom if there are fewer.
        """
        if num > self.num_turns_left:
            raise NoRoom(UsedUp.TURNS)
        self._num_calls += num

    def return_turns(self, num: int) -> None:
        """Return turns for which there was no reply."""
        self._num_calls -= num

    async def reserve(
        self, conversation: Conversation, prompt: Callable[[], Path], max_tokens: int | None
    ) -> TokenBudget:
        """Reserve tokens for a reply, whose turn is taken. The caller must `release` them.

        `prompt` is called again whenever other calls have ended in the meantime, since it may share
        their tokens. Raises NoRoom, FirstTooLong and the errors of `prompt`.
        """
        limits = self._limits
        while True:
            try:
                path = prompt()
            except TextTooLong as error:
                raise self._too_long(error) from None
            context = limits.max_context - len(path.token_ids)
            upper = (context, self._turn_tokens, max_tokens)
            requested = min(limit for limit in upper if limit is not None)
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
            if has_branch and ((has_begun and left >= requested) or not self._num_held):
                break
            await self._changed.next()
        available = min(left, context)
        if is_first and len(path.token_ids) > limits.max_prompt_tokens:
            raise self._first_too_long(f"{len(path.token_ids)} tokens")
        if available < 1:
            raise NoRoom(UsedUp.TOKENS)
        budget = TokenBudget(
            conversation=conversation,
            path=path,
            num_new=num_new,
            available=available,
            requested=min(available, requested),
        )
        if is_first:
            self._first = budget
        self._num_held += budget.requested + num_new
        self._num_sampling += 1
        return budget

    def release(self, budget: TokenBudget, *, has_reply: bool) -> None:
        """Return the unused tokens of a call that has ended.

        The caller adds a reply to the conversation before it yields to other calls.
        """
        self._num_held -= budget.requested + budget.num_new
        self._num_sampling -= 1
        if has_reply and budget.conversation not in self._conversations:
            self._conversations.append(budget.conversation)
        self._changed.notify()

    def _has_branch(self, path: Path) -> bool:
        """Return whether the limit of branches holds, however the running calls end.

        If two calls continue the same branch, one of them begins a new one.
        """
        if self._max_branches is None:
            return True
        num_branches = sum(one.num_branches for one in self._conversations) + self._num_sampling
        if self._num_sampling or path.begins_branch:
            num_branches += 1
        return num_branches <= self._max_branches

    def _is_first(self, conversation: Conversation, path: Path) -> bool:
        """Return whether it is the first prompt, whose tokens are not counted.

        Concurrent calls may share it.
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
        """Return the error about a text that exceeds the context by itself."""
        if not self._conversations and not self._num_held:
            return self._first_too_long(str(error))
        return NoRoom(
            UsedUp.TOKENS,
            f"a message has {error}, more than the context of {self._limits.max_context} tokens "
            "(data.max_prompt_tokens + sampling.max_tokens). Shorten it, for example with "
            "text[:8000], or raise these options.",
        )

    def _first_too_long(self, length: str) -> FirstTooLong:
        return FirstTooLong(
            f"the first prompt has {length}, more than data.max_prompt_tokens="
            f"{self._limits.max_prompt_tokens}. Shorten the first text, or raise "
            "data.max_prompt_tokens."
        )

    @property
    def _num_stored(self) -> int:
        if not self._conversations:
            return 0
        assert self._first is not None
        num_tokens = sum(one.num_tokens for one in self._conversations)
        return num_tokens - len(self._first.path.token_ids)
