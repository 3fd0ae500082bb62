"""Functions that a recipe brings along: their names, whether they take what they are given, and
what is told when they fail.

Importing this takes no torch: reward processes do without.
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

# Longer messages lose their middle: some exceptions quote all that they were given.
MAX_MESSAGE = 4000

# Of a traceback that is shown.
MAX_FRAMES = 3

# Where the files are that a user has not written: rlsys, Python, packages.
OF_OTHERS = tuple(
    os.path.join(path, "")
    for path in (
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class FunctionFailed(RuntimeError):
    """A function of the recipe's raised, or returned what nobody can train on; the message names it
    and says where.
    """


def name_of(function: object) -> str:
    """What a message calls it: its name; of an object with fields, these too."""
    while isinstance(function, functools.partial):
        function = function.func
    kind = type(function)
    if dataclasses.is_dataclass(function) and not isinstance(function, type):
        values = ((one.name, getattr(function, one.name)) for one in dataclasses.fields(function))
        told = (f"{name}={name_of(x) if callable(x) else repr(x)}" for name, x in values)
        return f"{kind.__name__}({', '.join(told)})"
    unnamed = kind.__name__ if kind.__repr__ is object.__repr__ else str(function)
    name: str = getattr(function, "__name__", unnamed)
    return name


def number_of(value: object) -> float | None:
    """Return a number that a function gave, as a float: of Python's, of numpy's, or of a tensor or
    array without dimensions. None for everything else; infinite where a float cannot hold it.
    """
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        try:
            value = item()
        except (RuntimeError, ValueError, TypeError):  # such as a tensor on the meta device
            return None
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def misfit(function: Callable[..., Any], *arguments: object, **named: object) -> TypeError | None:
    """Why it cannot be called with these; None where it can, or does not tell."""
    try:
        if isinstance(function, functools.partial):  # else a wrong one looks as if it did not tell
            inspect.signature(function.func).bind_partial(*function.args, **function.keywords)
        inspect.signature(function).bind(*arguments, **named)
    except ValueError:  # of a function in C
        return None
    except TypeError as error:
        return error
    return None


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """In their order; none of a function in C that does not tell."""
    try:
        return [*inspect.signature(function).parameters]
    except ValueError:
        return []


def said_of(function: object, name: str, default: Any) -> Any:
    """An attribute of a function, or of the function that a functools.partial is of."""
    while isinstance(function, functools.partial) and not hasattr(function, name):
        function = function.func
    return getattr(function, name, default)


def is_deferred(function: Any) -> bool:
    """Whether a call returns nothing computed yet: that of an async function, or of a generator."""
    return is_async(function) or _is_any(function, inspect.isgeneratorfunction)


def is_async(function: Any) -> bool:
    """Whether what a call returns has to be awaited, or iterated with `async for`."""
    return _is_any(function, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def _is_any(function: Any, *tests: Callable[[Any], bool]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return any(test(one) for test in tests for one in (function, type(function).__call__))


def called(what: str, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """What it returns. Raises FunctionFailed for whatever it raises; `what` names it."""
    try:
        return function(*arguments, **named)
    except Exception as error:
        raise FunctionFailed(f"{raised(what, error)}\nMend it, and run again.") from error


def raised(what: str, error: BaseException) -> str:
    """`what` raised this: the exception, and the last frames of its traceback below the caller's,
    which is the first. Frames before the function are left out, and the last line of the user's
    own stands first where all that are shown would be of others.
    """
    below = error.__traceback__.tb_next if error.__traceback__ else None
    frame = below
    while frame is not None:
        if frame.tb_frame.f_code is contained.__code__ and frame.tb_next is not None:
            below = frame.tb_next
        frame = frame.tb_next
    frames = traceback.extract_tb(below)
    shown = frames[-MAX_FRAMES:]
    own = [one for one in frames if not one.filename.startswith(OF_OTHERS)]
    if own and own[-1] not in shown:
        shown = [own[-1], *shown[1:]]
    trace = traceback.format_list(shown)
    *before, last = traceback.format_exception_only(type(error), error)
    head = ["Traceback (most recent call last):\n"] if trace else []
    return printable(f"{what} raised {last}{''.join([*head, *trace, *before])}".rstrip())


def printable(text: str) -> str:
    """Without what a terminal would act on, and of bounded length: colours are left out, such as
    those of Ray's traces, and other escape sequences written out.
    """
    text = COLOUR.sub("", text)
    if len(text) > MAX_MESSAGE:
        text = f"{text[: MAX_MESSAGE // 2]} [...] {text[-MAX_MESSAGE // 2 :]}"
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


class Escaped(RuntimeError):
    """A function raised what is no Exception, the cause of this."""

    def __init__(self, name: str, cause: BaseException) -> None:
        super().__init__(f"{name} raised {type(cause).__name__}: {cause}")
        self.__cause__ = cause


async def contained(
    function: Callable[..., Awaitable[T]],
    *arguments: Any,
    passing: tuple[type[BaseException], ...] = (),
) -> T:
    """What an async function returns. Raises Escaped for what is no Exception (SystemExit, which
    would end the event loop, or CancelledError where nobody has cancelled it, which would look as
    if somebody had), but for `passing`.
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
