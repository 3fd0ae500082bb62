"""JSON for all of rlsys: writing, reading of possibly damaged text, and comparison.

User code and its libraries may replace `json.dumps` and `json.loads` for the whole process; the
`dumps` of orjson, for example, returns bytes. The functions of this file use the standard library's
encoder and decoder as they were at import. No other module of rlsys or actors calls `json.dumps` or
`json.loads`, except scripts that run in their own process without the package.
"""

from __future__ import annotations

from json import JSONDecodeError, JSONDecoder, JSONEncoder, detect_encoding
from typing import Any

# Nesting of lists and objects in a prompt or a row. Python supports at most about a thousand.
MAX_NESTING = 50


class _Encoder(JSONEncoder):
    """The standard encoder, with methods that a replacement in JSONEncoder does not change."""

    __init__ = JSONEncoder.__init__
    default = JSONEncoder.default
    encode = JSONEncoder.encode
    iterencode = JSONEncoder.iterencode


class _Decoder(JSONDecoder):
    """The standard decoder, with methods that a replacement in JSONDecoder does not change."""

    decode = JSONDecoder.decode
    raw_decode = JSONDecoder.raw_decode


_DECODER = _Decoder()
_PLAIN = _Encoder()


def dump_json(
    value: Any,
    *,
    indent: int | None = None,
    sort_keys: bool = False,
    ensure_ascii: bool = True,
    allow_nan: bool = True,
    separators: tuple[str, str] | None = None,
) -> str:
    """Return `value` as JSON text, as the standard library's `json.dumps` does.

    Raises:
        TypeError: JSON cannot represent the value.
        ValueError: The value contains NaN or infinity, and `allow_nan` is false.
    """
    if indent is None and separators is None and ensure_ascii and allow_nan and not sort_keys:
        return str(_PLAIN.encode(value))
    text: str = _Encoder(
        indent=indent,
        sort_keys=sort_keys,
        ensure_ascii=ensure_ascii,
        allow_nan=allow_nan,
        separators=separators,
    ).encode(value)
    return text


def parse_json(text: str | bytes | bytearray) -> Any:
    """Return the value of JSON text.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply for Python.
    """
    try:
        if not isinstance(text, str):
            text = text.decode(detect_encoding(text), "surrogatepass")
        elif text.startswith("\ufeff"):
            raise JSONDecodeError("Unexpected UTF-8 BOM (decode using utf-8-sig)", text, 0)
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_flat(value: object, levels: int = MAX_NESTING) -> bool:
    """Return whether lists and objects are nested at most `levels` deep, including the value."""
    if not isinstance(value, list | dict):
        return True
    within = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(is_flat(one, levels - 1) for one in within)


def canonical(value: Any) -> str:
    """Return a text that is equal for equal JSON values. true differs from 1, nan equals nan."""
    return dump_json(value, sort_keys=True)
