"""One episode: its turns, what they are worth, and its limits. Chats and the endpoint stand on it.

    messages ──► Conversation.prompt ──► Sampler.sample ──► Conversation.reply ──► Turn
                        │ what still fits                            │
                        └── nothing: the episode is over             └── rewards ──► Played

Pure but for the sampler. All times are of the running event loop's clock.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from rlsys.common.call_clock import Stopwatch
from rlsys.common.user_functions import number_of, printable
from rlsys.environments.environment import Environment
from rlsys.environments.token_budget import (
    EpisodeLimits,
    FirstTooLong,
    NoRoom,
    Rooms,
    TokenBudget,
    UsedUp,
)
from rlsys.environments.tokens.codec import Codec
from rlsys.environments.tokens.conversation import Conversation, Path
from rlsys.environments.tokens.token_tree import Trajectory, joined, without_tokens
from rlsys.text.messages import Message
from rlsys.types import (
    MAX_BRANCHES,
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParams,
)

# Of the names of rewards: what the function returned.
FINAL = "final"


WENT_ON = "the environment went on after chat.done"

# Of the last line of a transcript, behind the roles of those who spoke.
ENDED = "ended"


class Sampler(Protocol):
    async def sample(self, request: GenerationRequest) -> Generation:
        """One reply. Cancelled: nobody wants it any more."""


class EpisodeOver(BaseException):
    """Raised out of a chat that cannot go on: the function need not catch it. The episode is worth
    its turns' rewards and the environment's format_reward.
    """


class EpisodeFailed(RuntimeError):
    """The environment has made a mistake that a fresh attempt would make too; the message says
    which.
    """


@dataclass(kw_only=True, eq=False)
class Turn:
    """One reply of whoever plays the seat."""

    seat: int
    is_frozen: bool  # a frozen model's, which nothing is trained on
    conversation: Conversation
    message: dict[str, Any]
    text: str  # of the reply, without its end
    is_truncated: bool
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    prompt_token_ids: Sequence[int]
    policy_version: int  # of its newest token; -1 where it has none
    reward: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Partner:
    """Another model that plays a seat. A frozen one has tokens of its own, so that all that it
    reads and says is text; the rollout has of it what the environment tells the policy. One that is
    trained has the policy's (`codec` is None), and its turns are part of the rollout.
    """

    sampler: Sampler
    codec: Codec | None


NO_PARTNERS: Mapping[int, Partner] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, eq=False)
class _Side:
    """Who samples, what was said, and what may be said still. Whoever is trained has these
    in common, but for who samples; a frozen model in each of its seats has its own.
    """

    sampler: Sampler
    conversation: Conversation
    rooms: Rooms
    is_frozen: bool


@dataclass(frozen=True, kw_only=True)
class _Text:
    """A text without a chat template, and its continuation, as messages."""

    text: str
    messages: list[Message]
    is_open: bool = False  # cut, not ended

    def is_begun_by(self, prompt: str) -> bool:
        """Whether a prompt goes on from it. Where the policy had ended, nothing can be asked behind
        its end but what has a text of its own: the same again is another text.
        """
        return prompt.startswith(self.text) and (self.is_open or len(prompt) > len(self.text))


@dataclass(frozen=True, kw_only=True)
class Played:
    """What an episode was."""

    trajectory: Trajectory
    total: float
    components: Mapping[str, float]  # by name; they sum up to the total
    finish_reason: FinishReason
    transcript: Sequence[Mapping[str, Any]]


@dataclass(eq=False)
class Episode:
    """`key` names it among all of its host, an attempt of its own; `base` what is sampled of it
    where a turn does not say otherwise; `partners` play the seats of these numbers.
    """

    key: str
    environment: Environment
    codec: Codec
    sampler: Sampler
    limits: EpisodeLimits
    base: SamplingParams
    seed: int
    partners: Mapping[int, Partner] = field(default_factory=dict)
    is_over: bool = False
    is_truncated: bool = False
    is_out_of_branches: bool = False  # a prompt needed more than MAX_BRANCHES
    failure: Exception | None = None  # no reward of it counts, whatever its function returns
    num_tool_calls: int = 0
    turns: list[Turn] = field(default_factory=list)
    named: dict[str, float] = field(default_factory=dict)  # rewards of turns, by name
    # Runs while the environment works, not while it samples or waits for a place.
    clock: Stopwatch = field(
        default_factory=lambda: Stopwatch(asyncio.get_running_loop().time), init=False
    )

    def __post_init__(self) -> None:
        environment = self.environment
        self._own = _Side(
            sampler=self.sampler,
            conversation=Conversation(self.codec, max_tokens=self.limits.max_context),
            rooms=Rooms(
                self.limits, max_turns=environment.max_turns, turn_tokens=environment.turn_tokens
            ),
            is_frozen=False,
        )
        self._partners = {
            seat: replace(self._own, sampler=partner.sampler)
            if partner.codec is None
            else _Side(
                sampler=partner.sampler,
                conversation=Conversation(partner.codec, max_tokens=self.limits.max_context),
                rooms=Rooms(
                    self.limits,
                    max_turns=None,
                    turn_tokens=environment.turn_tokens,
                    max_branches=None,
                ),
                is_frozen=True,
            )
            for seat, partner in self.partners.items()
        }
        self._raw: Conversation | None = None  # of texts without a chat template
        self._texts: list[_Text] = []
        self._num_asked = 0

    # What the environment does

    async def turn(
        self,
        messages: Sequence[Message],
        *,
        seat: int = 0,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        structure: str = "",
    ) -> Turn:
        """Sample the reply to the messages of whoever plays the seat. `structure`: what the reply
        must look like (rlsys.common.structural_tags). Raises EpisodeOver if there is no room for
        one, or no turn or branch left; ValueError for messages that cannot be rendered.
        """
        side = self._partners.get(seat, self._own)
        return await self._asked(
            side,
            side.conversation,
            lambda: side.conversation.prompt(messages, tools, seat=seat),
            max_tokens,
            stop,
            structure,
        )

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        structure: str = "",
    ) -> Turn:
        """Sample the policy's continuation of a text or of tokens, without the chat template. A
        prompt that begins with an earlier one and its continuation goes on from there. Raises as
        `turn` does.
        """
        if self._raw is None:
            self._raw = Conversation(
                self.codec.without_template, max_tokens=self.limits.max_context
            )
        conversation = self._raw
        if not isinstance(prompt, str):
            return await self._asked(
                self._own,
                conversation,
                lambda: conversation.prompt_of_tokens(prompt),
                max_tokens,
                stop,
                structure,
            )
        messages = self._known_beginning(prompt)
        turn = await self._asked(
            self._own,
            conversation,
            lambda: conversation.prompt(messages),
            max_tokens,
            stop,
            structure,
        )
        if turn.text:
            text, chain = prompt + turn.text, [*messages, turn.message]
            self._texts.append(_Text(text=text, messages=chain, is_open=turn.is_truncated))
        return turn

    async def _asked(
        self,
        side: _Side,
        conversation: Conversation,
        prompt: Callable[[], Path],
        max_tokens: int | None,
        stop: tuple[str, ...],
        structure: str,
    ) -> Turn:
        room = await self._room(side, conversation, prompt, max_tokens)
        path = room.path
        generation: Generation | None = None
        try:
            generation = await self._sampled(
                side, self._request(path, room.wanted, stop, structure)
            )
        finally:
            side.rooms.give_back(room, has_reply=generation is not None)
        is_cut = generation.finish_reason is FinishReason.LENGTH
        message = conversation.reply(path, generation)
        self.is_truncated |= is_cut and room.wanted == room.most
        self.is_over |= self.is_truncated or not side.rooms.has_turns
        turn = Turn(
            seat=path.seat,
            is_frozen=side.is_frozen,
            conversation=conversation,
            message=message,
            text=str(message.get("content") or ""),
            is_truncated=is_cut,
            token_ids=generation.token_ids.tolist(),
            logprobs=generation.sampler_logprobs.tolist(),
            prompt_token_ids=path.token_ids,
            policy_version=int(generation.policy_versions.max(initial=-1)),
        )
        self.turns.append(turn)
        return turn

    async def _room(
        self,
        side: _Side,
        conversation: Conversation,
        prompt: Callable[[], Path],
        max_tokens: int | None,
    ) -> TokenBudget:
        """Raises EpisodeOver where there is none, EpisodeFailed for a first prompt too long."""

        def goes_on() -> Path:
            # Behind the last turn that is trained on a frozen model may still reply.
            if self.is_truncated if side.is_frozen else self.is_over:
                raise EpisodeOver(WENT_ON)
            return prompt()

        try:
            return await side.rooms.take(conversation, goes_on, max_tokens)
        except NoRoom as reason:
            if reason.used_up is UsedUp.BRANCHES and not self.environment.is_agent:
                self.failure = EpisodeFailed(
                    f"an episode of {self.environment.name} needs {MAX_BRANCHES + 1} branches, "
                    f"and at most {MAX_BRANCHES} are kept; fork less often, or let conversations "
                    "only grow."
                )
                raise self.failure from None
            self.is_over = True
            self.is_truncated |= reason.used_up is UsedUp.TOKENS
            self.is_out_of_branches |= reason.used_up is UsedUp.BRANCHES
            told = WENT_ON if reason.used_up is UsedUp.TURNS else str(reason)
            raise EpisodeOver(told) from None
        except FirstTooLong as error:
            whose = "a frozen model's seat of " if side.is_frozen else ""
            self.failure = EpisodeFailed(f"{whose}{self.environment.name} {error}")
            raise self.failure from None

    def _known_beginning(self, prompt: str) -> list[Message]:
        """A text as messages: the longest that is known, and what follows it."""
        known = [one for one in self._texts if one.is_begun_by(prompt)]
        longest = max(known, key=lambda one: len(one.text), default=_Text(text="", messages=[]))
        rest = prompt[len(longest.text) :]
        return [*longest.messages, {"role": "user", "content": rest}] if rest else longest.messages

    def reward(self, turn: Turn | None, value: object, name: str) -> None:
        """For a turn; what a frozen model has earned counts for nothing. Raises ValueError for what
        is no finite number, and before the first turn.
        """
        if turn is None:
            raise ValueError(
                f"chat.reward({value!r}) comes before any reply that it could be for; ask the "
                "policy first, or return it at the end."
            )
        number = _number(value, f"chat.reward({value!r})")
        if turn.is_frozen:
            return
        turn.reward += number
        self.named[name] = self.named.get(name, 0.0) + number

    # What its host does

    def own_time_left_s(self) -> float:
        """Return the seconds until the environment has used up its own time (see `clock`)."""
        return self.environment.timeout_s - self.clock.elapsed_s

    def played(self, returned: object, *, over: EpisodeOver | None = None) -> Played:
        """Return the outcome of an episode that has ended with what its function returned, or with
        `over`, which is the model's fault.

        An episode may end without a reply of the policy, such as a game that the opponent gives up
        at once: it has a reward, and no token. Raises EpisodeFailed.
        """
        environment = self.environment
        own = self._own_turns
        if over is not None and not own:
            raise EpisodeFailed(
                f"{environment.name} ended before the policy's first reply: {over}. Give a frozen "
                "model's seat more room, or shorter texts."
            )
        if over is not None:
            final: Mapping[str, float] = {FINAL: environment.format_reward}
        else:
            final = numbers_of(environment.name, returned, or_none=bool(self.named))
        total = sum(final.values())
        if own:
            own[-1].reward += total
        components = dict(self.named)
        for name, value in final.items():  # of a name that turns have had too, both count
            components[name] = components.get(name, 0.0) + value
        return Played(
            trajectory=self._trajectory(),
            total=sum(components.values()),
            components=components,
            finish_reason=FinishReason.LENGTH if self.is_truncated else FinishReason.STOP,
            transcript=self._transcript(str(over) if over is not None else ""),
        )

    @property
    def _own_turns(self) -> list[Turn]:
        return [turn for turn in self.turns if not turn.is_frozen]

    def _trajectory(self) -> Trajectory:
        own = self._own_turns
        made = [
            conversation.trajectory(
                [turn.reward for turn in own if turn.conversation is conversation]
            )
            for conversation in _conversations(own)
        ]
        return functools.reduce(joined, made) if made else without_tokens(self.codec.end_token_id)

    def _transcript(self, ended: str) -> list[Mapping[str, Any]]:
        """For people: who said what, branch by branch, those that are trained on first, and at
        last what ended it, if it was not its function. Where there are several seats, each line
        says whose branch it is in. What a frozen model said does not count as sampled.
        """
        frozen = [side.conversation for side in self._partners.values() if side.is_frozen]
        spoken = _conversations([*self._own_turns, *self.turns])
        branches = [
            (branch, self._seat_of(seat), one not in frozen)
            for one in spoken
            for seat, branch in zip(one.branch_seats(), one.transcript(), strict=True)
        ]
        told: list[Mapping[str, Any]] = []
        for number, (branch, seat, is_own) in enumerate(branches):
            told += [
                {
                    "branch": number,
                    **seat,
                    "role": role,
                    "text": text,
                    "sampled": is_sampled and is_own,
                }
                for role, text, is_sampled in branch
            ]
        if ended:
            last = max(len(branches) - 1, 0)
            told.append({"branch": last, "role": ENDED, "text": ended, "sampled": False})
        return told

    def _seat_of(self, number: int) -> Mapping[str, str]:
        """Of a line in a transcript."""
        seats = self.environment.seats
        return {"seat": seats[number]} if len(seats) > 1 else {}

    def _request(
        self, path: Path, max_tokens: int, stop: tuple[str, ...], structure: str
    ) -> GenerationRequest:
        base, own = self.base, self.environment.stop
        turn, self._num_asked = self._num_asked, self._num_asked + 1
        return GenerationRequest(
            request_id=f"{self.key}.{turn}",
            prompt_token_ids=path.token_ids,
            sampling=replace(
                base, max_tokens=max_tokens, stop=(*base.stop, *own, *stop), structure=structure
            ),
            seed=_turn_seed(self.seed, turn),
            num_shared_tokens=path.num_reused,
            priority=min(turn, 1),  # keys and values of later turns are there
        )

    async def _sampled(self, side: _Side, request: GenerationRequest) -> Generation:
        self.clock.pause()
        try:
            return await side.sampler.sample(request)
        except Exception as error:
            self.failure = self.failure or error
            raise
        finally:
            self.clock.resume()


def _conversations(turns: Iterable[Turn]) -> list[Conversation]:
    """In the order of their first replies."""
    return list(dict.fromkeys(turn.conversation for turn in turns))


def _turn_seed(seed: int, turn: int) -> int:
    """Of 32 bits, well mixed (the finaliser of MurmurHash3)."""
    mixed = (seed * 0x9E3779B1 + turn * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)


def numbers_of(name: str, returned: object, *, or_none: bool) -> dict[str, float]:
    """What the function `name` returned as named numbers; of `or_none`, it may be nothing, since
    turns have had rewards. Raises EpisodeFailed for what is none.
    """
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise EpisodeFailed(
            f"{name} is a plain function that returned {printable(repr(returned))} instead of "
            "awaiting it; make it async: write `async def`, and `return await ...`."
        )
    if isinstance(returned, Mapping):
        if not returned and not or_none:
            raise EpisodeFailed(f"{name} returned an empty dict; return named numbers.")
        told = f"{name} returned {reprlib.repr(dict(returned))}"
        return {str(key): _number(number, told) for key, number in returned.items()}
    if returned is not None:
        return {FINAL: _number(returned, f"{name} returned {reprlib.repr(returned)}")}
    if not or_none:
        raise EpisodeFailed(
            f"{name} returned None, which is no finite number; let every way through it end with "
            "`return` and a number, or named numbers, or give some turn a chat.reward(...)."
        )
    return {}


def _number(value: object, what: str) -> float:
    number = number_of(value)
    if number is None or not math.isfinite(number):
        raise EpisodeFailed(f"{what}, which is no finite number; give a float.")
    return number
