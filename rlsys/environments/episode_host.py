"""Runs episodes: thousands at once, each a coroutine of its own.

    submit ──► episode ──► function(chat, task) ──► ended ──► collect
                  ▲              │ raised, or took too long
                  └── again, fresh ── a few times, then the failure is told

What the policy replies is its fault, what the environment does is ours: a reply that `parse`
refuses ends an episode with the environment's format_reward; an exception or a time-out never
becomes a reward. It is tried again in a fresh environment, to which the sampler gives the replies
that it gave before, as long as it asks the same.

A group whose environment has a group_reward is told as a whole, when the last of its episodes has
ended.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rlsys.common.async_condition import AsyncCondition
from rlsys.common.background_tasks import start_task
from rlsys.common.call_clock import clocked
from rlsys.common.user_functions import contained
from rlsys.environments.chat import Chat
from rlsys.environments.endpoint.endpoint import EndpointServer
from rlsys.environments.environment import Endpoint, Environment
from rlsys.environments.episode import (
    NO_PARTNERS,
    Episode,
    EpisodeFailed,
    EpisodeOver,
    Partner,
    Played,
    Sampler,
)
from rlsys.environments.token_budget import EpisodeLimits
from rlsys.environments.tokens.codec import Codec
from rlsys.environments.tokens.token_tree import Trajectory
from rlsys.environments.tools.tool_use import ToolUse
from rlsys.environments.workers.sync_worker import (
    SyncWorkerEnded,
    SyncWorkerFailed,
    SyncWorkerFunctions,
)
from rlsys.rewards import RewardFailure
from rlsys.rewards.outcome import failure_from
from rlsys.text.chat_template import template_text
from rlsys.types import INJECTED, Rollout, SamplingParams

# A function that goes on after it was cancelled is left to itself after this.
CANCEL_TIMEOUT_S = 1.0

# Of the names of rewards: what group_reward gave.
GROUP = "group"

# By what Python says where `await` is missing, or is too many.
HINTS = {
    "'coroutine'": "An async environment has a reply with `await chat(...)`, not with `chat(...)`.",
    "NoneType can't be used in 'await' expression": (
        "chat(...) and chat.until_answer(...) are awaited; chat.reward, chat.system, chat.fork and "
        "chat.seat are not."
    ),
}

# Deaths of the process that plain functions share, after which an episode has one to itself. They
# are no failures of its own: who ends the process, ends all that run there.
MAX_SHARED_DEATHS = 2


class TookTooLong(RuntimeError):
    """The function has used up its environment's time."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRequest:
    """One episode to play. `task`: the dataset's row."""

    request_id: str
    task: Mapping[str, Any]
    sampling: SamplingParams
    seed: int
    group_id: int
    index: int
    group_size: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """An episode that has: what it was, or why there is nothing; neither where it was aborted."""

    request: EpisodeRequest
    played: Played | None = None
    failure: RewardFailure | None = None


