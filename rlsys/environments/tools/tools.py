"""Tools: functions that a model may call.

In: functions decorated with `@rlsys.tool`, or the tools of an MCP server (mcp.py), and the calls of
one reply. Out: schemas for the chat template, and a tool message for each call.

The message of a ToolError is the output of the tool. Other mistakes of the model (an unknown tool,
wrong arguments) become an output too, whose text ToolSet writes. Any other exception fails the
episode.
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
from rlsys.errors import first_error, require

P = ParamSpec("P")
R = TypeVar("R")

# About 2,000 tokens, so that the output fits into the context.
MAX_OUTPUT_CHARS = 8_000
# Maximum length of the answer to a call of an unknown tool.
MAX_NAMES_CHARS = 1000
# The notice about what was cut must fit.
MIN_OUTPUT_CHARS = 100

# Time that a cancelled call has to end.
CANCEL_S = 5.0

# Maximum number of calls that run for one reply.
MAX_CALLS = 32


class ToolError(Exception):
    """Error of a tool whose message is the output for the model. The episode continues."""


class CallFailed(Exception):
    """Failure of a call, other than a ToolError. The message is the output for the model."""


class Execute(Protocol):
    """Executor of synchronous functions, outside of the event loop.

    Cancelling it should end the call. A process pool can do that, asyncio.to_thread cannot.
    """

    def __call__(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Awaitable[Any]:
        """Call the function elsewhere and return its result."""


class Tool(ABC):
    """Something that a model may call, with a name, a schema and limits.

    Args:
        timeout_s: Time limit of a call in seconds. None: none.
        on_timeout: "tell": a timeout becomes the output for the model. "fail": it fails the
            episode.
        max_output_chars: Maximum length of the output. The middle of longer outputs is cut out.

    Raises:
        InvalidValue: An argument is wrong.
    """

    name: str
    schema: Mapping[str, Any]  # in OpenAI's format

    def __init__(
        self,
        *,
        timeout_s: float | None,
        on_timeout: Literal["tell", "fail"],
        max_output_chars: int,
    ) -> None:
        require(
            timeout_s is None or 0 < timeout_s < math.inf,
            "tool: timeout_s",
            timeout_s,
            rule="must be a positive, finite number",
            fix="Use a number of seconds, or None for no limit.",
        )
        require(
            on_timeout in ("tell", "fail"),
            "tool: on_timeout",
            on_timeout,
            rule='must be "tell" or "fail"',
            fix="Use one of them.",
        )
        require(
            max_output_chars >= MIN_OUTPUT_CHARS,
            "tool: max_output_chars",
            max_output_chars,
            rule=f"must be at least {MIN_OUTPUT_CHARS}",
            fix=f"Use {MIN_OUTPUT_CHARS} or more.",
        )
        self.timeout_s = timeout_s
        self.on_timeout = on_timeout
        self.max_output_chars = max_output_chars

    @abstractmethod
    async def output(self, arguments: Mapping[str, Any], execute: Execute) -> Any:
        """Run a call and return its output, a str or any JSON value.

        Raises ToolError or WrongArguments for mistakes of the model.
        """

    async def answer(self, arguments: Mapping[str, Any], execute: Execute) -> str:
        """Run a call and return the text for the model: the output, or a ToolError's message.

        Raises CallFailed for wrong arguments, and for a timeout if on_timeout is "tell".
        Raises TimeoutError if it is "fail", and all other errors of the tool.
        """
        try:
            output = await self._in_time(self.output(arguments, execute))
        except ToolError as error:
            return cut(str(error), self.max_output_chars)
        except WrongArguments as error:
            raise CallFailed(cut(error_text(str(error)), self.max_output_chars)) from None
        except _TooLong:
            text = f"{self.name} did not end within {self.timeout_s:g} s and was stopped"
            if self.on_timeout == "fail":
                raise TimeoutError(
                    f'tool {text}. Raise timeout_s, or pass on_timeout="tell".'
                ) from None
            raise CallFailed(error_text(f"{text}.")) from None
        return cut(as_text(self.name, output), self.max_output_chars)

    async def _in_time(self, work: Awaitable[R]) -> R:
        """Return the result, or cancel the work, wait for its end and raise _TooLong."""
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
                    f"tool {self.name} still runs {CANCEL_S:g} s after it was cancelled because "
                    f"of timeout_s={self.timeout_s:g}. It must not catch CancelledError."
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
    """A function as a tool; calling it calls the function."""

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
        require(
            not is_deferred(function) or self.is_async,
            f"tool {self.name}",
            rule="must not be a generator",
            fix="Return the output instead of yielding it.",
        )
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        """Call the function."""
        return self.function(*args, **named)

    def __repr__(self) -> str:
        return f"<tool {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments of the constructor, since compiled validators cannot be pickled.

        The resolved types are included: the annotations of a script's function may name types that
        another process cannot resolve.
        """
        return functools.partial(self._remade, taken=self.signature.taken), ()

    async def output(self, arguments: Mapping[str, Any], execute: Execute) -> Any:
        """Call the function with converted arguments."""
        named = self.signature.arguments(arguments)
        if self.is_async:
            call: Any = functools.partial(self.function, **named)
            return await contained(call)
        return await execute(self.function, **named)


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
    """Turn a function into a tool: `@rlsys.tool` or `@rlsys.tool(timeout_s=1)`.

    The typed signature becomes the schema for the model. Descriptions come from the docstring
    (`Args:` in Google's style) or from Annotated[int, "how many"]. Synchronous functions run in a
    thread or process, never on the event loop.

    Args:
        function: An async or synchronous function that returns a str or any JSON value.
        **options: `name`; `timeout_s`, the time limit of a call in seconds; `on_timeout`, "tell"
            (the model, the default) or "fail" (the episode); `max_output_chars`, above which the
            middle of an output is cut out.

    Returns:
        The tool, or a decorator if `function` is missing.

    Raises:
        InvalidValue: A parameter has no type or one that JSON cannot represent, or an option is
            wrong.
    """

    def decorate(function: Any) -> Any:
        return FunctionTool(function, **options)

    return decorate if function is None else decorate(function)


