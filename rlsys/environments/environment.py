"""What an environment is.

In: a function `(chat, task) -> float | dict[str, float]`, async or plain, decorated. One call of it
is one rollout: it asks the policy through `chat`, and returns what the episode is worth.
Out: an `Environment`, with its name, its limits, its tools, and what its host has to know about it.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, overload

from rlsys.common.user_functions import is_async, misfit, name_of, parameter_names
from rlsys.config.fields import checked
from rlsys.rewards.reward import Reward
from rlsys.types import Rollout

if TYPE_CHECKING:  # with pydantic, which takes a while to import
    from rlsys.environments.tools.tool_formats import ToolFormat
    from rlsys.environments.tools.tools import Tool, ToolSource

EnvironmentFunction = Callable[..., Any]  # (chat, task) -> a number, or named numbers
GroupReward = Callable[[Sequence[Rollout]], Sequence[float]]

# Of the environment's own time, all turns together.
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What an agent is given: where it asks the policy, and the key of its episode. `url` ends with
    /v1, as OpenAI's clients take it.
    """

    url: str
    key: str
    model: str = "policy"  # any name is; there is one


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A function with what its host has to know about it; still callable as itself.

    The fields are the arguments of `rlsys.environment`, which says what they mean.
    """

    function: EnvironmentFunction
    name: str
    max_turns: int | None = None
    turn_tokens: int | None = None
    stop: tuple[str, ...] = ()
    timeout_s: float = TIMEOUT_S
    tools: tuple[Tool | ToolSource | Callable[..., Any], ...] = ()
    tool_format: str | ToolFormat = ""
    format_reward: float = 0.0
    num_retries: int = 2
    seats: tuple[str, ...] = ("policy",)
    group_reward: GroupReward | None = None
    required_columns: tuple[str, ...] = ()
    plain_text: bool = False
    is_agent: bool = False

    def __post_init__(self) -> None:
        checked(self.name, str, "name of an environment")
        given = f"{'agent' if self.is_agent else 'environment'} {self.name!r}"
        _check_function(given, self.function, self.is_agent)
        for field, least in (("max_turns", 1), ("turn_tokens", 1), ("num_retries", 0)):
            number = getattr(self, field)
            if number is None and field != "num_retries":
                continue
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(
                    f"{field}={number!r} of {given} is no number of them; use at least {least}"
                    f"{'' if field == 'num_retries' else ', or None for no limit'}."
                )
        for field in ("timeout_s", "format_reward"):
            number = getattr(self, field)
            if isinstance(number, bool) or not isinstance(number, Real) or not _is_finite(number):
                raise ValueError(f"{field}={number!r} of {given} is no number; give one.")
        if self.timeout_s <= 0:
            raise ValueError(
                f"timeout_s={self.timeout_s} of {given} ends every episode; use a positive time."
            )
        if self.group_reward is not None and (
            not callable(self.group_reward) or misfit(self.group_reward, [])
        ):
            raise ValueError(
                f"group_reward={name_of(self.group_reward)} of {given} is called with a list of "
                "rollouts, those of a group, which it does not take; give a function of one "
                "argument, which returns a number for each of them."
            )
        if is_async(self.group_reward):
            raise ValueError(
                f"group_reward={name_of(self.group_reward)} of {given} is async, and nobody awaits "
                "it; let it be a plain function, and await within the episode."
            )
        if self.tools:
            from rlsys.environments.tools.tools import ToolSet

            ToolSet(self.tools)  # raises for what is none
        if len(set(self.seats)) < len(self.seats) or not self.seats:
            raise ValueError(
                f"seats={list(self.seats)} of {given} are no names of who sits there; give each "
                "a name of its own, such as seats=('first', 'second')."
            )

    def __call__(self, chat: Any, task: Mapping[str, Any]) -> Any:
        return self.function(chat, task)

    def check_others(self, told: str, names: Collection[str]) -> None:
        """Raise ValueError unless others than the policy can have the seats of these names; `told`:
        where they are given.
        """
        given = f"environment {self.name!r}"
        if names and self.is_agent:
            raise ValueError(
                f"{told}{[*names]}: an agent's endpoint is the policy's alone, and {given} is one; "
                "leave seats out, or write it as an @environment."
            )
        for name in names:
            if name not in self.seats:
                raise ValueError(
                    f"{told}: {name!r} is none of the seats {[*self.seats]} of {given}; use one of "
                    "them, or name it in @environment(seats=[...])."
                )
        if len(names) == len(self.seats):
            raise ValueError(
                f"{told}{[*names]} leaves no seat of {given} to the policy itself; leave one out."
            )

    @functools.cached_property
    def is_async(self) -> bool:
        function = self.function
        return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


@overload
def environment(function: EnvironmentFunction, /) -> Environment: ...
@overload
def environment(
    *,
    name: str | None = None,
    max_turns: int | None = None,
    turn_tokens: int | None = None,
    stop: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    tools: Sequence[Any] = (),
    tool_format: str | ToolFormat = "",
    format_reward: float = 0.0,
    num_retries: int = 2,
    seats: Sequence[str] = ("policy",),
    group_reward: GroupReward | None = None,
    required_columns: Sequence[str] = (),
    plain_text: bool = False,
) -> Callable[[EnvironmentFunction], Environment]: ...
def environment(
    function: EnvironmentFunction | None = None,
    /,
    *,
    name: str | None = None,
    max_turns: int | None = None,
    turn_tokens: int | None = None,
    stop: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    tools: Sequence[Any] = (),
    tool_format: str | ToolFormat = "",
    format_reward: float = 0.0,
    num_retries: int = 2,
    seats: Sequence[str] = ("policy",),
    group_reward: GroupReward | None = None,
    required_columns: Sequence[str] = (),
    plain_text: bool = False,
) -> Environment | Callable[[EnvironmentFunction], Environment]:
    """Make a function an environment: `@environment`, or `@environment(max_turns=6)`.

    max_turns: replies of the policy; `chat.done` is True after the last one.
    turn_tokens: the most that one reply may have; None: what is left of sampling.max_tokens, which
        bounds the whole rollout beyond its first prompt, texts of the environment included.
    stop: texts at which a reply ends.
    timeout_s: of the environment's own time; what the policy takes to reply does not count.
    tools: functions decorated with `rlsys.tool`, and servers of `rlsys.mcp_tools`, for
        `chat.until_answer` and the chat template.
    tool_format: how the model writes calls ("hermes", "llama3", ..., or a ToolFormat of your own);
        empty: as its chat template says.
    format_reward: what an episode ends with whose reply `parse` refuses, or that goes on after its
        context is full, in place of what the function would have returned.
    num_retries: fresh attempts after one that raised, or took too long; then its group is dropped.
    seats: who takes turns in it, such as the two sides of a game; `chat.seat(name)`.
    group_reward: `(rollouts of a group) -> a number each`, added to what each episode returned.
    required_columns: of the dataset's rows, which come as `task`.
    plain_text: texts stand one behind the other as they are, without the chat template.
    """

    def decorate(function: EnvironmentFunction) -> Environment:
        own_name = _name_of(function)
        return Environment(
            function=function,
            name=own_name if name is None else name,
            max_turns=max_turns,
            turn_tokens=turn_tokens,
            stop=_names("stop", stop, own_name),
            timeout_s=timeout_s,
            tools=_tools(tools, own_name),
            tool_format=tool_format,
            format_reward=format_reward,
            num_retries=num_retries,
            seats=_names("seats", seats, own_name),
            group_reward=group_reward,
            required_columns=_names("required_columns", required_columns, own_name),
            plain_text=plain_text,
        )

    return decorate if function is None else decorate(function)


@overload
def agent(function: EnvironmentFunction, /) -> Environment: ...
@overload
def agent(
    *,
    name: str | None = None,
    max_turns: int | None = None,
    turn_tokens: int | None = None,
    timeout_s: float = TIMEOUT_S,
    num_retries: int = 2,
    required_columns: Sequence[str] = (),
    tool_format: str | ToolFormat = "",
    format_reward: float = 0.0,
    group_reward: GroupReward | None = None,
) -> Callable[[EnvironmentFunction], Environment]: ...
def agent(
    function: EnvironmentFunction | None = None,
    /,
    *,
    name: str | None = None,
    max_turns: int | None = None,
    turn_tokens: int | None = None,
    timeout_s: float = TIMEOUT_S,
    num_retries: int = 2,
    required_columns: Sequence[str] = (),
    tool_format: str | ToolFormat = "",
    format_reward: float = 0.0,
    group_reward: GroupReward | None = None,
) -> Environment | Callable[[EnvironmentFunction], Environment]:
    """Make a function of `(endpoint, task)` an environment in which any program that speaks to an
    OpenAI-compatible endpoint is the policy's hands: it is given an `Endpoint`, and what it asks
    there becomes the rollout, token by token. It returns what that is worth, a number or named
    ones.

    The arguments are those of `environment`. format_reward: what an episode ends with that raises
    after it was told that its turns, tokens or context are used up. tool_format: of tools that the
    agent sends along with its requests.
    """

    def decorate(function: EnvironmentFunction) -> Environment:
        own_name = _name_of(function)
        return Environment(
            function=function,
            name=own_name if name is None else name,
            max_turns=max_turns,
            turn_tokens=turn_tokens,
            timeout_s=timeout_s,
            num_retries=num_retries,
            required_columns=_names("required_columns", required_columns, own_name),
            tool_format=tool_format,
            format_reward=format_reward,
            group_reward=group_reward,
            is_agent=True,
        )

    return decorate if function is None else decorate(function)


def as_environment(given: Any) -> Environment:
    """As one; a bare function gets the defaults. Raises ValueError for what is none."""
    return given if isinstance(given, Environment) else environment(given)


def _name_of(function: Any) -> str:
    """Its own; of what another decorator made, or a partial, that of the function inside."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None) or getattr(function, "name", None)
    return name if isinstance(name, str) else type(function).__name__


