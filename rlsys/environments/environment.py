"""Decorators that turn a function into an environment.

In: a function `(chat, task) -> float | dict[str, float]`, async or synchronous. One call plays one
rollout: it samples replies of the policy through `chat` and returns the reward.
Out: an `Environment`: the function with its name, limits and tools.
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

from rlsys.common.user_functions import is_async, misfit, parameter_names
from rlsys.config.fields import checked
from rlsys.errors import InvalidValue, require
from rlsys.rewards.reward import Reward
from rlsys.types import Rollout

if TYPE_CHECKING:  # these import pydantic, which is slow
    from rlsys.environments.tools.tool_formats import ToolFormat
    from rlsys.environments.tools.tools import Tool, ToolSource

EnvironmentFunction = Callable[..., Any]  # (chat, task) -> a number, or numbers by name
GroupReward = Callable[[Sequence[Rollout]], Sequence[float]]

# Default time limit of an episode, without the time in which replies are sampled.
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Address of an OpenAI-compatible endpoint, and the API key of one episode.

    Attributes:
        url: Base URL for OpenAI's clients; it ends with /v1.
        key: API key of the episode.
        model: Model name for requests. The endpoint accepts any name.
    """

    url: str
    key: str
    model: str = "policy"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A function with its limits and tools; calling it calls the function.

    The fields are the arguments of `rlsys.environment`.
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
        prefix = f"{'agent' if self.is_agent else 'environment'} {self.name!r}"
        _check_function(prefix, self.function, self.is_agent)
        for field, least in (("max_turns", 1), ("turn_tokens", 1), ("num_retries", 0)):
            number = getattr(self, field)
            if number is None and field != "num_retries":
                continue
            require(
                isinstance(number, int) and not isinstance(number, bool) and number >= least,
                f"{prefix}: {field}",
                number,
                rule=f"must be an integer of at least {least}",
                fix=f"Use {least} or more{'.' if least == 0 else ', or None for no limit.'}",
            )
        for field in ("timeout_s", "format_reward"):
            number = getattr(self, field)
            if isinstance(number, bool) or not isinstance(number, Real) or not _is_finite(number):
                raise InvalidValue(
                    f"{prefix}: {field}", number, rule="must be a finite number", fix="Use a float."
                )
        require(
            self.timeout_s > 0,
            f"{prefix}: timeout_s",
            self.timeout_s,
            rule="must be positive",
            fix="Use a number of seconds above 0.",
        )
        field = f"{prefix}: group_reward"
        if self.group_reward is not None and (
            not callable(self.group_reward) or misfit(self.group_reward, [])
        ):
            raise InvalidValue(
                field,
                self.group_reward,
                rule="must accept one argument, the list of the rollouts of a group",
                fix="Use a function of one argument that returns a number for each rollout.",
            )
        require(
            not is_async(self.group_reward),
            field,
            self.group_reward,
            rule="must not be async",
            fix="Use a synchronous function, and await inside the episode.",
        )
        if self.tools:
            from rlsys.environments.tools.tools import ToolSet

            ToolSet(self.tools)  # raises InvalidValue
        require(
            bool(self.seats) and len(set(self.seats)) == len(self.seats),
            f"{prefix}: seats",
            list(self.seats),
            rule="must be one or more different names",
            fix='For example: seats=("first", "second").',
        )

    def __call__(self, chat: Any, task: Mapping[str, Any]) -> Any:
        """Call the function."""
        return self.function(chat, task)

    def check_seats(self, field: str, names: Collection[str]) -> None:
        """Raise InvalidValue unless models other than the policy can play the named seats.

        Args:
            field: Name of the argument that contains the names, for the message.
            names: Names of seats.
        """
        if names and self.is_agent:
            raise InvalidValue(
                field,
                [*names],
                rule=f"environment {self.name!r} is an agent, which has no other seats",
                fix="Remove the seats, or write the environment with @environment.",
            )
        for name in names:
            require(
                name in self.seats,
                field,
                name,
                rule=f"environment {self.name!r} has the seats {[*self.seats]}",
                fix="Use one of them, or add it with @environment(seats=[...]).",
            )
        require(
            len(names) < len(self.seats),
            field,
            [*names],
            rule=f"leaves no seat of environment {self.name!r} to the policy",
            fix="Remove one.",
        )

    @functools.cached_property
    def is_async(self) -> bool:
        """Return whether the function is async."""
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
    """Turn a function into an environment: `@environment` or `@environment(max_turns=6)`.

    Args:
        function: A function `(chat, task)`, async or synchronous, that returns a number or numbers
            by name.
        name: Name of the environment; that of the function by default.
        max_turns: Maximum number of replies of the policy. `chat.done` is True after the last one.
        turn_tokens: Maximum number of tokens of a reply. None: what is left of sampling.max_tokens,
            which limits all tokens after the first prompt, those of the environment included.
        stop: Texts that end a reply.
        timeout_s: Time limit of an episode in seconds, without the time in which replies are
            sampled.
        tools: Functions decorated with `rlsys.tool` and servers of `rlsys.mcp_tools`, for the chat
            template and `chat.until_answer`.
        tool_format: Format in which the model writes tool calls ("hermes", "llama3", ..., or a
            ToolFormat). Empty: that of the chat template.
        format_reward: Reward, in place of the function's, of an episode that ends because `parse`
            rejected a reply, because the environment called the chat after `chat.done`, or because
            a tool call failed and the model has no tokens for the text of the error.
        num_retries: New attempts after one that raised or timed out. Then the group is dropped.
        seats: Names of the players, such as the two sides of a game; see `chat.seat(name)`.
        group_reward: A function of the rollouts of a group that returns a number for each. It is
            added to the reward of the episode.
        required_columns: Columns that the dataset must have. `task` is one row of it.
        plain_text: Concatenate the texts without the chat template.

    Returns:
        The environment, or a decorator if `function` is missing.

    Raises:
        InvalidValue: An argument is wrong.
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
    """Turn a function of `(endpoint, task)` into an environment that plays over HTTP.

    The function passes the `Endpoint` to any program that uses an OpenAI-compatible API. Its
    requests and the replies become the rollout, token by token.

    Args:
        function: A function `(endpoint, task)`, async or synchronous, that returns a number or
            numbers by name.
        name: Name of the environment; that of the function by default.
        max_turns: Maximum number of replies.
        turn_tokens: Maximum number of tokens of a reply.
        timeout_s: Time limit of an episode in seconds, without the time in which replies are
            sampled.
        num_retries: New attempts after one that raised or timed out. Then the group is dropped.
        required_columns: Columns that the dataset must have. `task` is one row of it.
        tool_format: Format in which the model writes calls of the tools that requests contain.
        format_reward: Reward of an episode that raises after the endpoint has answered that its
            turns, tokens or context are used up.
        group_reward: A function of the rollouts of a group that returns a number for each.

    Returns:
        The environment, or a decorator if `function` is missing.

    Raises:
        InvalidValue: An argument is wrong.
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


