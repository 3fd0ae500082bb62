"""JSON that others may have written or damaged, and JSON to compare values by."""

from __future__ import annotations

import json
from typing import Any

# Lists and objects within each other in a prompt or a row; Python follows a thousand, at most.
MAX_NESTING = 50


def parse_json(text: str | bytes) -> Any:
    """Raises ValueError for whatever is no JSON, or is nested beyond what Python can follow."""
    try:
        return json.loads(text)
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
    return json.dumps(value, sort_keys=True)
