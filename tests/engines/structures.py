"""What the tests of constrained decoding share: structures, and the tokens that one forces."""

from __future__ import annotations

import json
from typing import Any

PROMPT = tuple(range(10, 20))

# Most tokens have no alternative: the key, the quotes, the end.
CHOICE = {"type": "regex", "pattern": r'\{"choice":"(yes|no|never)"\}'}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


def structure(format: Any) -> str:
    """Return a structural tag."""
    return json.dumps({"type": "structural_tag", "format": format})


def json_structure(schema: Any) -> str:
    return structure({"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1})
