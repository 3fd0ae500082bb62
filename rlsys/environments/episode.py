"""One episode: its turns, what they are worth, and its limits. Chats and the endpoint stand on it.

    messages ──► Conversation.prompt ──► Sampler.sample ──► Conversation.reply ──► Turn
                        │ what still fits                            │
                        └── nothing: the episode is over             └── rewards ──► Played

Pure but for the sampler. All times are of the running event loop's clock.
"""

from __future__ import annotations

import asyncio
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
from rlsys.environments.token_tree import Trajectory
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
        sampling: SamplingParams | None = None,
    ) -> Turn:
        """The policy's reply to the messages. Raises EpisodeOver where there is no room for one, or
        no turn left; ValueError for messages that cannot be rendered."""
        if self.is_over:
            raise EpisodeOver
        max_turns = self.environment.max_turns
        if max_turns is not None and self._num_asked >= max_turns:
            self.is_over = True
            raise EpisodeOver
        path = self._conversation.prompt(messages, tools, seat=seat)
        room = self._take_room(path)
        limits = (room, self.environment.turn_tokens, max_tokens)
        wanted = min(limit for limit in limits if limit is not None)
        self._num_tokens += wanted
        self._num_asked += 1
        request = self._request(path, wanted, sampling or self.base)
        generation = await self._sampled(request)
        num_sampled = len(generation.token_ids)
        self._num_tokens -= wanted - num_sampled
        is_cut = generation.finish_reason is FinishReason.LENGTH
        message = self._conversation.reply(path, generation)
        self.is_truncated |= is_cut and wanted == room
        self.is_over |= self.is_truncated
        if max_turns is not None and self._num_asked >= max_turns:
            self.is_over = True
        versions = generation.policy_versions
        turn = Turn(
            seat=seat,
            message=message,
            text=str(message.get("content") or ""),
            is_truncated=is_cut,
            token_ids=generation.token_ids.tolist(),
            logprobs=generation.sampler_logprobs.tolist(),
            num_prompt_tokens=len(path.token_ids),
            policy_version=int(versions.max(initial=-1)),
        )
        self.turns.append(turn)
        return turn

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
            trajectory=self._conversation.trajectory([turn.reward for turn in self.turns]),
            total=sum(components.values()),
            components=components,
            finish_reason=FinishReason.LENGTH if self.is_truncated else FinishReason.STOP,
            transcript=self.transcript(),
        )

    def transcript(self) -> list[Mapping[str, Any]]:
        """For people: who said what, branch by branch."""
        told: list[Mapping[str, Any]] = []
        for number, branch in enumerate(self._conversation.transcript()):
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

    def _request(self, path: Path, max_tokens: int, base: SamplingParams) -> GenerationRequest:
        stop = self.environment.stop
        return GenerationRequest(
            request_id=f"{self.key}.{self._num_asked}",
            prompt_token_ids=path.token_ids,
            sampling=replace(base, max_tokens=max_tokens, stop=(*base.stop, *stop)),
            seed=_turn_seed(self.seed, self._num_asked),
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
    return int(np.random.SeedSequence((seed, turn)).generate_state(1, np.uint32)[0])


def _number(value: object, what: str) -> float:
    if not isinstance(value, Real | np.bool_) or not math.isfinite(float(value)):
        raise EpisodeFailed(f"{what}, which is no finite number; give a float.")
    return float(value)