def _check_function(given: str, function: object, is_agent: bool) -> None:
    """Raise ValueError for what cannot be called with (chat, task), and nothing else."""
    first = "endpoint" if is_agent else "chat"
    if (other := _decorated(function)) is not None:
        raise ValueError(
            f"{given} is {other} already; decorate a function of ({first}, task) once, with all "
            "arguments in one place."
        )
    if not callable(function):
        raise ValueError(
            f"{given} is {function!r}, which is no function; give one of ({first}, task)."
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"{given} is a generator; let it return its reward, not yield it.")
    if error := misfit(function, None, None):
        raise ValueError(
            f"{given} is called with ({first}, task), which it does not take ({error}); let it "
            "take these two: columns of the dataset are in task, other values come with "
            "functools.partial."
        )
    names = parameter_names(function)
    if names[:1] == ["task"] or names[1:2] == [first]:
        raise ValueError(
            f"{given} takes ({', '.join(names[:2])}), and is called with ({first}, task); "
            "let it take them in this order."
        )


def _decorated(function: object) -> str | None:
    """What a function is that another decorator of rlsys has made into something else."""
    if isinstance(function, Environment):
        return "an agent" if function.is_agent else "an environment"
    if isinstance(function, Reward):
        return "a reward"
    tools = sys.modules.get(
        "rlsys.environments.tools.tools"
    )  # nobody has made one before its import
    return "a tool" if tools is not None and isinstance(function, tools.Tool) else None


def _tools(tools: object, name: str) -> tuple[Any, ...]:
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(
            f"tools={tools!r} of environment {name!r} is no list of tools; give one, even of one "
            "tool: tools=[search]."
        )
    return tuple(tools)


def _is_finite(number: Any) -> bool:
    return math.isfinite(number)


def _names(field: str, names: object, name: str) -> tuple[str, ...]:
    """As a tuple. Raises ValueError for a text, which would be taken as letters, and other things
    that are no list of texts.
    """
    if isinstance(names, str):
        raise ValueError(
            f"{field}={names!r} of environment {name!r} is one text; give a list, "
            f"{field}=({names!r},)."
        )
    if not isinstance(names, Sequence) or not all(isinstance(one, str) for one in names):
        raise ValueError(
            f"{field}={names!r} of environment {name!r} is no list of texts; give one such as "
            f'{field}=("answer",).'
        )
    return tuple(names)
