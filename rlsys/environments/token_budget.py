"""Token, turn and branch budget of an episode whose calls run concurrently.

    prompt ──► reserve ──► (an engine samples) ──► keep ──► settle, once per request
                 │ waits while running calls hold tokens that they may not need
                 └───────── (no reply) ──────────► release

The store reserves a fixed number of tokens and branches for a rollout. So all tokens after the
first prompt, over all branches, share one limit. A call reserves the tokens that it asks for until
it ends; then the unused ones are free for other calls. The replies to one request are added to
their conversation together. Until then each one keeps the tokens that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlsys.common.async_condition import AsyncCondition
from rlsys.environments.tokens.conversation import Conversation, Path, TextTooLong
from rlsys.environments.tokens.token_tree import TreePlace, num_shared
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
        self._running: dict[TokenBudget, int] = {}  # calls, with the tokens that they may add
        self._kept: dict[TokenBudget, int] = {}  # replies not added yet, with their tokens
        self._max_turns = max_turns
        self._turn_tokens = turn_tokens
        self._conversations: list[Conversation] = []  # in the order of their first replies
        self._first: TokenBudget | None = None  # tokens of its prompt are not counted
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
        self,
        conversation: Conversation,
        prompt: Callable[[], Path],
        max_tokens: int | None,
        siblings: Sequence[TokenBudget] = (),
    ) -> TokenBudget:
        """Reserve tokens for a reply, whose turn is taken. The caller must `release` or `keep` it.

        Args:
            conversation: The conversation of the prompt.
            prompt: Returns the path. It is called again whenever other calls have ended in the
                meantime, since it may share their tokens.
            max_tokens: Limit of the reply; None for the rest of the episode's tokens.
            siblings: Kept budgets of the same request. The caller may append to it meanwhile.

        Raises:
            NoRoom: Tokens, context or branches are used up.
            FirstTooLong: The first prompt is above the limit.
            Exception: An error of `prompt`.
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
            num_new = 0 if is_first else _num_new(conversation, path, siblings)
            left = limits.max_tokens - self._num_stored - self._num_held - num_new
            has_begun = bool(self._conversations or siblings) or is_first
            has_branch = self._has_branch(conversation, path)
            if not (has_branch or self._running):
                raise NoRoom(
                    UsedUp.BRANCHES,
                    f"a rollout has at most {self._max_branches}, and this prompt needs another",
                )
            if has_branch and has_begun and (left >= requested or not self._running):
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
        self._running[budget] = budget.requested + num_new
        return budget

    def release(self, budget: TokenBudget) -> None:
        """Return the tokens of a call that has ended without a reply."""
        del self._running[budget]
        self._changed.notify()

    def keep(self, budget: TokenBudget, num_tokens: int, siblings: Sequence[TokenBudget]) -> None:
        """Return the unused tokens of a call that has ended with a reply of `num_tokens`.

        `siblings` are the kept budgets of the same request. The caller must `settle` all of them.
        """
        del self._running[budget]
        num_new = min(budget.num_new, _num_new(budget.conversation, budget.path, siblings))
        self._kept[budget] = num_tokens + num_new
        self._changed.notify()

    def settle(self, budgets: Sequence[TokenBudget], *, are_added: bool) -> None:
        """Return the tokens of the replies of a request, which are added or discarded.

        The caller adds replies to their conversations before it yields to other calls.
        """
        for budget in budgets:
            del self._kept[budget]
            if are_added and budget.conversation not in self._conversations:
                self._conversations.append(budget.conversation)
        self._changed.notify()

    @property
    def _num_held(self) -> int:
        """Number of tokens that running calls and kept replies may still add."""
        return sum(self._running.values()) + sum(self._kept.values())

    def _has_branch(self, conversation: Conversation, path: Path) -> bool:
        """Return whether the limit of branches holds, however the running calls end.

        If two calls continue the same branch, one of them begins a new one.
        """
        if self._max_branches is None:
            return True
        num_branches = sum(one.num_branches for one in self._conversations) + len(self._running)
        ends: set[tuple[Conversation, TreePlace]] = set()  # that kept replies continue
        for kept in self._kept:
            own = kept.conversation
            end = own.placed(kept.path).continued
            num_branches += end is None or (own, end) in ends
            if end is not None:
                ends.add((own, end))
        end = path.continued
        num_branches += bool(self._running) or end is None or (conversation, end) in ends
        return num_branches <= self._max_branches

    def _is_first(self, conversation: Conversation, path: Path) -> bool:
        """Return whether it is the first prompt, whose tokens are not counted.

        Concurrent calls may share it.
        """
        first = self._first
        if self._conversations:
            return False
        if first is None or not (self._running or self._kept):
            return True
        return conversation is first.conversation and (path.seat, path.token_ids) == (
            first.path.seat,
            first.path.token_ids,
        )

    def _too_long(self, error: TextTooLong) -> Exception:
        """Return the error about a text that exceeds the context by itself."""
        if not (self._conversations or self._running or self._kept):
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


def _num_new(conversation: Conversation, path: Path, siblings: Sequence[TokenBudget]) -> int:
    """Return the number of tokens that a path adds to its conversation and to its siblings."""
    num_shared_with = [
        len(path.token_ids)
        if path.token_ids is one.path.token_ids
        else num_shared(path.token_ids, one.path.token_ids)
        for one in siblings
        if one.conversation is conversation and one.path.seat == path.seat
    ]
    return len(path.token_ids) - max([path.num_reused, *num_shared_with])
