"""An episode: its turns, its rewards and its limits. `Chat` and the HTTP endpoint use it.

    messages ──► Conversation.prompt ──► Sampler.sample ──► Conversation.reply ──► Turn
                        │ token budget                               │
                        └── used up: the episode is over             └── rewards ──► Played

The sampler is the only I/O. Times are read from the clock of the running event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from rlsys.common.call_clock import Stopwatch
from rlsys.environments.environment import Environment
from rlsys.environments.returned_rewards import FINAL, EpisodeFailed, number_in, numbers_of
from rlsys.environments.token_budget import (
    EpisodeBudget,
    EpisodeLimits,
    FirstTooLong,
    NoRoom,
    TokenBudget,
    UsedUp,
)
from rlsys.environments.tokens.codec import Codec
from rlsys.environments.tokens.conversation import Conversation, Path, TextTooLong
from rlsys.environments.tokens.text_prompts import TextPrompt, TextPrompts, before_stop
from rlsys.environments.tokens.token_tree import Trajectory, joined, without_tokens
from rlsys.errors import InvalidValue, require
from rlsys.text.messages import Message
from rlsys.types import (
    MAX_BRANCHES,
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParams,
)

AFTER_DONE = "the environment called the chat after chat.done"

# Role of the last line of a transcript, which gives the reason why the episode ended.
ENDED = "ended"


class Sampler(Protocol):
    """Source of replies."""

    async def sample(self, request: GenerationRequest) -> Generation:
        """Return one reply. The caller cancels it if the reply is not needed any more."""


class EpisodeOver(BaseException):
    """Raised by a chat whose episode is over; environments need not catch it.

    The reward of the episode is the sum of its turns' rewards and the environment's format_reward.
    """


@dataclass(kw_only=True, eq=False)
class Turn:
    """A sampled reply."""

    seat: int
    is_frozen: bool  # sampled by a frozen model: not trained
    conversation: Conversation
    message: dict[str, Any]
    text: str  # of the reply, without the end-of-turn tokens
    is_truncated: bool
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    prompt_token_ids: Sequence[int]
    policy_version: int  # of its newest token; -1 for a reply without tokens
    reward: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Partner:
    """Another model that plays a seat.

    A frozen model has its own codec and exchanges text only; the rollout contains of it what the
    environment passes on to the policy. A trained policy uses the codec of the first one (`codec`
    is None), and its turns are part of the rollout.
    """

    sampler: Sampler
    codec: Codec | None


NO_PARTNERS: Mapping[int, Partner] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, eq=False)
class _Side:
    """Sampler, conversation and budget of a seat.

    Trained policies share conversation and budget. A frozen model has its own in each seat.
    """

    sampler: Sampler
    conversation: Conversation
    budget: EpisodeBudget
    is_frozen: bool


@dataclass(eq=False)
class _Prompt:
    """A prompt of one or several replies. It is rendered once.

    Waiting calls share it, and what it shares with replies that ended meanwhile is found again.
    """

    conversation: Conversation
    render: Callable[[], Path]
    known: Path | None = None

    def path(self) -> Path:
        """Return the path. Raises the errors of `Conversation.prompt`."""
        self.known = self.conversation.placed(self.known) if self.known else self.render()
        return self.known


@dataclass(frozen=True, eq=False)
class _Reply:
    """A sampled reply that is not part of its conversation yet."""

    budget: TokenBudget
    generation: Generation

    @property
    def is_cut(self) -> bool:
        return self.generation.finish_reason is FinishReason.LENGTH

    @property
    def uses_up_tokens(self) -> bool:
        """Return whether it was cut at the end of the episode's tokens or of the context."""
        return self.is_cut and self.budget.requested == self.budget.available


@dataclass(frozen=True, kw_only=True)
class Played:
    """Outcome of an episode."""

    trajectory: Trajectory
    total: float
    components: Mapping[str, float]  # by name; their sum is the total
    finish_reason: FinishReason
    last_reply: FinishReason  # LENGTH: the policy's last reply was cut, even if the episode was not
    transcript: Sequence[Mapping[str, Any]]