def as_environment(function: Any) -> Environment:
    """Return an environment as it is, or a function as an environment with default options.

    Raises:
        InvalidValue: It is neither.
    """
    return function if isinstance(function, Environment) else environment(function)


def _name_of(function: Any) -> str:
    """Return the name of a function, that of the inner one for a partial or a decorated one."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None) or getattr(function, "name", None)
    return name if isinstance(name, str) else type(function).__name__


def _check_function(field: str, function: object, is_agent: bool) -> None:
    """Raise InvalidValue unless the function can be called with exactly (chat, task)."""
    first = "endpoint" if is_agent else "chat"
    if (other := _decorated(function)) is not None:
        raise InvalidValue(
            field,
            rule=f"is {other} already",
            fix=f"Decorate a function of ({first}, task) once, with all arguments.",
        )
    if not callable(function):
        raise InvalidValue(
            field,
            function,
            rule="must be a function",
            fix=f"Use a function of ({first}, task).",
        )
    require(
        not inspect.isgeneratorfunction(function) and not inspect.isasyncgenfunction(function),
        field,
        rule="must not be a generator",
        fix="Return the reward instead of yielding it.",
    )
    if error := misfit(function, None, None):
        raise InvalidValue(
            field,
            rule=f"must accept the arguments ({first}, task): {error}",
            fix="Read columns of the dataset from task, and bind other values with "
            "functools.partial.",
        )
    names = parameter_names(function)
    require(
        names[:1] != ["task"] and names[1:2] != [first],
        field,
        rule=f"is called with ({first}, task), but its parameters are ({', '.join(names[:2])})",
        fix="Swap the parameters.",
    )


def _decorated(function: object) -> str | None:
    """Return what another decorator of rlsys has made of a function; None if it is bare."""
    if isinstance(function, Environment):
        return "an agent" if function.is_agent else "an environment"
    if isinstance(function, Reward):
        return "a reward"
    tools = sys.modules.get("rlsys.environments.tools.tools")  # no tool exists before its import
    return "a tool" if tools is not None and isinstance(function, tools.Tool) else None


def _tools(tools: object, name: str) -> tuple[Any, ...]:
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise InvalidValue(
            f"environment {name!r}: tools",
            tools,
            rule="must be a list of tools",
            fix="Use a list even for one tool: tools=[search].",
        )
    return tuple(tools)


def _is_finite(number: Any) -> bool:
    return math.isfinite(number)


def _names(field: str, names: object, name: str) -> tuple[str, ...]:
    """Return a list of texts as a tuple."""
    if isinstance(names, str):
        raise InvalidValue(
            f"environment {name!r}: {field}",
            names,
            rule="must be a list of texts",
            fix=f"Use a list: {field}=({names!r},).",
        )
    if not isinstance(names, Sequence) or not all(isinstance(one, str) for one in names):
        raise InvalidValue(
            f"environment {name!r}: {field}",
            names,
            rule="must be a list of texts",
            fix=f'For example: {field}=("answer",).',
        )
    return tuple(names)
