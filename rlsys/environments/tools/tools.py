"""Tools: functions that a model may call.

In: functions decorated with `@rlsys.tool`, or the tools of an MCP server (mcp.py), and the calls of
one reply. Out: the schemas that the chat template renders, and a tool message for each call.

What the model did wrong (a tool that is not there, arguments that do not fit, a ToolError) it is
told as the tool's output. What we did wrong (any other exception) ends the episode as a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

from pydantic_core import PydanticSerializationError, to_json

from rlsys.common.call_clock import Stopwatch, clocked
from rlsys.common.user_functions import contained, is_deferred
from rlsys.environments.tools.tool_call import ToolCall
from rlsys.environments.tools.tool_schema import Signature, WrongArguments
from rlsys.errors import first_error

P = ParamSpec("P")
R = TypeVar("R")

# About 2,000 tokens: a tool that says more than a context holds would end each episode.
MAX_OUTPUT_CHARS = 8_000
# The notice of what was cut must itself fit.
MIN_OUTPUT_CHARS = 100

# A call that was cancelled has this long to let go.
CANCEL_S = 5.0

# A reply of nothing but calls must not start as many at once as a context holds.
MAX_CALLS = 32


class ToolError(Exception):
    """Raised in a tool, it tells the model its text; the episode goes on."""


class Execute(Protocol):
    """Runs a plain function elsewhere than on the event loop. Whoever cancels the wait wants the
    call ended; asyncio.to_thread cannot end it, a pool of processes can.
    """

    def __call__(
        self, function: Callable[..., Any], /, *args: Any, **named: Any
    ) -> Awaitable[Any]: ...


class Tool(ABC):
    """What a model may call: a name, a schema, limits, and something to run.

    timeout_s: of one call, in seconds; None: no limit of its own.
    on_timeout: "tell" the model that the call took too long, or "fail" the episode as our fault.
    max_output_chars: of an output that is longer, the middle is left out, and this is said.
    """

    name: str
    schema: Mapping[str, Any]  # in OpenAI's shape

    def __init__(
        self,
        *,
        timeout_s: float | None,
        on_timeout: Literal["tell", "fail"],
        max_output_chars: int,
    ) -> None:
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise ValueError(
                f"timeout_s={timeout_s!r} of a tool lets no call end in time; use a positive "
                "number of seconds, or None."
            )
        if on_timeout not in ("tell", "fail"):
            raise ValueError(f'on_timeout={on_timeout!r} is neither "tell" nor "fail"; use one.')
        if max_output_chars < MIN_OUTPUT_CHARS:
            raise ValueError(
                f"max_output_chars={max_output_chars} leaves no room to say what was cut; use "
                f"{MIN_OUTPUT_CHARS} or more."
            )
        self.timeout_s = timeout_s
        self.on_timeout = on_timeout
        self.max_output_chars = max_output_chars

    @abstractmethod
    async def output(self, arguments: Mapping[str, Any], execute: Execute) -> Any:
        """What the tool returns: str, or anything that JSON can hold. Raises ToolError or
        WrongArguments for what the model did wrong.
        """

    async def answer(self, arguments: Mapping[str, Any], execute: Execute) -> str:
        """The text for the model. Raises what the tool raises, but for ToolError; TimeoutError
        where a call takes too long that is to fail.
        """
        try:
            output = await self._in_time(self.output(arguments, execute))
        except (ToolError, WrongArguments) as error:
            return cut(f"Error: {error}", self.max_output_chars)
        except _TooLong:
            text = f"{self.name} did not end within {self.timeout_s:g} s and was stopped"
            if self.on_timeout == "fail":
                raise TimeoutError(
                    f"tool {text}; allow it more with timeout_s=, or tell the model with "
                    'on_timeout="tell".'
                ) from None
            return f"Error: {text}."
        return cut(as_text(self.name, output), self.max_output_chars)

    async def _in_time(self, work: Awaitable[R]) -> R:
        """Return its result, or raise _TooLong after it was cancelled and has ended."""
        clock = Stopwatch(asyncio.get_running_loop().time)
        with clocked(clock):
            task = asyncio.ensure_future(work)
        try:
            while self.timeout_s is None or (left_s := self.timeout_s - clock.elapsed_s) > 0:
                await asyncio.wait({task}, timeout=None if self.timeout_s is None else left_s)
                if task.done():
                    return task.result()
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_S)
            if not task.done():
                raise RuntimeError(
                    f"tool {self.name} goes on {CANCEL_S:g} s after it was cancelled for its "
                    f"timeout_s={self.timeout_s:g}; let CancelledError through in it."
                )
            if not task.cancelled() and task.exception() is None:
                return task.result()  # it ended just in time
            raise _TooLong
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_S)
            raise


class _TooLong(Exception):
    pass


class FunctionTool(Tool, Generic[P, R]):
    """A function of the recipe's as a tool; still callable as itself."""

    def __init__(
        self,
        function: Callable[P, R],
        *,
        name: str | None = None,
        timeout_s: float | None = None,
        on_timeout: Literal["tell", "fail"] = "tell",
        max_output_chars: int = MAX_OUTPUT_CHARS,
        taken: Sequence[inspect.Parameter] | None = None,
    ) -> None:
        super().__init__(
            timeout_s=timeout_s, on_timeout=on_timeout, max_output_chars=max_output_chars
        )
        self._remade = functools.partial(
            FunctionTool,
            function,
            name=name,
            timeout_s=timeout_s,
            on_timeout=on_timeout,
            max_output_chars=max_output_chars,
        )
        self.function = function
        self.signature = Signature(function, name, taken=taken)
        self.name = self.signature.name
        self.schema = self.signature.schema
        self.is_async = _is_async(function)
        if is_deferred(function) and not self.is_async:
            raise ValueError(
                f"tool {self.name} is a generator, but a call gives one output; return it."
            )
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        return self.function(*args, **named)

    def __repr__(self) -> str:
        return f"<tool {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Compiled validators are made again. The types travel: a function of a script that is
        sent to another process does not have there what only its annotations name.
        """
        return functools.partial(self._remade, taken=self.signature.taken), ()

    async def output(self, arguments: Mapping[str, Any], execute: Execute) -> Any:
        given = self.signature.arguments(arguments)
        if self.is_async:
            called: Any = functools.partial(self.function, **given)
            return await contained(called)
        return await execute(self.function, **given)


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    tests = (function, type(function).__call__)
    return any(map(asyncio.iscoroutinefunction, tests))


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    on_timeout: Literal["tell", "fail"] = "tell",
    max_output_chars: int = MAX_OUTPUT_CHARS,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...
def tool(function: Any = None, /, **options: Any) -> Any:
    """Make a function a tool: `@rlsys.tool`, or `@rlsys.tool(timeout_s=1)`.

    Its typed signature becomes the schema that the model is shown; its docstring, the description,
    and those of the parameters (Google's `Args:`, or Annotated[int, "how many"]). It is async, or
    plain: then it runs in a thread or a process, never on the event loop. It returns a str, or
    anything that JSON can hold.

    timeout_s: of one call, in seconds; the call is ended then.
    on_timeout: "tell" the model (the default), or "fail" the episode as a fault of ours.
    max_output_chars: the middle of a longer output is left out, and this is said.

    Raises ValueError for a parameter without a type, or of a type that JSON cannot hold.
    """

    def decorate(function: Any) -> Any:
        return FunctionTool(function, **options)

    return decorate if function is None else decorate(function)


class ToolSource(ABC):
    """What has tools only while it is open, such as a server."""

    @abstractmethod
    def opened(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """Its tools. Raises ValueError where it cannot be opened."""


class ToolSet:
    """The tools of one environment. `execute` runs the plain functions among them. Those of a
    ToolSource are there between `open` and `close`.

    Raises ValueError for two of one name.
    """

    def __init__(
        self,
        tools: Iterable[Tool | ToolSource | Callable[..., Any]],
        *,
        execute: Execute = asyncio.to_thread,
    ) -> None:
        self._execute = execute
        self._tools: dict[str, Tool] = {}
        self._sources: list[ToolSource] = []
        self._opened = contextlib.AsyncExitStack()
        for one in tools:
            if isinstance(one, ToolSource):
                self._sources.append(one)
            else:
                self._add(one if isinstance(one, Tool) else tool(one))

    def __bool__(self) -> bool:
        return bool(self._tools or self._sources)

    async def open(self) -> None:
        """Start the servers whose tools are among them. Raises ValueError where one does not."""
        try:
            for source in self._sources:
                for one in await self._opened.enter_async_context(source.opened()):
                    self._add(one)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End what `open` has started."""
        await self._opened.aclose()

    async def __aenter__(self) -> ToolSet:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _add(self, one: Tool) -> None:
        if one.name in self._tools:
            raise ValueError(
                f"two tools are named {one.name!r}, but a model calls by name; tell them "
                'apart with @rlsys.tool(name="..."), or mcp_tools(prefix="...").'
            )
        self._tools[one.name] = one

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """For the chat template's `tools`."""
        return [one.schema for one in self._tools.values()]

    async def call_all(self, calls: Sequence[ToolCall | Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A tool message for each call, in the order of the calls, which run side by side; a call
        is a `ToolCall` or one of a message's `tool_calls`. Raises what a tool raises, after the
        other calls were ended.
        """
        read = [one if isinstance(one, ToolCall) else ToolCall.of(one) for one in calls]
        try:
            async with asyncio.TaskGroup() as group:
                answers = [
                    group.create_task(self._answer(call, place)) for place, call in enumerate(read)
                ]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "name": call.name,
                "content": answer.result(),
            }
            for call, answer in zip(read, answers, strict=True)
        ]

    async def _answer(self, call: ToolCall, place: int) -> str:
        if place >= MAX_CALLS:
            return f"Error: a reply may make {MAX_CALLS} calls; this one was not made."
        if call.error:
            return cut(f"Error: {call.error}", MAX_OUTPUT_CHARS)
        found = self._tools.get(call.name)
        if found is None:
            names = ", ".join(self._tools) or "none"
            return cut(f"Error: there is no tool {call.name!r}; there are: {names}.", 1000)
        return await found.answer(call.arguments, self._execute)


def as_text(name: str, output: Any) -> str:
    """An output as the model reads it. Raises TypeError for what JSON cannot hold."""
    if not isinstance(output, str):
        try:
            return to_json(output, inf_nan_mode="constants").decode()
        except (PydanticSerializationError, ValueError) as error:
            raise TypeError(
                f"tool {name} returned a {type(output).__name__}, which is no JSON: {error}; "
                "return a str, or numbers, lists and dicts of these."
            ) from error
    return output


def cut(text: str, max_chars: int) -> str:
    """At most `max_chars` (at least MIN_OUTPUT_CHARS) of it: its beginning and its end, with what
    was left out said between. What is no Unicode, a lone surrogate, becomes "?".
    """
    if len(text) > max_chars:
        notice = f"\n[... {len(text)} characters, of which the middle is left out ...]\n"
        kept = max_chars - len(notice)
        text = f"{text[: kept - kept // 2]}{notice}{text[len(text) - kept // 2 :]}"
    return text.encode("utf-8", "replace").decode()