@dataclass(eq=False)
class Episode:
    """An attempt to play an environment.

    Attributes:
        key: Name of the episode, unique in its host.
        base: Sampling parameters of turns that do not set their own.
        partners: Models other than the policy, by number of their seat.
    """

    key: str
    environment: Environment
    codec: Codec
    sampler: Sampler
    limits: EpisodeLimits
    base: SamplingParams
    seed: int
    partners: Mapping[int, Partner] = field(default_factory=dict)
    is_truncated: bool = False
    is_out_of_branches: bool = False  # a prompt needed more than MAX_BRANCHES
    failure: Exception | None = None  # the episode has no reward, whatever its function returns
    num_tool_calls: int = 0
    turns: list[Turn] = field(default_factory=list)
    named: dict[str, float] = field(default_factory=dict)  # rewards of turns, by name
    # Runs while the environment works. It stops while a reply is sampled and in `waiting` blocks.
    clock: Stopwatch = field(
        default_factory=lambda: Stopwatch(asyncio.get_running_loop().time), init=False
    )

    def __post_init__(self) -> None:
        environment = self.environment
        self._policy = _Side(
            sampler=self.sampler,
            conversation=Conversation(self.codec, max_tokens=self.limits.max_context),
            budget=EpisodeBudget(
                self.limits, max_turns=environment.max_turns, turn_tokens=environment.turn_tokens
            ),
            is_frozen=False,
        )
        self._partners = {
            seat: replace(self._policy, sampler=partner.sampler)
            if partner.codec is None
            else _Side(
                sampler=partner.sampler,
                conversation=Conversation(partner.codec, max_tokens=self.limits.max_context),
                budget=EpisodeBudget(
                    self.limits,
                    max_turns=None,
                    turn_tokens=environment.turn_tokens,
                    max_branches=None,
                ),
                is_frozen=True,
            )
            for seat, partner in self.partners.items()
        }
        self._raw: Conversation | None = None  # of prompts without a chat template
        self._texts: TextPrompts | None = None
        self._num_requests = 0

    @property
    def is_over(self) -> bool:
        """Return whether tokens, branches or turns are used up. Running calls have their turns."""
        has_turns = self._policy.budget.has_turns
        return self.is_truncated or self.is_out_of_branches or not has_turns

    # Called for the environment

    async def turn(
        self,
        messages: Sequence[Message],
        *,
        seat: int = 0,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> Turn:
        """Sample the reply of a seat to the messages.

        Raises EpisodeOver if tokens, turns or branches are used up, and InvalidValue for messages
        that cannot be rendered.
        """
        (turn,) = await self.replies(messages, seat=seat, tools=tools, max_tokens=max_tokens)
        assert turn is not None
        return turn

    async def replies(
        self,
        messages: Sequence[Message],
        *,
        num: int = 1,
        seat: int = 0,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        structure: str = "",
    ) -> list[Turn | None]:
        """Sample `num` replies of a seat to the messages concurrently.

        `structure` is a structural tag that each reply must match (rlsys.common.structural_tags).

        Returns:
            The replies; None where tokens or branches were used up, but not for all of them.

        Raises:
            EpisodeOver: Tokens, turns or branches are used up, so there is no reply.
            InvalidValue: The messages cannot be rendered, or `num` is larger than the number of
                turns that are left.
        """
        side = self._partners.get(seat, self._policy)
        conversation = side.conversation
        prompt = _Prompt(conversation, lambda: conversation.prompt(messages, tools, seat=seat))
        return await self._sample_turns(side, [prompt] * num, max_tokens, stop, structure)

    def text_prompt(self, prompt: str | Sequence[int]) -> TextPrompt:
        """Return a prompt for `complete`: a text or token ids, without the chat template."""
        if self._texts is None:
            self._texts = TextPrompts(self.codec.without_template, self.limits.max_context)
        return TextPrompt(self._texts, prompt)

    async def complete(
        self,
        prompts: Sequence[TextPrompt],
        *,
        num: int = 1,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        structure: str = "",
    ) -> list[Turn | None]:
        """Sample `num` continuations by the policy of each prompt concurrently.

        A prompt that begins with an earlier prompt and its answer reuses their tokens. Returns the
        continuations by prompt, as `replies` does, and raises its errors.
        """
        if self._raw is None:
            codec = self.codec.without_template
            self._raw = Conversation(codec, max_tokens=self.limits.max_context)
        raw = self._raw
        for prompt in prompts:  # before anything is sampled
            with contextlib.suppress(TextTooLong):  # raised again where tokens are reserved
                prompt.token_ids  # noqa: B018
        asked = [_Prompt(raw, functools.partial(_path_of_text, raw, prompt)) for prompt in prompts]
        repeated = [one for one in asked for _ in range(num)]
        turns = await self._sample_turns(self._policy, repeated, max_tokens, stop, structure)
        for number, turn in enumerate(turns):
            if turn is not None:
                prompt, is_cut = prompts[number // num], turn.is_truncated
                answer = turn.text if is_cut else before_stop(turn.text, stop)
                prompt.prompts.add(prompt, turn.token_ids, turn.text, answer, is_cut=is_cut)
        return turns

    async def _sample_turns(
        self,
        side: _Side,
        prompts: Sequence[_Prompt],
        max_tokens: int | None,
        stop: tuple[str, ...],
        structure: str,
    ) -> list[Turn | None]:
        """Sample a reply to each prompt. See `replies`.

        The replies become part of the episode together, once all have ended. If the call is
        cancelled or raises an error, none does.
        """
        require(
            max_tokens is None or max_tokens >= 1,
            "max_tokens",
            max_tokens,
            rule="must be at least 1",
            fix="Leave it out for the rest of the episode's tokens.",
        )
        turns: list[Turn | None] = [None] * len(prompts)
        replies: dict[int, _Reply] = {}  # by number of the prompt, in the order of their ends
        kept: list[TokenBudget] = []  # of the replies
        ends: list[NoRoom] = []

        async def sample(number: int) -> None:
            try:
                budget = await self._reserve(side, prompts[number], max_tokens, kept)
                generation = await self._sample(side, budget, stop, structure)
                side.budget.keep(budget, len(generation.token_ids), kept)
                kept.append(budget)
                replies[number] = _Reply(budget, generation)
            except NoRoom as end:
                ends.append(end)
            if len(replies) + len(ends) == len(prompts):
                self._add(side, replies, ends, turns)

        self._take_turns(side, len(prompts))
        try:
            await _side_by_side([sample(number) for number in range(len(prompts))])
        finally:
            if turns.count(None) == len(turns):
                side.budget.settle(kept, are_added=False)
            side.budget.return_turns(turns.count(None))
        if len(ends) == len(prompts):
            raise EpisodeOver(str(ends[0]))
        return turns

    def _add(
        self,
        side: _Side,
        replies: Mapping[int, _Reply],
        ends: Sequence[NoRoom],
        turns: list[Turn | None],
    ) -> None:
        """Add the replies to a request to the episode and put their turns into `turns`."""
        for end in ends:
            self.is_truncated |= end.used_up is UsedUp.TOKENS
            self.is_out_of_branches |= end.used_up is UsedUp.BRANCHES
        for number, reply in replies.items():
            self.is_truncated |= reply.uses_up_tokens
            turns[number] = turn = _turn_of(reply, is_frozen=side.is_frozen)
            self.turns.append(turn)
        if replies:
            budgets = [reply.budget for reply in replies.values()]
            side.budget.settle(budgets, are_added=True)

    def _take_turns(self, side: _Side, num: int) -> None:
        # A frozen model may still reply after the last trained turn.
        if self.is_truncated if side.is_frozen else self.is_over:
            raise EpisodeOver(AFTER_DONE)
        left = side.budget.num_turns_left
        require(
            num <= left,
            "n",
            rule=f"the request has {num} answers, and max_turns leaves {left} in this episode",
            fix="Request fewer answers.",
        )
        side.budget.take_turns(num)

    async def _reserve(
        self,
        side: _Side,
        prompt: _Prompt,
        max_tokens: int | None,
        siblings: Sequence[TokenBudget],
    ) -> TokenBudget:
        """Reserve the tokens of a reply.

        Raises NoRoom if a budget is used up and EpisodeFailed if the first prompt is too long.
        """

        def checked_prompt() -> Path:
            # The turn of this call is taken, so turns are not used up.
            if self.is_truncated:
                raise NoRoom(UsedUp.TOKENS)
            if self.is_out_of_branches and not side.is_frozen:
                raise NoRoom(UsedUp.BRANCHES)
            return prompt.path()

        name = self.environment.name
        try:
            return await side.budget.reserve(
                prompt.conversation, checked_prompt, max_tokens, siblings
            )
        except NoRoom as error:
            if error.used_up is UsedUp.BRANCHES and not self.environment.is_agent:
                self.failure = EpisodeFailed(
                    f"environment {name!r}: an episode needs {MAX_BRANCHES + 1} branches, at most "
                    f"{MAX_BRANCHES} are possible. Fork less often, or only append to messages."
                )
                raise self.failure from None
            raise
        except FirstTooLong as error:
            seat = "a frozen model's seat of " if side.is_frozen else ""
            self.failure = EpisodeFailed(f"{seat}environment {name!r}: {error}")
            raise self.failure from None

    def reward(self, turn: Turn | None, value: object, name: str) -> None:
        """Add a reward to a turn. Rewards of a frozen model's turns are ignored.

        Raises:
            InvalidValue: There is no turn yet.
            EpisodeFailed: `value` is not a finite number.
        """
        if turn is None:
            raise InvalidValue(
                "chat.reward",
                value,
                rule="no reply has been sampled yet that the reward could belong to",
                fix="Sample a reply first, or return the reward at the end.",
            )
        number = number_in(value, f"chat.reward({value!r})")
        if turn.is_frozen:
            return
        turn.reward += number
        self.named[name] = self.named.get(name, 0.0) + number

    # Called by the host

    def own_time_left_s(self) -> float:
        """Return the seconds until the environment has used up its own time (see `clock`)."""
        return self.environment.timeout_s - self.clock.elapsed_s

    def played(self, returned: object, *, over: EpisodeOver | None = None) -> Played:
        """Return the outcome of the episode.

        An episode may end without a reply of the policy, such as a game that the opponent resigns
        at once. It has a reward and no tokens.

        Args:
            returned: Value that the environment's function returned.
            over: Reason why the episode ended before its function returned, a fault of the model.

        Raises:
            EpisodeFailed: `returned` is not a reward, or no reply was sampled before `over`.
        """
        environment = self.environment
        own = self._policy_turns
        if over is not None and not own:
            raise EpisodeFailed(
                f"environment {environment.name!r} ended before the policy's first reply: {over}. "
                "Raise the token limits, or give a frozen model's seat shorter texts."
            )
        if over is not None:
            final: Mapping[str, float] = {FINAL: environment.format_reward}
        else:
            final = numbers_of(environment.name, returned, or_none=bool(self.named))
        total = sum(final.values())
        if own:
            own[-1].reward += total
        components = dict(self.named)
        for name, value in final.items():  # added to rewards of turns with the same name
            components[name] = components.get(name, 0.0) + value
        return Played(
            trajectory=self._trajectory(),
            total=sum(components.values()),
            components=components,
            finish_reason=FinishReason.LENGTH if self.is_truncated else FinishReason.STOP,
            last_reply=FinishReason.LENGTH if own and own[-1].is_truncated else FinishReason.STOP,
            transcript=self._transcript(str(over) if over is not None else ""),
        )

    @property
    def _policy_turns(self) -> list[Turn]:
        return [turn for turn in self.turns if not turn.is_frozen]

    def _trajectory(self) -> Trajectory:
        own = self._policy_turns
        parts = [
            conversation.trajectory(
                [turn.reward for turn in own if turn.conversation is conversation]
            )
            for conversation in _conversations(own)
        ]
        return functools.reduce(joined, parts) if parts else without_tokens(self.codec.end_token_id)

    def _transcript(self, end_reason: str) -> list[Mapping[str, Any]]:
        """Return the messages by branch, for people to read.

        Branches of trained policies come first. The last line is the reason why the episode ended,
        unless its function returned. With several seats, each line names the seat of its branch.
        Replies of frozen models have sampled=False.
        """
        frozen = [side.conversation for side in self._partners.values() if side.is_frozen]
        conversations = _conversations([*self._policy_turns, *self.turns])
        branches = [
            (branch, self._seat_of(seat), one not in frozen)
            for one in conversations
            for seat, branch in zip(one.branch_seats(), one.transcript(), strict=True)
        ]
        lines: list[Mapping[str, Any]] = []
        for number, (branch, seat, is_own) in enumerate(branches):
            lines += [
                {
                    "branch": number,
                    **seat,
                    "role": role,
                    "text": text,
                    "sampled": is_sampled and is_own,
                }
                for role, text, is_sampled in branch
            ]
        if end_reason:
            last = max(len(branches) - 1, 0)
            lines.append({"branch": last, "role": ENDED, "text": end_reason, "sampled": False})
        return lines

    def _seat_of(self, number: int) -> Mapping[str, str]:
        """Return the field `seat` of a transcript's line; none if there is only one seat."""
        seats = self.environment.seats
        return {"seat": seats[number]} if len(seats) > 1 else {}

    def _request(
        self, path: Path, max_tokens: int, stop: tuple[str, ...], structure: str
    ) -> GenerationRequest:
        base, own = self.base, self.environment.stop
        turn, self._num_requests = self._num_requests, self._num_requests + 1
        return GenerationRequest(
            request_id=f"{self.key}.{turn}",
            prompt_token_ids=path.token_ids,
            sampling=replace(
                base, max_tokens=max_tokens, stop=(*base.stop, *own, *stop), structure=structure
            ),
            seed=_turn_seed(self.seed, turn),
            num_shared_tokens=path.num_reused,
            priority=min(turn, 1),  # the prefix of later turns is in the KV cache
        )

    async def _sample(
        self, side: _Side, budget: TokenBudget, stop: tuple[str, ...], structure: str
    ) -> Generation:
        """Sample a reply within its budget. Without a reply, the budget is released."""
        self.clock.pause()
        try:
            request = self._request(budget.path, budget.requested, stop, structure)
            return await side.sampler.sample(request)
        except BaseException as error:
            if isinstance(error, Exception):
                self.failure = self.failure or error
            side.budget.release(budget)
            raise
        finally:
            self.clock.resume()


def _turn_of(reply: _Reply, *, is_frozen: bool) -> Turn:
    """Add a reply to its conversation and return its turn."""
    budget, generation = reply.budget, reply.generation
    message = budget.conversation.reply(budget.path, generation)
    return Turn(
        seat=budget.path.seat,
        is_frozen=is_frozen,
        conversation=budget.conversation,
        message=message,
        text=str(message.get("content") or ""),
        is_truncated=reply.is_cut,
        token_ids=generation.token_ids.tolist(),
        logprobs=generation.sampler_logprobs.tolist(),
        prompt_token_ids=budget.path.token_ids,
        policy_version=int(generation.policy_versions.max(initial=-1)),
    )


def _path_of_text(conversation: Conversation, prompt: TextPrompt) -> Path:
    return conversation.prompt_of_tokens(prompt.token_ids)


async def _side_by_side(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently. Raise the first error once the others have ended."""
    if len(works) == 1:
        return await works[0]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _conversations(turns: Iterable[Turn]) -> list[Conversation]:
    """Return the conversations of the turns, in the order of their first replies."""
    return list(dict.fromkeys(turn.conversation for turn in turns))


def _turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn: 32 bits, mixed by the finalizer of MurmurHash3."""
    mixed = (seed * 0x9E3779B1 + turn * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)
