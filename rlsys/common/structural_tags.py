"""Structures of completions as structural tags of xgrammar.

In: a format, which is plain data. Out: its structural tag, the text of
rlsys.types.SamplingParams.structure, which both engines compile.

https://xgrammar.mlc.ai/docs/tutorials/structural_tag describes the formats. xgrammar is optional:
it is imported by `xgrammar_module` only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlsys.common.json_schemas import compilable
from rlsys.common.safe_json import dump_json
from rlsys.errors import InvalidValue

Format = Mapping[str, Any]

# Levels that XML styles do not write as JSON: the arguments and their values.
XML_LEVELS = 2

# xgrammar starts its messages with a time and a line of its source.
SOURCE_PLACE = re.compile(r"^(\[[^\]]*\] )?\S+\.(cc|h):\d+: ")


def structural_tag(format: Format) -> str:
    """Return the structural tag of a format, with its schemas as xgrammar compiles them."""
    tag = {"type": "structural_tag", "format": _compilable(format)}
    return dump_json(tag, ensure_ascii=False)


def _compilable(format: Any) -> Any:
    """Return the format with each JSON Schema in it rewritten."""
    if isinstance(format, Mapping):
        made = {key: _compilable(value) for key, value in format.items() if key != "json_schema"}
        if "json_schema" in format:
            raw_levels = 0 if format.get("style", "json") == "json" else XML_LEVELS
            made["json_schema"] = compilable(format["json_schema"], raw_levels=raw_levels)
        return made
    return [_compilable(one) for one in format] if isinstance(format, list) else format


def check_structure(structure: str) -> None:
    """Check that a structural tag can be compiled.

    Raises:
        ValueError: xgrammar rejects the tag; the message is its reason.
        InvalidValue: xgrammar is not installed.
    """
    xgrammar = xgrammar_module()
    try:
        xgrammar.Grammar.from_structural_tag(structure)
    except (RuntimeError, ValueError, TypeError) as error:  # of xgrammar or pydantic
        reason = " ".join(SOURCE_PLACE.sub("", str(error).strip()).split())
        raise ValueError(reason or type(error).__name__) from error


def xgrammar_module() -> Any:
    """Import and return xgrammar.

    Raises:
        InvalidValue: It is not installed.
    """
    try:
        import xgrammar
    except ImportError as error:
        raise InvalidValue(
            "structured output",
            rule="needs xgrammar, which is not installed",
            fix="Install rlsys[structured].",
        ) from error
    return xgrammar
