"""One episode: its turns, what they are worth, and its limits. Chats and the endpoint stand on it.

    messages ──► Conversation.prompt ──► Sampler.sample ──► Conversation.reply ──► Turn
                        │ what still fits                            │
                        └── nothing: the episode is over             └── rewards ──► Played

Pure but for the sampler. All times are of the running event loop's clock.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Protocol

import numpy as np

from rlsys.environments.codec import Codec
from rlsys.environments.conversation import Conversation, Path
from rlsys.environments.environment import Environment
from rlsys.environments.template import Message
from rlsys.environments.token_tree import Trajectory, joined
from rlsys.types import FinishReason, Generation, GenerationRequest, SamplingParams

# Of the names of rewards: what the function returned.
FINAL = "final"


class Sampler(Protocol):
    async def sample(self, request: GenerationRequest) -> Generation:
        """One reply. Cancelled: nobody wants it any more."""


class EpisodeOver(BaseException):
    """Raised out of a chat that cannot go on: the function need not catch it. The episode is worth
    its turns' rewards and the environment's format_reward."""


class EpisodeFailed(RuntimeError):
    """The environment has made a mistake that a fresh attempt would make too; the message says
    which."""


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """In tokens, of a whole rollout."""

    max_prompt_tokens: int  # of what stands before the first reply
    max_tokens: int  # of all that follows, in all branches
    max_context: int  # of one branch


@dataclass(kw_only=True, eq=False)
class Turn:
    """One reply of the policy."""

    seat: int
    conversation: Conversation
    message: dict[str, Any]
    text: str  # of the reply, without its end
    is_truncated: bool
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    num_prompt_tokens: int
    policy_version: int  # of its newest token; -1 where it has none
    reward: float = 0.0


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
    where a turn does not say otherwise."""

    key: str
    environment: Environment
    codec: Codec
    sampler: Sampler
    limits: EpisodeLimits
    base: SamplingParams
    seed: int
    is_over: bool = False
    is_truncated: bool = False
    num_tool_calls: int = 0
    turns: list[Turn] = field(default_factory=list)
    named: dict[str, float] = field(default_factory=dict)  # rewards of turns, by name
    _num_sampling: int = 0
    _own_s: float = 0.0
    _resumed_s: float = field(default_factory=lambda: _now())

    def __post_init__(self) -> None:
        self._conversation = Conversation(self.codec)
        self._raw: Conversation | None = None  # of texts without a chat template
        self._texts: list[tuple[str, list[Message]]] = []  # its paths
        self._num_tokens = 0  # beyond the first prompt, those that are being sampled included
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
    ) -> Turn:
        """The policy's reply to the messages. Raises EpisodeOver where there is no room for one, or
        no turn left; ValueError for messages that cannot be rendered."""
        self._check_goes_on()
        conversation = self._conversation
        path = conversation.prompt(messages, tools, seat=seat)
        return await self._asked(conversation, path, seat, max_tokens, stop)

    async def complete(
        self, prompt: str, *, max_tokens: int | None = None, stop: tuple[str, ...] = ()
    ) -> Turn:
        """The policy's continuation of a text, without the chat template. One that begins with an
        earlier text and its continuation goes on from there. Raises as `turn` does."""
        self._check_goes_on()
        if self._raw is None:
            self._raw = Conversation(self.codec.without_template)
        conversation = self._raw
        messages = self._known_beginning(prompt)
        path = conversation.prompt(messages)
        turn = await self._asked(conversation, path, 0, max_tokens, stop)
        self._texts.append((prompt + turn.text, [*messages, turn.message]))
        return turn

    def _check_goes_on(self) -> None:
        max_turns = self.environment.max_turns
        self.is_over |= max_turns is not None and self._num_asked >= max_turns
        if self.is_over:
            raise EpisodeOver

    async def _asked(
        self,
        conversation: Conversation,
        path: Path,
        seat: int,
        max_tokens: int | None,
        stop: tuple[str, ...],
    ) -> Turn:
        room = self._take_room(path)
        limits = (room, self.environment.turn_tokens, max_tokens)
        wanted = min(limit for limit in limits if limit is not None)
        self._num_tokens += wanted
        self._num_asked += 1
        generation = await self._sampled(self._request(path, wanted, stop))
        self._num_tokens -= wanted - len(generation.token_ids)
        is_cut = generation.finish_reason is FinishReason.LENGTH
        message = conversation.reply(path, generation)
        self.is_truncated |= is_cut and wanted == room
        self.is_over |= self.is_truncated
        max_turns = self.environment.max_turns
        self.is_over |= max_turns is not None and self._num_asked >= max_turns
        turn = Turn(
            seat=seat,
            conversation=conversation,
            message=message,
            text=str(message.get("content") or ""),
            is_truncated=is_cut,
            token_ids=generation.token_ids.tolist(),
            logprobs=generation.sampler_logprobs.tolist(),
            num_prompt_tokens=len(path.token_ids),
            policy_version=int(generation.policy_versions.max(initial=-1)),
        )
        self.turns.append(turn)
        return turn

    def _known_beginning(self, prompt: str) -> list[Message]:
        """A text as messages: the longest that is known, and what follows it."""
        known = [one for one in self._texts if prompt.startswith(one[0])]
        text, messages = max(known, key=lambda one: len(one[0]), default=("", []))
        rest = prompt[len(text) :]
        return [*messages, {"role": "user", "content": rest}] if rest or not messages else messages

    def reward(self, turn: Turn | None, value: object, name: str) -> None:
        """For a turn. Raises ValueError for what is no finite number, and before the first turn."""
        if turn is None:
            raise ValueError(
                f"chat.reward({value!r}) comes before any reply that it could be for; ask the "
                "policy first, or return it at the end."
            )
        number = _number(value, f"chat.reward({value!r})")
        turn.reward += number
        self.named[name] = self.named.get(name, 0.0) + number

    # What its host does

    def own_time_left_s(self) -> float:
        """Until the environment has used up its time; that of sampling does not count."""
        since = 0.0 if self._num_sampling else _now() - self._resumed_s
        return self.environment.timeout_s - self._own_s - since

    def played(self, returned: object, *, is_model_fault: bool = False) -> Played:
        """Of an episode that has ended with what the function returned; `is_model_fault`: with
        EpisodeOver, or a reply that `parse` refused. Raises EpisodeFailed."""
        environment = self.environment
        if not self.turns:
            raise EpisodeFailed(
                f"{environment.name} ended without a reply of the policy, so that there is nothing "
                "to train on; let it `await chat(...)` at least once."
            )
        final = {FINAL: environment.format_reward} if is_model_fault else self._final(returned)
        total = sum(final.values())
        self.turns[-1].reward += total
        components = {**self.named, **final}
        return Played(
            trajectory=self._trajectory(),
            total=sum(components.values()),
            components=components,
            finish_reason=FinishReason.LENGTH if self.is_truncated else FinishReason.STOP,
            transcript=self.transcript(),
        )

    @property
    def _conversations(self) -> list[Conversation]:
        return [one for one in (self._conversation, self._raw) if one is not None]

    def _trajectory(self) -> Trajectory:
        made = [
            conversation.trajectory(
                [turn.reward for turn in self.turns if turn.conversation is conversation]
            )
            for conversation in self._conversations
        ]
        return functools.reduce(joined, made)

    def transcript(self) -> list[Mapping[str, Any]]:
        """For people: who said what, branch by branch."""
        told: list[Mapping[str, Any]] = []
        branches = [branch for one in self._conversations for branch in one.transcript()]
        for number, branch in enumerate(branches):
            for role, text, is_sampled in branch:
                told.append({"branch": number, "role": role, "text": text, "sampled": is_sampled})
        return told

    def _final(self, returned: object) -> Mapping[str, float]:
        name = self.environment.name
        if isinstance(returned, Mapping):
            if not returned and not self.named:
                raise EpisodeFailed(f"{name} returned an empty dict; return named numbers.")
            told = f"{name} returned {dict(returned)!r}"
            return {str(key): _number(number, told) for key, number in returned.items()}
        if returned is None and self.named:
            return {}  # the turns have had theirs
        return {FINAL: _number(returned, f"{name} returned {returned!r}")}

    def _take_room(self, path: Path) -> int:
        """Tokens that a reply may have behind this path, whose own new ones are counted; raises
        EpisodeOver where it is none."""
        limits, num_new = self.limits, len(path.token_ids) - path.num_reused
        if not self._num_asked:
            if len(path.token_ids) > limits.max_prompt_tokens:
                raise EpisodeFailed(
                    f"{self.environment.name} begins with {len(path.token_ids)} tokens; it may "
                    f"have {limits.max_prompt_tokens} (data.max_prompt_tokens). Shorten its first "
                    "text, or raise that."
                )
            num_new = 0
        room = min(
            limits.max_tokens - self._num_tokens - num_new,
            limits.max_context - len(path.token_ids),
        )
        if room < 1:
            self.is_truncated = self.is_over = True
            raise EpisodeOver
        self._num_tokens += num_new
        return room

    def _request(self, path: Path, max_tokens: int, stop: tuple[str, ...]) -> GenerationRequest:
        base, own = self.base, self.environment.stop
        return GenerationRequest(
            request_id=f"{self.key}.{self._num_asked}",
            prompt_token_ids=path.token_ids,
            sampling=replace(base, max_tokens=max_tokens, stop=(*base.stop, *own, *stop)),
            seed=_turn_seed(self.seed, self._num_asked),
            num_shared_tokens=path.num_reused,
            priority=min(self._num_asked - 1, 1),  # keys and values of later turns are there
        )

    async def _sampled(self, request: GenerationRequest) -> Generation:
        if not self._num_sampling:
            self._own_s += _now() - self._resumed_s
        self._num_sampling += 1
        try:
            return await self.sampler.sample(request)
        finally:
            self._num_sampling -= 1
            if not self._num_sampling:
                self._resumed_s = _now()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _turn_seed(seed: int, turn: int) -> int:
    """Of 32 bits, well mixed (the finaliser of MurmurHash3)."""
    mixed = (seed * 0x9E3779B1 + turn * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)


def _number(value: object, what: str) -> float:
    if not isinstance(value, Real | np.bool_) or not math.isfinite(float(value)):
        raise EpisodeFailed(f"{what}, which is no finite number; give a float.")
    return float(value)
