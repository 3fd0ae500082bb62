"""Functions of a recipe: their names, signatures, calls and errors.

This module does not import torch, because reward processes run without it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import math
import os
import re
import sysconfig
import traceback
from collections.abc import Awaitable, Callable
from numbers import Real
from typing import Any, TypeVar

T = TypeVar("T")

# Characters. Longer messages lose their middle; some exceptions quote all their arguments.
MAX_MESSAGE = 4000

MAX_FRAMES = 3  # of a traceback in a message

# Directories of code that the user has not written: rlsys, Python, packages.
LIBRARY_DIRS = tuple(
    os.path.join(path, "")
    for path in (
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class FunctionFailed(RuntimeError):
    """A function of the recipe raised an error or returned an unusable value.

    The message has the name of the function and the location of the error.
    """


def name_of(function: object) -> str:
    """Return the name of a function for messages; for a dataclass, with its fields."""
    while isinstance(function, functools.partial):
        function = function.func
    kind = type(function)
    if dataclasses.is_dataclass(function) and not isinstance(function, type):
        values = ((one.name, getattr(function, one.name)) for one in dataclasses.fields(function))
        shown = (f"{name}={name_of(x) if callable(x) else repr(x)}" for name, x in values)
        return f"{kind.__name__}({', '.join(shown)})"
    unnamed = kind.__name__ if kind.__repr__ is object.__repr__ else str(function)
    name: str = getattr(function, "__name__", unnamed)
    return name


def number_of(value: object) -> float | None:
    """Return a number as a float: a Python or numpy number, or a tensor without dimensions.

    The result is None for other values, and infinite for numbers that exceed a float.
    """
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        try:
            value = item()
        except (RuntimeError, ValueError, TypeError):  # for example a meta tensor
            return None
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def misfit(function: Callable[..., Any], *arguments: object, **named: object) -> TypeError | None:
    """Return why a function cannot take these arguments, or None if it can or has no signature."""
    try:
        if isinstance(function, functools.partial):  # whose own arguments may not fit
            inspect.signature(function.func).bind_partial(*function.args, **function.keywords)
        inspect.signature(function).bind(*arguments, **named)
    except ValueError:  # a function in C without a signature
        return None
    except TypeError as error:
        return error
    return None


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of parameters in order; empty for a function in C without a signature."""
    try:
        return [*inspect.signature(function).parameters]
    except ValueError:
        return []


def attribute_of(function: object, name: str, default: Any) -> Any:
    """Return an attribute of a function or of the function inside a functools.partial."""
    while isinstance(function, functools.partial) and not hasattr(function, name):
        function = function.func
    return getattr(function, name, default)


def is_deferred(function: Any) -> bool:
    """Return whether a function is async or a generator, so that a call computes nothing yet."""
    return is_async(function) or _is_any(function, inspect.isgeneratorfunction)


def is_async(function: Any) -> bool:
    """Return whether the result of a call must be awaited or iterated with `async for`."""
    return _is_any(function, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def _is_any(function: Any, *tests: Callable[[Any], bool]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return any(test(one) for test in tests for one in (function, type(function).__call__))


def called(what: str, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call a function and return its result.

    `what` names the function in errors.

    Raises:
        FunctionFailed: The function raised an exception.
    """
    try:
        return function(*arguments, **named)
    except Exception as error:
        raise FunctionFailed(f"{raised(what, error)}\nCorrect it and run again.") from error


def raised(what: str, error: BaseException) -> str:
    """Return the message that `what` raised `error`, with the last frames of the traceback.

    Frames before the function are omitted. If the last frames are all in libraries, the last frame
    in the user's code replaces the first of them.
    """
    below = error.__traceback__.tb_next if error.__traceback__ else None
    frame = below
    while frame is not None:
        if frame.tb_frame.f_code is contained.__code__ and frame.tb_next is not None:
            below = frame.tb_next
        frame = frame.tb_next
    frames = traceback.extract_tb(below)
    shown = frames[-MAX_FRAMES:]
    own = [one for one in frames if not one.filename.startswith(LIBRARY_DIRS)]
    if own and own[-1] not in shown:
        shown = [own[-1], *shown[1:]]
    trace = traceback.format_list(shown)
    *before, last = traceback.format_exception_only(type(error), error)
    head = ["Traceback (most recent call last):\n"] if trace else []
    return printable(f"{what} raised {last}{''.join([*head, *trace, *before])}".rstrip())


def printable(text: str) -> str:
    """Return text of bounded length that is safe to print on a terminal.

    Colours, such as those of Ray's traces, are removed; other control characters are escaped.
    """
    text = COLOUR.sub("", text)
    if len(text) > MAX_MESSAGE:
        text = f"{text[: MAX_MESSAGE // 2]} [...] {text[-MAX_MESSAGE // 2 :]}"
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


class Escaped(RuntimeError):
    """A function raised a BaseException that is not an Exception. It is the cause of this error."""

    def __init__(self, name: str, cause: BaseException) -> None:
        super().__init__(f"{name} raised {type(cause).__name__}: {cause}")
        self.__cause__ = cause


async def contained(
    function: Callable[..., Awaitable[T]],
    *arguments: Any,
    passing: tuple[type[BaseException], ...] = (),
) -> T:
    """Call an async function and return its result.

    Exceptions, those in `passing`, and the cancellation of the current task are raised unchanged.

    Raises:
        Escaped: The function raised another BaseException: SystemExit, which would end the event
            loop, or CancelledError although this task was not cancelled.
    """
    try:
        return await function(*arguments)
    except Exception:
        raise
    except passing:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Escaped(name_of(function), error) from error
    except BaseException as error:
        raise Escaped(name_of(function), error) from error
