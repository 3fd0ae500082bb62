"""Examiner of a program: runs its tests, in another process than the program's.

In: on standard input, the tests as JSON, and the names that the program must define. Out: on
standard output, a 1 or a 0 for each test, in order, as soon as it is known.

Here a name of the program has its value, if that is plain data. Otherwise it is a handle: calls,
attributes and iteration send a request to the program's process.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from rlsys.rewards.sandbox.inside import value_encoding

MAX_ITEMS = 100_000


class Handle:
    """Object of the program. It equals only itself, whatever the program claims."""

    def __init__(self, number: int) -> None:
        self.__dict__["_number"] = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object in the program's process."""
        arguments = value_encoding.encode([list(args), kwargs], _number_of)
        return _request({"handle": self._number, "arguments": arguments})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _request({"handle": self._number, "attribute": name})

    def __iter__(self) -> Iterator[Any]:
        items = _request({"handle": self._number, "items": MAX_ITEMS})
        if type(items) is not list:
            raise TypeError("the object is not iterable")
        return iter(items)


def _number_of(value: Any) -> Any:
    if type(value) is Handle:
        return {"h": value._number}
    raise value_encoding.NotPlain(
        f"a test passes a value of type {type(value).__name__} to the program"
    )


def _handle(tag: str, number: Any) -> Handle:
    if tag != "h" or type(number) is not int:
        raise value_encoding.closed()
    return Handle(number)


def _request(message: dict[str, Any]) -> Any:
    value_encoding.send(message)
    answer = value_encoding.receive()
    if "returned" in answer:
        return value_encoding.decode(answer["returned"], _handle)
    raise _error(answer["raised"], str(answer["message"]))


def _error(kinds: list[str], message: str) -> Exception:
    """Return the most specific built-in exception of these names, never one that ends a process."""
    for name in kinds:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(message)
            except TypeError:  # it takes more than a message
                break
    return Exception(message)


def main() -> None:
    """Run the tests and write their verdicts."""
    spec = json.load(sys.stdin)
    sys.set_int_max_str_digits(0)
    verdicts = os.dup(1)
    os.dup2(2, 1)  # output of tests is not a verdict
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        value_encoding.send(spec["names"])
        answer = value_encoding.receive()
        if answer["failed"] is None:
            for name in spec["names"]:
                if name in answer["found"]:
                    names[name] = value_encoding.decode(answer["found"][name], _handle)
        for steps in spec["tests"]:
            passed = answer["failed"] is None and _passes(steps, names)
            os.write(verdicts, b"1" if passed else b"0")
    except (value_encoding.Closed, KeyError, TypeError):
        return  # the program has ended, so the remaining tests have failed


def _passes(steps: dict[str, Any], names: dict[str, Any]) -> bool:
    _runs(steps["before"], names)  # if it fails, so do the tests that need it
    return _runs(steps["test"], names)


def _runs(source: str, names: dict[str, Any]) -> bool:
    """Return whether a source runs without an exception.

    Raises:
        Closed: The program has ended, even if the test caught the exception.
    """
    try:
        exec(compile(source, "tests.py", "exec"), names)
        succeeded = True
    except BaseException:  # noqa: BLE001, including SystemExit
        succeeded = False
    if value_encoding.has_closed:
        raise value_encoding.Closed
    return succeeded
