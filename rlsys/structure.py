"""Structures that completions must have, as structural tags of xgrammar.

In: a format, which is plain data. Out: its structural tag, a text that travels with a request
(rlsys.types.SamplingParams.structure) and that both engines compile.

https://xgrammar.mlc.ai/docs/tutorials/structural_tag describes the formats. xgrammar is optional:
it is imported by `xgrammar_module` only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlsys.json_text import dump_json

Format = Mapping[str, Any]

# xgrammar begins its messages with a time and the place in its source.
SOURCE_PLACE = re.compile(r"^(\[[^\]]*\] )?\S+\.(cc|h):\d+: ")


def structural_tag(format: Format) -> str:
    """Return the structural tag of a format."""
    return dump_json({"type": "structural_tag", "format": format}, ensure_ascii=False)


def check_structure(structure: str) -> None:
    """Raise ValueError for a structural tag that cannot be compiled, or if xgrammar is missing."""
    xgrammar = xgrammar_module()
    try:
        xgrammar.Grammar.from_structural_tag(structure)
    except (RuntimeError, ValueError, TypeError) as error:  # of its own, or of pydantic
        reason = " ".join(SOURCE_PLACE.sub("", str(error).strip()).split())
        raise ValueError(reason or type(error).__name__) from error


def xgrammar_module() -> Any:
    """Import xgrammar. Raises ValueError if it is not installed."""
    try:
        import xgrammar
    except ImportError as error:
        raise ValueError(
            "structured output needs xgrammar, which is not installed. Install rlsys[structured]."
        ) from error
    return xgrammar
