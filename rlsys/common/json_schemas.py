"""JSON Schemas rewritten for xgrammar, so that each text of their grammar is JSON.

In: a schema. Out: a schema that xgrammar compiles correctly. rlsys.common.structural_tags applies
it to each `json_schema` format before a structure is compiled.

xgrammar 0.2 lets a string with `minLength` or `maxLength` contain raw control characters, which
JSON forbids. It expands a `pattern` as it is written if the pattern has a character outside
printable ASCII, so that `.` and `[^...]` match quotation marks. Its automaton for other patterns
cannot repeat a class more than about 128 times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Keywords whose values are not schemas; keywords whose values map names to schemas; keywords whose
# schemas describe the same value as their parent schema.
DATA = frozenset({"const", "default", "enum", "example", "examples", "required"})
NAMED = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"},
)
DEFINITIONS = frozenset({"$defs", "definitions"})
SAME_VALUE = frozenset({"allOf", "anyOf", "oneOf"})

# Characters that JSON allows in a string without an escape. The last one is not ASCII, so that
# xgrammar expands the repetition, which has no limit, instead of building an automaton.
UNESCAPED = "[ !#-\\[\\]-\U0010ffff]"

# xgrammar refuses greater lengths.
MAX_LENGTH = 2**31 - 1


def compilable(schema: Any, *, raw_levels: int = 0) -> Any:
    """Return the schema with lengths of strings as patterns, and patterns in printable ASCII.

    Strings of the outermost `raw_levels` levels are not written as JSON; their lengths are kept.
    """
    if isinstance(schema, list):
        return [compilable(one, raw_levels=raw_levels) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _keyword(key, value, raw_levels) for key, value in schema.items()}
    if isinstance(made.get("pattern"), str):
        made["pattern"] = _printable(made["pattern"])
    elif raw_levels == 0 and (repeat := _repeat(schema)):
        made.pop("minLength", None)
        made.pop("maxLength", None)
        made["pattern"] = f"^{UNESCAPED}{repeat}$"
    return made


def _keyword(key: str, value: Any, raw_levels: int) -> Any:
    if key in DATA:
        return value
    inner = max(raw_levels - 1, 0)
    if key in NAMED and isinstance(value, Mapping):
        inner = 0 if key in DEFINITIONS else inner
        names = (_printable(one) if key == "patternProperties" else one for one in value)
        return {
            name: compilable(one, raw_levels=inner)
            for name, one in zip(names, value.values(), strict=True)
        }
    return compilable(value, raw_levels=raw_levels if key in SAME_VALUE else inner)


def _repeat(schema: Mapping[str, Any]) -> str:
    """Return the repetition of a string's characters as in a pattern; "" for any length.

    Invalid lengths are left to xgrammar, whose error names them.
    """
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not _is_length(least) or not (most is None or _is_length(most)):
        return ""
    if most is None:
        return f"{{{least},}}" if least else ""
    return f"{{{least},{most}}}" if least <= most else ""


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_LENGTH


def _printable(pattern: str) -> str:
    """Return the pattern with characters outside printable ASCII as escapes."""
    return re.sub(r"\\[ -~]|\\?[^ -~]", _printable_one, pattern)


def _printable_one(match: re.Match[str]) -> str:
    last = match[0][-1]
    return match[0] if " " <= last <= "~" else f"\\u{{{ord(last):x}}}"
