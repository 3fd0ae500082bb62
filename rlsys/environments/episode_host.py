"""Runs thousands of episodes concurrently, each in its own coroutine.

    submit ──► episode ──► function(chat, task) ──► ended ──► collect
                  ▲              │ raised or timed out
                  └── new attempt ── up to num_retries times, then the episode fails

Mistakes of the policy are rewarded, mistakes of the environment are retried. A reply that `parse`
rejects ends an episode with the environment's format_reward. An exception or a timeout never
becomes a reward: a new attempt starts, in which the sampler repeats its earlier replies for as long
as the requests are the same.

If the environment has a group_reward, the episodes of a group are returned together, when the last
one has ended.
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
from rlsys.common.supervision import SYNC_FUNCTIONS, Supervisor
from rlsys.common.user_functions import contained
from rlsys.environments.chat import Chat
from rlsys.environments.endpoint.endpoint import EndpointServer
from rlsys.environments.environment import Endpoint, Environment
from rlsys.environments.episode import (
    NO_PARTNERS,
    Episode,
    EpisodeOver,
    Partner,
    Played,
    Sampler,
)
from rlsys.environments.returned_rewards import EpisodeFailed
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

# Time that a cancelled function has to end before the host stops waiting for it.
CANCEL_TIMEOUT_S = 1.0

# Name of the reward of group_reward.
GROUP = "group"

# Hints by Python's message about a missing or superfluous `await`.
HINTS = {
    "'coroutine'": "Write `await chat(...)`, not `chat(...)`, in an async environment.",
    "NoneType can't be used in 'await' expression": (
        "Await chat(...) and chat.until_answer(...). Do not await chat.reward, chat.system, "
        "chat.fork and chat.seat."
    ),
}


class TookTooLong(RuntimeError):
    """Timeout of an environment's function."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRequest:
    """An episode to play."""

    request_id: str
    task: Mapping[str, Any]  # row of the dataset
    sampling: SamplingParams
    seed: int
    group_id: int
    index: int
    group_size: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """An episode that has ended: its outcome or its failure; neither if it was aborted."""

    request: EpisodeRequest
    played: Played | None = None
    failure: RewardFailure | None = None