class Plain(Protocol):
    """Where plain functions run, which may block."""

    async def start(self) -> None:
        """Raises ValueError for functions that cannot be loaded there."""

    def place(self, *, alone: bool) -> AbstractAsyncContextManager[None]:
        """Of one episode, while it is entered: what it calls runs with others, or `alone`. Raises
        ValueError as `start` does.
        """

    async def play(self, chat: Chat, task: Mapping[str, Any]) -> Any:
        """The environment's function, whose chat works without await; what it returns or raises."""

    async def act(self, endpoint: Endpoint, task: Mapping[str, Any]) -> Any:
        """The environment's function, which is an agent."""

    async def execute(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """Another function, such as a tool's."""

    async def close(self) -> None: ...


class EpisodeHost:
    """All episodes of one worker. `template`: the chat template's text, where there is one;
    `partners`: who plays in the policy's place, by the seat's number.
    """

    def __init__(
        self,
        environment: Environment,
        codec: Codec,
        sampler: Sampler,
        *,
        limits: EpisodeLimits,
        plain: Plain,
        template: str | None = None,
        partners: Mapping[int, Partner] = NO_PARTNERS,
    ) -> None:
        self._environment = environment
        self._partners = partners
        self._codec = codec
        self._sampler = sampler
        self._limits = limits
        self._plain = plain
        self._endpoints = EndpointServer(environment, template) if environment.is_agent else None
        # Who names a format for a template without tools describes them by itself.
        is_shown = not environment.tool_format or codec.renders_tools
        self._tools = ToolUse(environment, template, plain.execute, is_shown=is_shown)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._left: set[asyncio.Task[Any]] = set()  # functions that would not end
        self._ended: list[Ended] = []
        self._groups: dict[int, list[Ended]] = {}  # that wait for the rest of their group
        self._something_ended = AsyncCondition()
        self._failure: BaseException | None = None  # an error of the host itself

    async def start(self) -> None:
        """What episodes need beside the sampler. Raises ValueError if it cannot be had."""
        await self._plain.start()
        await self._tools.open()
        if self._endpoints is not None:
            await self._endpoints.start()

    def prompt_text(self, trajectory: Trajectory) -> str:
        """Return the text of an episode's prompt, special tokens included."""
        return self._codec.boundary.decode(trajectory.prompt_token_ids.tolist())

    def completion_text(self, request: EpisodeRequest, played: Played) -> str:
        """Return the text of all that follows the prompt, without the end of the last reply."""
        return self._codec.boundary.completion_text(
            played.trajectory.token_ids.tolist(),
            played.finish_reason,
            (*request.sampling.stop, *self._environment.stop),
        )

    def rollout(self, ended: Ended) -> Rollout:
        """Return a played episode as a function over texts sees it."""
        played, request = ended.played, ended.request
        assert played is not None
        trajectory = played.trajectory
        return Rollout(
            group_id=request.group_id,
            index=request.index,
            prompt_text=self.prompt_text(trajectory),
            completion_text=self.completion_text(request, played),
            prompt_token_ids=trajectory.prompt_token_ids,
            token_ids=trajectory.token_ids,
            finish_reason=played.finish_reason,
            metadata=request.task,
        )

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, requests: Sequence[EpisodeRequest]) -> None:
        for request in requests:
            task = start_task(self._play(request), name=request.request_id, fail=self._failed)
            self._running[request.request_id] = task

    def give_up(self, request: EpisodeRequest, failure: RewardFailure | None) -> None:
        """An episode that is not to be played: it has failed, or nobody wants it (None)."""
        self._tell(Ended(request=request, failure=None if failure is None else _ours(failure)))

    async def collect(self) -> list[Ended]:
        """Wait until at least one episode has ended and return all that have.

        Raises an error of the host itself, after which it is of no more use.
        """
        await self._something_ended.until(lambda: bool(self._ended) or self._failure is not None)
        if self._failure is not None:
            raise self._failure
        ended, self._ended = self._ended, []
        return ended

    def _failed(self, error: BaseException) -> None:
        """Let `collect` raise the error: an episode ended without an outcome."""
        self._failure = self._failure or error
        self._something_ended.notify()

    def abort(self, request_ids: Sequence[str]) -> None:
        """They come out of `collect` with nothing. Unknown ids are ignored."""
        for name in request_ids:
            if (task := self._running.get(name)) is not None:
                task.cancel()
        unwanted = set(request_ids)
        for together in self._groups.values():
            names = {one.request.request_id for one in together}
            if unwanted.isdisjoint(names) or any(one.played is None for one in together):
                continue
            together[:] = [replace(one, played=None) for one in together]
            self._ended += together  # they wait for one that nobody wants
            self._something_ended.notify()

    async def close(self) -> None:
        """Ends all episodes."""
        tasks = [*self._running.values(), *self._left]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S)
        await self._tools.close()
        if self._endpoints is not None:
            await self._endpoints.close()
        await self._plain.close()

    async def _play(self, request: EpisodeRequest) -> None:
        failure: RewardFailure | None = None
        played: Played | None = None
        try:
            num_deaths = num_failures = 0
            while num_failures <= self._environment.num_retries:
                alone = num_deaths >= MAX_SHARED_DEATHS
                try:
                    async with self._plain.place(alone=alone):
                        played = await self._attempt(request)
                    break
                except EpisodeFailed as error:
                    failure = RewardFailure(
                        kind="type", reward=self._environment.name, message=str(error)
                    )
                    break
                except TookTooLong as error:
                    failure = RewardFailure(
                        kind="timeout", reward=self._environment.name, message=str(error)
                    )
                except SyncWorkerFailed as error:
                    failure = RewardFailure(
                        kind=error.kind, reward=self._environment.name, message=str(error)
                    )
                    if isinstance(error, SyncWorkerEnded):
                        if alone:
                            break
                        num_deaths += 1
                        continue
                # Whatever a user's function raises is the outcome of its episode.
                except Exception as error:  # noqa: BLE001
                    failure = _hinted(failure_from(self._environment.name, error))
                num_failures += 1
        except asyncio.CancelledError:
            failure = None
            if not self._is_aborted():
                raise
        finally:
            del self._running[request.request_id]
        if played is not None or failure is None:  # it went well at last, or was aborted
            self._tell(Ended(request=request, played=played))
        else:
            self._tell(Ended(request=request, failure=_ours(failure)))

    def _is_aborted(self) -> bool:
        """Cancelled by `abort`: what is left is to tell so."""
        task = asyncio.current_task()
        assert task is not None
        return task.uncancel() == 0

    async def _attempt(self, request: EpisodeRequest) -> Played:
        """Raises whatever the function raised, TookTooLong, or EpisodeFailed."""
        environment = self._environment
        episode = Episode(
            key=request.request_id,
            environment=environment,
            codec=self._codec,
            sampler=self._sampler,
            limits=self._limits,
            base=request.sampling,
            seed=request.seed,
            partners=self._partners,
        )
        with clocked(episode.clock):
            task = asyncio.create_task(self._call(episode, request), name=request.request_id)
        task.add_done_callback(_heard)
        try:
            while (left_s := episode.own_time_left_s()) > 0:
                done, _ = await asyncio.wait({task}, timeout=left_s)
                if done:
                    break
            else:
                raise TookTooLong(
                    f"{environment.name} took longer than {environment.timeout_s:g} s of its own "
                    "time; find out why, or raise its timeout_s."
                )
        finally:
            if not task.done():
                await self._end(task)
        return self._outcome(episode, task)

    def _outcome(self, episode: Episode, task: asyncio.Task[Any]) -> Played:
        """Raises what the function did, and a failure of the episode even where the function took
        it for something else.
        """
        try:
            returned = task.result()
        except EpisodeOver as over:
            return episode.played(None, over=over)
        except Exception:
            if episode.failure is not None:
                raise episode.failure from None
            raise
        if episode.failure is not None:
            raise episode.failure
        return episode.played(returned)

    async def _call(self, episode: Episode, request: EpisodeRequest) -> Any:
        environment = self._environment
        task = copy.deepcopy(request.task)  # what one attempt changes in it no other sees
        if self._endpoints is not None:
            with self._endpoints.opened(episode) as endpoint:
                if environment.is_async:
                    return await contained(
                        environment.function, endpoint, task, passing=(EpisodeOver,)
                    )
                return await self._plain.act(endpoint, task)
        chat = Chat(episode, self._tools)
        if environment.is_async:
            return await contained(environment.function, chat, task, passing=(EpisodeOver,))
        return await self._plain.play(chat, task)

    async def _end(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_TIMEOUT_S)
        if not task.done():  # it swallows its cancellation
            self._left.add(task)
            task.add_done_callback(self._left.discard)

    def _tell(self, ended: Ended) -> None:
        if self._environment.group_reward is None:
            self._ended.append(ended)
        else:
            self._gather(ended)
        self._something_ended.notify()

    def _gather(self, ended: Ended) -> None:
        """Hold it until its group is whole. Of a group in which one has failed or was aborted
        nobody is held up, and nobody has a reward: who was played is told as that one.
        """
        request = ended.request
        together = self._groups.setdefault(request.group_id, [])
        together.append(ended)
        is_whole = len(together) == request.group_size
        if is_whole:
            del self._groups[request.group_id]
        broken = next((one for one in together if one.played is None), None)
        if broken is not None:
            told = together if broken is ended else [ended]  # the others have been
            for one in told:
                is_played = one.played is not None
                failure = broken.failure if is_played else one.failure
                self._ended.append(replace(one, played=None, failure=failure))
        elif is_whole:
            together.sort(key=lambda one: one.request.index)
            self._ended += self._with_group_reward(together)

    def _with_group_reward(self, together: Sequence[Ended]) -> list[Ended]:
        environment = self._environment
        assert environment.group_reward is not None
        name = f"{environment.name}'s group_reward"
        try:
            values = list(environment.group_reward([self.rollout(one) for one in together]))
            if len(values) != len(together):
                raise ValueError(
                    f"{name} returned {len(values)} numbers for {len(together)} rollouts."
                )
            return [_raised(one, float(x)) for one, x in zip(together, values, strict=True)]
        except BaseException as error:  # noqa: BLE001 - a user's function, SystemExit included
            failure = _ours(failure_from(name, error))
            return [replace(one, played=None, failure=failure) for one in together]


