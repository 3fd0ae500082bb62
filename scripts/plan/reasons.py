"""Known reasons why single published rows differ from their prediction."""

from __future__ import annotations

from scripts.plan.published_rows import Row

UNKNOWN = "not explained"

# By table; and by row where a row has a reason of its own.
_TABLES: dict[str, str] = {}
_ROWS: dict[str, str] = {}


def reason_of(row: Row) -> str:
    """Return why a row is hard to predict, as far as known."""
    return _ROWS.get(row["id"]) or _TABLES.get(row["table"]) or UNKNOWN
