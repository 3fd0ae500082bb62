"""Values on the way between an examined program and its examiner: plain data, no more.

A value becomes JSON with tags, and comes back as exactly one of None, bool, int, float, complex,
str, bytes, list, tuple, set, frozenset, dict, or a `Handle`. So no object of the program's own
class, whose __eq__ says yes to everything, ever gets to where it is compared.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from typing import Any

CHANNEL = 3
MAX_MESSAGE_BYTES = 16 * 2**20
LENGTH = struct.Struct("<I")


class Closed(BaseException):
    """The other side has ended. No Exception, so that no test takes it for one."""


has_closed = False


def closed() -> Closed:
    """The error to raise; what catches it, as a bare `except:` does, cannot hide it."""
    global has_closed
    has_closed = True
    return Closed()


class NotSync(TypeError):
    """A value is no plain data."""


def send(message: Any) -> None:
    content = json.dumps(message).encode()
    left = memoryview(LENGTH.pack(len(content)) + content)
    try:
        while left:
            left = left[os.write(CHANNEL, left) :]
    except OSError as error:
        raise closed() from error


def receive() -> Any:
    (length,) = LENGTH.unpack(_exactly(LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise closed()
    return json.loads(_exactly(length))


def _exactly(length: int) -> bytes:
    parts = []
    while length:
        try:
            part = os.read(CHANNEL, min(length, 1 << 20))
        except OSError as error:
            raise closed() from error
        if not part:
            raise closed()
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """As JSON. `other` does the same for what is no plain data."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return {"f": repr(float(value))}
    if isinstance(value, complex):
        return {"c": repr(complex(value))}
    if isinstance(value, bytes | bytearray):
        return {"b": bytes(value).hex()}
    for tag, kind in (("l", list), ("t", tuple), ("s", set), ("z", frozenset)):
        if isinstance(value, kind):
            return {tag: [encode(one, other) for one in value]}
    if isinstance(value, dict):
        return {"d": [[encode(key, other), encode(one, other)] for key, one in value.items()]}
    return other(value)


def decode(told: Any, other: Callable[[str, Any], Any]) -> Any:
    """`other` makes a value of a tag that is none of the plain ones."""
    if told is None or isinstance(told, bool | str | int):
        return told
    if not isinstance(told, dict) or len(told) != 1:
        raise closed()  # nobody here sends such
    ((tag, content),) = told.items()
    if tag == "f":
        return float(content)
    if tag == "c":
        return complex(content)
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "d":
        return {decode(key, other): decode(one, other) for key, one in content}
    kinds: dict[str, type] = {"l": list, "t": tuple, "s": set, "z": frozenset}
    if tag in kinds:
        return kinds[tag](decode(one, other) for one in content)
    return other(tag, content)
