"""JSON that others may have written or damaged, and JSON to compare values by."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Raises ValueError for whatever is no JSON, or is nested beyond what Python can follow."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def canonical(value: Any) -> str:
    """The same for values that JSON writes alike: true is not 1 here, and nan is nan."""
    return json.dumps(value, sort_keys=True)