class ToolSource(ABC):
    """Source of tools that exist only while it is open, such as a server."""

    @abstractmethod
    def opened(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """Return the tools, while the block runs. Raises InvalidValue if it cannot be opened."""


class ToolSet:
    """Tools of one environment.

    Those of a ToolSource exist between `open` and `close`. `execute` runs synchronous functions.

    Raises:
        InvalidValue: Two tools have the same name.
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
        """Start the tool servers. Raises InvalidValue if one does not start."""
        try:
            for source in self._sources:
                for one in await self._opened.enter_async_context(source.opened()):
                    self._add(one)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop the tool servers."""
        await self._opened.aclose()

    async def __aenter__(self) -> ToolSet:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _add(self, one: Tool) -> None:
        require(
            one.name not in self._tools,
            "tools",
            one.name,
            rule="two tools have this name",
            fix='Rename one with @rlsys.tool(name="...") or mcp_tools(prefix="...").',
        )
        self._tools[one.name] = one

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools."""
        return tuple(self._tools)

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """Schemas of the tools, for the chat template."""
        return [one.schema for one in self._tools.values()]

    async def call_all(
        self,
        calls: Sequence[ToolCall | Mapping[str, Any]],
        *,
        check_error: Callable[[str], None] = lambda text: None,
    ) -> list[dict[str, Any]]:
        """Run calls concurrently and return a tool message for each, in their order.

        Args:
            calls: Each is a `ToolCall` or an element of a message's `tool_calls`.
            check_error: Called with each output that the system writes in place of a tool's.

        Raises the error of a tool after the other calls were cancelled, and that of `check_error`.
        """
        parsed = [one if isinstance(one, ToolCall) else ToolCall.of(one) for one in calls]
        try:
            async with asyncio.TaskGroup() as group:
                answers = [
                    group.create_task(self._answer(call, index))
                    for index, call in enumerate(parsed)
                ]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        messages = []
        for call, answer in zip(parsed, answers, strict=True):
            found = answer.result()
            text = str(found)
            if isinstance(found, CallFailed):
                check_error(text)
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
            )
        return messages

    async def _answer(self, call: ToolCall, index: int) -> str | CallFailed:
        """Return the text of the tool, or the failure of the call."""
        try:
            return await self._found(call, index).answer(call.arguments, self._execute)
        except CallFailed as failure:
            return failure

    def _found(self, call: ToolCall, index: int) -> Tool:
        """Return the tool of a call. Raises CallFailed for a call that cannot be run."""
        if index >= MAX_CALLS:
            raise CallFailed(
                error_text(f"at most {MAX_CALLS} calls per reply are run; this one was not run.")
            )
        if call.error:
            raise CallFailed(cut(error_text(call.error), MAX_OUTPUT_CHARS))
        found = self._tools.get(call.name)
        if found is None:
            names = ", ".join(self._tools) or "none"
            text = f"there is no tool {call.name!r}. The tools are: {names}."
            raise CallFailed(cut(error_text(text), MAX_NAMES_CHARS))
        return found


def error_text(message: str) -> str:
    """Return the output for an error that the user of rlsys did not word."""
    return f"Error: {message}"


def as_text(name: str, output: Any) -> str:
    """Return the output of a tool as text. Raises TypeError if JSON cannot represent it."""
    if not isinstance(output, str):
        try:
            return to_json(output, inf_nan_mode="constants").decode()
        except (PydanticSerializationError, ValueError) as error:
            raise TypeError(
                f"tool {name} returned a {type(output).__name__}, which JSON cannot represent: "
                f"{error}. Return str, numbers, or lists and dicts of these."
            ) from error
    return output


def cut(text: str, max_chars: int) -> str:
    """Return a text cut to `max_chars` (at least MIN_OUTPUT_CHARS) characters.

    The middle is replaced by a notice. Lone surrogates, which are invalid Unicode, become "?".
    """
    if len(text) > max_chars:
        notice = f"\n[... {len(text)} characters, the middle was cut out ...]\n"
        kept = max_chars - len(notice)
        text = f"{text[: kept - kept // 2]}{notice}{text[len(text) - kept // 2 :]}"
    return text.encode("utf-8", "replace").decode()