class SyncExecutor(Protocol):
    """Executor of synchronous functions, which may block."""

    async def start(self) -> None:
        """Load the environment. Raises InvalidValue if that fails."""

    def place(self, *, alone: bool) -> AbstractAsyncContextManager[None]:
        """Return the context of one episode, in a process that it shares or has `alone`.

        Raises InvalidValue as `start` does.
        """

    async def play(self, chat: Chat, task: Mapping[str, Any]) -> Any:
        """Call the environment's function with a chat that works without await."""

    async def act(self, endpoint: Endpoint, task: Mapping[str, Any]) -> Any:
        """Call the environment's function, an agent."""

    async def execute(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """Call another function, such as a tool."""

    async def close(self) -> None:
        """End all processes."""


class EpisodeHost:
    """All episodes of one worker.

    Args:
        executor: Executor of synchronous functions.
        template: Text of the chat template; None if there is none.
        partners: Models other than the policy, by number of their seat.
    """

    def __init__(
        self,
        environment: Environment,
        codec: Codec,
        sampler: Sampler,
        *,
        limits: EpisodeLimits,
        executor: SyncExecutor,
        template: str | None = None,
        partners: Mapping[int, Partner] = NO_PARTNERS,
    ) -> None:
        self._environment = environment
        self._partners = partners
        self._codec = codec
        self._sampler = sampler
        self._limits = limits
        self._executor = executor
        self._endpoints = EndpointServer(environment, template) if environment.is_agent else None
        # With a tool_format and a template without tools, the environment describes the tools.
        is_shown = not environment.tool_format or codec.renders_tools
        self._tools = ToolUse(environment, template, executor.execute, is_shown=is_shown)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._abandoned: set[asyncio.Task[Any]] = set()  # functions that swallowed cancellation
        self._ended: list[Ended] = []
        self._groups: dict[int, list[Ended]] = {}  # ended episodes of incomplete groups
        self._something_ended = AsyncCondition()
        self._failure: BaseException | None = None  # an error of the host itself

    async def start(self) -> None:
        """Start the processes, tool servers and the endpoint. Raises InvalidValue on failure."""
        await self._executor.start()
        await self._tools.open()
        if self._endpoints is not None:
            await self._endpoints.start()

    def prompt_text(self, trajectory: Trajectory) -> str:
        """Return the text of an episode's prompt, special tokens included."""
        return self._codec.boundary.decode(trajectory.prompt_token_ids.tolist())

    def completion_text(self, request: EpisodeRequest, played: Played) -> str:
        """Return the text after the prompt, without the end-of-turn of the last reply."""
        return self._codec.boundary.completion_text(
            played.trajectory.token_ids.tolist(),
            played.last_reply,
            (*request.sampling.stop, *self._environment.stop),
        )

    def rollout(self, ended: Ended) -> Rollout:
        """Return a played episode as a reward function gets it."""
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
        """Number of running episodes."""
        return len(self._running)

    def submit(self, requests: Sequence[EpisodeRequest]) -> None:
        """Start episodes. `collect` returns them when they have ended."""
        for request in requests:
            task = start_task(self._play(request), name=request.request_id, fail=self._failed)
            self._running[request.request_id] = task

    def end_unplayed(self, request: EpisodeRequest, failure: RewardFailure | None) -> None:
        """End an episode without playing it: it has failed, or was aborted (None)."""
        self._report(
            Ended(request=request, failure=None if failure is None else _of_environment(failure))
        )

    async def collect(self) -> list[Ended]:
        """Wait until at least one episode has ended and return all that have.

        Raises an error of the host itself. It cannot be used any more then.
        """
        await self._something_ended.until(lambda: bool(self._ended) or self._failure is not None)
        if self._failure is not None:
            raise self._failure
        ended, self._ended = self._ended, []
        return ended

    def _failed(self, error: BaseException) -> None:
        """Make `collect` raise the error of an episode's task that ended without an outcome."""
        self._failure = self._failure or error
        self._something_ended.notify()

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort episodes. `collect` returns them without an outcome. Unknown ids are ignored."""
        for name in request_ids:
            if (task := self._running.get(name)) is not None:
                task.cancel()
        unwanted = set(request_ids)
        for together in self._groups.values():
            names = {one.request.request_id for one in together}
            if unwanted.isdisjoint(names) or any(one.played is None for one in together):
                continue
            together[:] = [replace(one, played=None) for one in together]
            self._ended += together  # their group will never be complete
            self._something_ended.notify()

    async def close(self) -> None:
        """End all episodes and the processes that they used."""
        tasks = [*self._running.values(), *self._abandoned]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S)
        await self._tools.close()
        if self._endpoints is not None:
            await self._endpoints.close()
        await self._executor.close()

    async def _play(self, request: EpisodeRequest) -> None:
        failure: RewardFailure | None = None
        played: Played | None = None
        try:
            supervisor = Supervisor[str](SYNC_FUNCTIONS)
            name, num_failures, alone = request.request_id, 0, False
            while num_failures <= self._environment.num_retries:
                try:
                    async with self._executor.place(alone=alone):
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
                        # Not a failure of the episode: any function may have ended the process.
                        decision = supervisor.died(str(error), [name], is_alone=alone)
                        if decision.drop:
                            break
                        alone = bool(decision.isolate)
                        continue
                # Any exception of a user's function is the outcome of its episode.
                except Exception as error:  # noqa: BLE001
                    failure = _with_hint(failure_from(self._environment.name, error))
                num_failures += 1
        except asyncio.CancelledError:
            failure = None
            if not self._is_aborted():
                raise
        finally:
            del self._running[request.request_id]
        if played is not None or failure is None:  # it succeeded or was aborted
            self._report(Ended(request=request, played=played))
        else:
            self._report(Ended(request=request, failure=_of_environment(failure)))

    def _is_aborted(self) -> bool:
        """Return whether `abort` cancelled the current task; its cancellation is consumed."""
        task = asyncio.current_task()
        assert task is not None
        return task.uncancel() == 0

    async def _attempt(self, request: EpisodeRequest) -> Played:
        """Play one attempt. Raises the function's error, TookTooLong or EpisodeFailed."""
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
        task.add_done_callback(_consume_exception)
        try:
            while (left_s := episode.own_time_left_s()) > 0:
                done, _ = await asyncio.wait({task}, timeout=left_s)
                if done:
                    break
            else:
                raise TookTooLong(
                    f"environment {environment.name!r} took longer than timeout_s="
                    f"{environment.timeout_s:g}, sampling not included. Make it faster, or raise "
                    "its timeout_s."
                )
        finally:
            if not task.done():
                await self._end(task)
        return self._outcome(episode, task)

    def _outcome(self, episode: Episode, task: asyncio.Task[Any]) -> Played:
        """Return the outcome of a finished attempt, or raise its error.

        A failure of the episode is raised even if the function caught it.
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
        task = copy.deepcopy(request.task)  # attempts must not see each other's changes
        if self._endpoints is not None:
            with self._endpoints.opened(episode) as endpoint:
                if environment.is_async:
                    return await contained(
                        environment.function, endpoint, task, passing=(EpisodeOver,)
                    )
                return await self._executor.act(endpoint, task)
        chat = Chat(episode, self._tools)
        if environment.is_async:
            return await contained(environment.function, chat, task, passing=(EpisodeOver,))
        return await self._executor.play(chat, task)

    async def _end(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_TIMEOUT_S)
        if not task.done():  # it swallows its cancellation
            self._abandoned.add(task)
            task.add_done_callback(self._abandoned.discard)

    def _report(self, ended: Ended) -> None:
        if self._environment.group_reward is None:
            self._ended.append(ended)
        else:
            self._gather(ended)
        self._something_ended.notify()

    def _gather(self, ended: Ended) -> None:
        """Hold an episode until its group is complete, then add the group reward.

        If an episode of the group failed or was aborted, the others end in the same way, without
        waiting.
        """
        request = ended.request
        together = self._groups.setdefault(request.group_id, [])
        together.append(ended)
        is_whole = len(together) == request.group_size
        if is_whole:
            del self._groups[request.group_id]
        broken = next((one for one in together if one.played is None), None)
        if broken is not None:
            unreported = together if broken is ended else [ended]
            for one in unreported:
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
            return [_with_reward(one, float(x)) for one, x in zip(together, values, strict=True)]
        except BaseException as error:  # noqa: BLE001 - a user's function, SystemExit included
            failure = _of_environment(failure_from(name, error))
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
    """Return a host with the tokenizer's chat template and a process for synchronous functions.

    The process may use `memory_gib` of memory. It has `start_timeout_s` to load the environment.
    """
    return EpisodeHost(
        environment,
        codec_of(environment, tokenizer),
        sampler,
        limits=limits,
        executor=SyncWorkerFunctions(
            environment, memory_gib=memory_gib, start_timeout_s=start_timeout_s
        ),
        template=environment_template(environment, tokenizer),
        partners=partners,
    )


def codec_of(environment: Environment, tokenizer: Any) -> Codec:
    """Return the codec of a model with this tokenizer in the environment."""
    return Codec(tokenizer, chat_template="" if environment.plain_text else None)


def environment_template(environment: Environment, tokenizer: Any) -> str | None:
    """Return the text of the chat template that renders the environment's messages.

    Of several templates it is the one for tools, if the environment has any. None: there is no
    template, or the environment uses plain text.
    """
    if environment.plain_text:
        return None
    with_tools = environment.is_agent or bool(environment.tools)
    return template_text(tokenizer, with_tools=with_tools)


def _consume_exception(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception of an aborted episode.

    Else asyncio would log it as never retrieved.
    """
    if not task.cancelled():
        task.exception()


def _of_environment(failure: RewardFailure) -> RewardFailure:
    return replace(failure, what="environment")


def _with_hint(failure: RewardFailure) -> RewardFailure:
    """Append a hint to a message of Python about `await`."""
    for message, hint in HINTS.items():
        if message in failure.message:
            return replace(failure, message=f"{failure.message}\n{hint}")
    return failure


def _with_reward(ended: Ended, value: float) -> Ended:
    """Return the episode with `value` added to its reward, at its last sampled token if any."""
    played = ended.played
    assert played is not None
    if not np.isfinite(value):
        raise ValueError(f"group_reward returned {value} for a rollout. Return finite numbers.")
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
