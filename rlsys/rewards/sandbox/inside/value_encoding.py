"""Encoding of the values that an examined program and its examiner exchange.

A value becomes JSON with tags, and is decoded as exactly one of None, bool, int, float, complex,
str, bytes, list, tuple, set, frozenset, dict, or a `Handle`. So an object of the program's own
class, whose __eq__ may always return True, never gets into a comparison.
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
    """The other side has ended. It is not an Exception, so that tests do not catch it."""


has_closed = False


def closed() -> Closed:
    """Return the error to raise, and record it, because a bare `except:` could catch it."""
    global has_closed
    has_closed = True
    return Closed()


class NotPlain(TypeError):
    """A value is not plain data."""


def send(message: Any) -> None:
    """Send a message to the other side."""
    content = json.dumps(message).encode()
    left = memoryview(LENGTH.pack(len(content)) + content)
    try:
        while left:
            left = left[os.write(CHANNEL, left) :]
    except OSError as error:
        raise closed() from error


def receive() -> Any:
    """Return the next message of the other side."""
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
    """Return a value as JSON. `other` encodes values that are not plain data."""
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


def decode(encoded: Any, other: Callable[[str, Any], Any]) -> Any:
    """Return the value of JSON. `other` decodes values with other tags than plain data."""
    if encoded is None or isinstance(encoded, bool | str | int):
        return encoded
    if not isinstance(encoded, dict) or len(encoded) != 1:
        raise closed()  # `encode` does not make this
    ((tag, content),) = encoded.items()
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