def make_host(
    environment: Environment,
    tokenizer: Any,
    sampler: Sampler,
    *,
    limits: EpisodeLimits,
    memory_gib: float,
    start_timeout_s: float,
    partners: Mapping[int, Partner] = NO_PARTNERS,
) -> EpisodeHost:
    """With the tokenizer's chat template, if the environment wants one, and a process for plain
    functions of at most `memory_gib`.
    """
    return EpisodeHost(
        environment,
        codec_of(environment, tokenizer),
        sampler,
        limits=limits,
        plain=SyncWorkerFunctions(
            environment, memory_gib=memory_gib, start_timeout_s=start_timeout_s
        ),
        template=environment_template(environment, tokenizer),
        partners=partners,
    )


def codec_of(environment: Environment, tokenizer: Any) -> Codec:
    """Of a model with this tokenizer that plays in it."""
    return Codec(tokenizer, chat_template="" if environment.plain_text else None)


def environment_template(environment: Environment, tokenizer: Any) -> str | None:
    """Return the text of the chat template that renders the environment's messages, of several the
    one for its tools; None: there is none, or the environment wants none.
    """
    if environment.plain_text:
        return None
    with_tools = environment.is_agent or bool(environment.tools)
    return template_text(tokenizer, with_tools=with_tools)


