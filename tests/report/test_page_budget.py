"""The size of a page: below 5 MB, whatever a run has recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.report.page import page_html, size_in_page
from rlsys.report.page_budget import Keep, rows_within, shortened
from rlsys.report.report_model import RunReader, page_model
from rlsys.report.rollout_choice import RolloutIndex
from rlsys.report.timeline import MAX_LANES, MAX_SPANS, TraceReader
from rlsys.runs.run_outcome import write_outcome
from tests.report.synthetic_runs import SyntheticRun, write_run

MAX_BYTES = 5_000_000
LONG = "x" * 600


def append(path: Path, *values: Any) -> None:
    with path.open("a") as file:
        file.writelines(dump_json(value) + "\n" for value in values)


def many_events(path: Path) -> None:
    event = {"ph": "i", "name": "replica died", "pid": 1, "tid": 1}
    events = [{**event, "ts": i * 1e6, "args": {"reason": f"{i}" + LONG}} for i in range(10_000)]
    text = ",\n".join(map(dump_json, events))
    (path / "trace.json").write_text(f"[\n{text}\n]\n")


def long_configuration(path: Path) -> None:
    entry = parse_json((path / "config.json").read_bytes())
    entry["config"]["own"] = {f"key-{i}": f"{i}" + LONG for i in range(10_000)}
    (path / "config.json").write_text(dump_json(entry))


def long_value(path: Path) -> None:
    entry = parse_json((path / "config.json").read_bytes())
    entry["config"]["own"] = "x" * 6_000_000
    entry["git_revision"] = "x" * 6_000_000
    (path / "config.json").write_text(dump_json(entry))


def many_evaluations(path: Path) -> None:
    scores = {f"eval/{LONG}-{i}": i + 0.123456 for i in range(50)}
    append(path / "evaluations.jsonl", *({"step": step, **scores} for step in range(200)))


def many_scores(path: Path) -> None:
    append(
        path / "evaluations.jsonl", {"step": 1, **{f"eval/mean@{i}": 0.5 for i in range(20_000)}}
    )


def long_metric_names(path: Path) -> None:
    append(path / "metrics.jsonl", {"step": 61, **{f"{i:06000d}": 0.5 for i in range(1000)}})


def many_actors(path: Path) -> None:
    work = {f"time/work_s/rollout-{i}{LONG}": 1.5 for i in range(9_000)}
    append(path / "metrics.jsonl", {"step": 61, **work})


def many_reasons(path: Path) -> None:
    issued = {"event": "issued", "prompt": 1, "version": 60}
    dropped = {"event": "dropped"}
    groups = range(10_000, 20_000)
    append(path / "ledger.jsonl", *({**issued, "group": i} for i in groups))
    append(
        path / "ledger.jsonl",
        *({**dropped, "group": i, "reason": f"refused {i}" + LONG} for i in groups),
    )


def large_group(path: Path) -> None:
    record = parse_json((path / "rollouts.jsonl").read_text().splitlines()[0])
    record |= {"completion": "word " * 2000, "step": 61, "group_id": 999}
    append(path / "rollouts.jsonl", *({**record, "index": i} for i in range(500)))


def markup(path: Path) -> None:
    """Each `<` takes six bytes in the page."""
    record = parse_json((path / "rollouts.jsonl").read_text().splitlines()[0])
    record |= {"completion": "<" * 6000}
    groups = range(1000, 1400)
    append(path / "rollouts.jsonl", *({**record, "step": 61, "group_id": i} for i in groups))


def long_reason(path: Path) -> None:
    write_outcome(path / "outcome.json", "failed", reason="x" * 6_000_000)


def damage(path: Path) -> None:
    (path / "metrics.jsonl").write_text(f'{{"step": "{"x" * 6_000_000}"}}\n')


@pytest.mark.parametrize(
    ("make", "notes"),
    [
        (many_events, 1),
        (long_configuration, 1),
        (long_value, 0),
        (many_evaluations, 1),
        (many_scores, 1),
        (long_metric_names, 1),
        (many_actors, 2),  # the table of the actors and the curves
        (many_reasons, 1),
        (large_group, 1),
        (markup, 1),
        (long_reason, 0),
        (damage, 0),
    ],
)
def test_no_part_of_a_run_makes_a_large_page(
    make: Callable[[Path], None], notes: int, tmp_path: Path
) -> None:
    path = write_run(tmp_path / "run")
    make(path)
    model = page_model([RunReader(path)], now_s=0.0, live=False)
    assert len(page_html(model, live=False).encode()) <= MAX_BYTES
    assert len(model["runs"][0]["left_out"]) == notes


def test_many_lanes_share_the_spans(tmp_path: Path) -> None:
    trace = TraceReader()
    for lane in range(250):
        args = {"name": f"actor-{lane:03}"}
        trace.accept({"ph": "M", "name": "process_name", "pid": lane, "tid": 1, "args": args}, 0)
        for i in range(100):
            span = {"ph": "X", "name": "work", "ts": 1e6 * i, "dur": 5e5, "pid": lane, "tid": 1}
            trace.accept(span, 0)
    shown = trace.lanes()
    assert len(shown["lanes"]) == MAX_LANES
    assert shown["left_out"] == 50
    assert sum(len(lane["spans"]) for lane in shown["lanes"]) <= MAX_SPANS


def test_the_first_fields_of_a_long_configuration_are_those_that_were_changed(
    tmp_path: Path,
) -> None:
    path = write_run(tmp_path / "run", SyntheticRun(changes={"group_size": 7}))
    entry = parse_json((path / "config.json").read_bytes())
    entry["config"] |= {f"zz-{i}": LONG for i in range(1000)}
    (path / "config.json").write_text(dump_json(entry))
    rows = RunReader(path).read()["config"]
    assert {"field": "group_size", "value": "7", "default": "8", "changed": True} in rows


def test_rollouts_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    index = RolloutIndex(path)
    with path.open("w") as file:
        for _ in range(10):
            index.accept({"step": 1, "group_id": 0}, file.tell())
            file.write(dump_json({"step": 1, "group_id": 0, "completion": "x" * 1000}) + "\n")
    (group,) = index.choose({}, max_bytes=5000)
    assert len(group["rollouts"]) + group["num_hidden"] == 10
    assert 2 <= len(group["rollouts"]) <= 4
    (group,) = index.choose({}, max_bytes=50_000)
    assert "num_hidden" not in group


@given(
    st.lists(st.text(max_size=20), max_size=30),
    st.integers(0, 400),
    st.sampled_from(["first", "last", "ends", "spread"]),
)
@settings(max_examples=50)
def test_rows_keep_their_order_and_fit(rows: list[str], num_bytes: int, keep: Keep) -> None:
    numbered = [*enumerate(rows)]
    kept = rows_within(numbered, num_bytes, keep)
    assert kept == sorted(kept)
    assert len(set(kept)) == len(kept)
    assert set(kept) <= set(numbered)
    size = sum(map(size_in_page, kept))
    assert size <= num_bytes or len(kept) == 1
    assert bool(kept) == bool(rows)


@pytest.mark.parametrize(
    ("keep", "expected"),
    [("first", [0, 1]), ("last", [8, 9]), ("ends", [0, 9]), ("spread", [0, 9])],
)
def test_which_rows_remain(keep: Keep, expected: list[int]) -> None:
    assert rows_within([*range(10)], 4, keep) == expected


def test_short_values_are_unchanged() -> None:
    value = {"a": [1, 2.5, None, True, {"b": "x" * 2000}], "c": "y"}
    assert shortened(value) == value
    assert len(shortened({"x" * 10_000: "y" * 10_000}).popitem()[1]) < 2100
