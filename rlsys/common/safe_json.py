"""JSON for all of rlsys: writing, reading of text that may be damaged, and comparison.

User code and the libraries that it imports may replace `json.dumps` and `json.loads` for the whole
process; orjson's `dumps`, for example, returns bytes. The functions of this file call the standard
library's encoder and decoder as they were at import, so such a replacement does not change them,
nor does one of the methods of these classes. No other module
of rlsys or actors calls `json.dumps` or `json.loads`, except scripts that run in a process of their
own without the package.
"""

from __future__ import annotations

from json import JSONDecodeError, JSONDecoder, JSONEncoder, detect_encoding
from typing import Any

# Lists and objects within each other in a prompt or a row; Python follows a thousand, at most.
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

    Raises TypeError for a value that JSON cannot hold, and ValueError for NaN without `allow_nan`.
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

    Raises ValueError for text that is not JSON, or is nested beyond what Python can follow.
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
    """Whether no more lists and objects are within each other, itself included."""
    if not isinstance(value, list | dict):
        return True
    within = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(is_flat(one, levels - 1) for one in within)


def canonical(value: Any) -> str:
    """The same for values that JSON writes alike: true is not 1 here, and nan is nan."""
    return dump_json(value, sort_keys=True)
