"""Process of an examined program: runs it, then executes the requests of its examiner.

The examiner uses the messages of this process only as the values that calls returned.
"""

from __future__ import annotations

import sys
from typing import Any

from rlsys.rewards.sandbox.inside import value_encoding

NAME = "program.py"


class Subject:
    """An examined program and its objects."""

    def __init__(self) -> None:
        self._kept: list[Any] = []  # objects that are not plain data, by number

    def serve(self, source: str) -> None:
        """Run the program, then answer requests until the channel closes."""
        names: dict[str, Any] = {"__name__": "program", "__file__": NAME}
        failed = None
        try:
            exec(compile(source, NAME, "exec"), names)
        except BaseException as error:  # noqa: BLE001, the program may raise anything
            failed = f"{type(error).__name__}: {error}"
        needed = value_encoding.receive()
        found = {name: self._encoded(names[name]) for name in needed if name in names}
        value_encoding.send({"found": found, "failed": failed})
        while True:
            request = value_encoding.receive()
            try:
                answer = {"returned": self._encoded(self._do(request))}
            except BaseException as error:  # noqa: BLE001, the tests may expect it
                kinds = [one.__name__ for one in type(error).__mro__]
                answer = {"raised": kinds, "message": str(error)[:1000]}
            value_encoding.send(answer)

    def _do(self, request: dict[str, Any]) -> Any:
        target = self._kept[request["handle"]]
        if "items" in request:
            return [item for item, _ in zip(target, range(request["items"]), strict=False)]
        if "attribute" in request:
            return getattr(target, request["attribute"])
        arguments = value_encoding.decode(request["arguments"], self._known)
        return target(*arguments[0], **arguments[1])

    def _known(self, tag: str, number: int) -> Any:
        return self._kept[number]

    def _encoded(self, value: Any) -> Any:
        return value_encoding.encode(value, self._keep)

    def _keep(self, value: Any) -> Any:
        self._kept.append(value)
        return {"h": len(self._kept) - 1}


def main(source: str) -> None:
    """Run a program for its examiner."""
    sys.set_int_max_str_digits(0)
    try:
        Subject().serve(source)
    except value_encoding.Closed:
        return