def _heard(task: asyncio.Task[Any]) -> None:
    """Of an episode that was aborted nobody asks what its function raised."""
    if not task.cancelled():
        task.exception()


def _ours(failure: RewardFailure) -> RewardFailure:
    return replace(failure, what="environment")


def _hinted(failure: RewardFailure) -> RewardFailure:
    """With the fix, where Python's own words for a mistake are of no help."""
    for said, fix in HINTS.items():
        if said in failure.message:
            return replace(failure, message=f"{failure.message}\n{fix}")
    return failure


def _raised(ended: Ended, value: float) -> Ended:
    """Return the episode with `value` more reward, at its last sampled token if it has one."""
    played = ended.played
    assert played is not None
    if not np.isfinite(value):
        raise ValueError(f"group_reward returned {value} for a rollout; return finite numbers.")
    trajectory = played.trajectory
    rewards = trajectory.turn_rewards.copy()
    if len(sampled := np.flatnonzero(trajectory.policy_versions != INJECTED)):
        rewards[int(sampled[-1])] += np.float32(value)
    components = {**played.components, GROUP: played.components.get(GROUP, 0.0) + value}
    return replace(
        ended,
        played=replace(
            played,
            trajectory=replace(trajectory, turn_rewards=rewards),
            total=played.total + value,
            components=components,
        ),
    )
