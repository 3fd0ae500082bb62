"""Limits of the tables of a page, so that it stays below 5 MB whatever a run has recorded.

    model of a run ── within_budget ──► the same model with shorter tables and texts, and notes

Curves, groups and the timeline have limits of their own (report_model.py, rollout_choice.py,
timeline.py), because they choose what to show. Here are the limits of everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlsys.report.page import size_in_page
from rlsys.report.rollout_choice import cut, spread

Keep = Literal["first", "last", "ends", "spread"]

MAX_CELL = 2_000  # characters of a text in a table
MAX_REASON = 20_000  # characters of the message that ended a run


@dataclass(frozen=True, kw_only=True)
class TableLimit:
    """Limit of one table.

    Attributes:
        path: Keys of the table in the model of a run.
        title: Name of its rows in the note.
        num_bytes: JSON of all runs of a page.
        keep: Which rows remain: the first, the last, those at both ends, or evenly spread ones.
        source: Where all rows are.
        total: Key of the number of all rows, if the model does not have all of them.
    """

    path: tuple[str, ...]
    title: str
    num_bytes: int
    keep: Keep
    source: str
    total: str = ""


TABLE_LIMITS = (
    TableLimit(
        path=("events",), title="events", num_bytes=200_000, keep="ends", source="trace.json"
    ),
    TableLimit(
        path=("config",),
        title="fields of the configuration",
        num_bytes=300_000,
        keep="first",
        source="config.json",
    ),
    TableLimit(
        path=("evaluations",),
        title="evaluations",
        num_bytes=300_000,
        keep="spread",
        source="evaluations.jsonl",
    ),
    TableLimit(
        path=("dropped",),
        title="dropped groups",
        num_bytes=100_000,
        keep="last",
        source="ledger.jsonl",
        total="num_dropped",
    ),
    TableLimit(
        path=("shares", "actors"),
        title="actors",
        num_bytes=100_000,
        keep="first",
        source="metrics.jsonl",
    ),
    TableLimit(
        path=("shares", "stages"),
        title="reasons to wait",
        num_bytes=50_000,
        keep="first",
        source="metrics.jsonl",
    ),
    TableLimit(
        path=("facts",), title="facts", num_bytes=20_000, keep="first", source="evaluations.jsonl"
    ),
    TableLimit(
        path=("damages",),
        title="damaged lines",
        num_bytes=50_000,
        keep="first",
        source="the run directory",
    ),
)
DIFFERENCES_BYTES = 200_000  # of the table that compares the runs of a page
LOSSES_PER_STAGE = 20  # reasons of a drop that the funnel shows
MAX_STALENESS_BARS = 200


def within_budget(run: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Return the model of a run with tables within their limits. `left_out` gets a note for each.

    Args:
        run: Model of a run.
        share: Part of the limits that this run may use.
    """
    limited = {name: shortened(value) for name, value in run.items() if name not in _OWN_LIMITS}
    limited = {name: limited.get(name, run[name]) for name in run}
    notes = list(run["left_out"])
    for one in TABLE_LIMITS:
        *sections, name = one.path
        parent = limited
        for section in sections:
            parent[section] = dict(parent[section])
            parent = parent[section]
        rows = parent[name]
        parent[name] = kept = rows_within(rows, int(one.num_bytes * share), one.keep)
        total = run[one.total] if one.total else len(rows)
        if len(kept) < total:
            notes.append(
                f"{len(kept):,} of {total:,} {one.title} are shown. {one.source} has all of them."
            )
    limited["state"] = {**run["state"], "reason": cut(run["state"]["reason"], MAX_REASON)}
    limited["funnel"] = _funnel(limited["funnel"])
    limited["staleness"] = _staleness(limited["staleness"])
    return {**limited, "left_out": notes}


_OWN_LIMITS = ("curves", "groups", "timeline", "forecast", "left_out", "path")


def rows_within(rows: Sequence[Any], num_bytes: int, keep: Keep) -> list[Any]:
    """Return the rows whose JSON fits into `num_bytes`, in their order; at least one."""
    left = num_bytes
    chosen: list[int] = []
    for place in _preferred(len(rows), keep):
        left -= size_in_page(rows[place]) + 1
        if left < 0 and chosen:
            break
        chosen.append(place)
    return [rows[place] for place in sorted(chosen)]


def shortened(value: Any) -> Any:
    """Return a copy of JSON in which long texts are cut in the middle, keys included."""
    if isinstance(value, str):
        return cut(value, MAX_CELL)
    if isinstance(value, Mapping):
        return {shortened(name): shortened(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(one) for one in value]
    return value


def _preferred(count: int, keep: Keep) -> Sequence[int]:
    """Return the places of the rows, those to keep first."""
    match keep:
        case "first":
            return range(count)
        case "last":
            return range(count - 1, -1, -1)
        case "spread":
            return [*spread(count)]
        case "ends":
            return [place for i in range(count) for place in _both_ends(i, count)]


def _both_ends(i: int, count: int) -> list[int]:
    """Return place i from the start and from the end, each place of a table once."""
    last = count - 1 - i
    return [] if i > last else [i] if i == last else [i, last]


def _funnel(funnel: Mapping[str, Any]) -> dict[str, Any]:
    """Return the funnel with the most frequent reasons of each stage; the others are one number."""
    stages = []
    for stage in funnel["stages"]:
        reasons = list(stage["lost"].items())
        rest = sum(count for _, count in reasons[LOSSES_PER_STAGE:])
        lost = dict(reasons[:LOSSES_PER_STAGE]) | ({"other reasons": rest} if rest else {})
        stages.append({**stage, "lost": lost})
    return {**funnel, "stages": stages}


def _staleness(staleness: Mapping[str, Any]) -> dict[str, Any]:
    """Return the histogram without the rarest values, if there are very many."""
    groups: Mapping[int, int] = staleness["groups"]
    if len(groups) > MAX_STALENESS_BARS:
        frequent = sorted(groups, key=lambda value: -groups[value])[:MAX_STALENESS_BARS]
        groups = {value: groups[value] for value in sorted(frequent)}
    return {**staleness, "groups": groups}
