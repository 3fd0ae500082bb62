"""Readers and analyses of the report page, each by hand-computed examples and properties."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.common.safe_json import dump_json
from rlsys.dataflow.scheduling.ledger import Ledger
from rlsys.report import write_report
from rlsys.report.curve_sampling import (
    buckets,
    reward_bands,
    rounded,
    sample_curve,
    sample_curves,
    smoothed,
)
from rlsys.report.damaged_lines import LineFile
from rlsys.report.event_rows import event_rows
from rlsys.report.ledger_funnel import LedgerReader
from rlsys.report.rollout_choice import RolloutIndex, cut, spread
from rlsys.report.timeline import DETAILED, TraceReader
from rlsys.report.token_texts import token_texts
from rlsys.runs.observe.trace import TraceBatch, Tracer
from rlsys.runs.observe.trace_file import TraceFile
from tests.errors import invalid
from tests.report.synthetic_runs import write_run


class Reader:
    """A LineFile with what it has read."""

    def __init__(self, path: Path, *, in_array: bool = False) -> None:
        self.values: list[Any] = []
        self.offsets: list[int] = []
        self.file = LineFile(path, self._accept, self._restart, in_array=in_array)

    def _accept(self, value: Any, offset: int) -> None:
        self.values.append(value["x"])
        self.offsets.append(offset)

    def _restart(self) -> None:
        self.values, self.offsets = [], []


def test_lines_are_read_once_as_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    reader = Reader(path)
    reader.file.read()
    assert reader.values == []
    path.write_text('{"x": 1}\n{"x": 2}\n{"x"')
    reader.file.read()
    assert reader.values == [1, 2]
    with path.open("a") as file:
        file.write(': 3}\n{"x": 4}\n')
    reader.file.read()
    assert reader.values == [1, 2, 3, 4]
    assert path.read_bytes()[reader.offsets[2] :].startswith(b'{"x": 3}\n')
    assert (reader.file.num_damaged, reader.file.num_lines) == (0, 4)


def test_a_file_that_was_cut_and_continued_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    reader = Reader(path)
    path.write_text('{"x": 1}\n{"x": 2}\n{"x": 3}\n')
    reader.file.read()
    path.write_text('{"x": 1}\n{"x": 7}\n{"x": 8}\n{"x": 9}\n')  # longer than what was read
    reader.file.read()
    assert reader.values == [1, 7, 8, 9]
    path.write_text('{"x": 1}\n')
    reader.file.read()
    assert reader.values == [1]
    path.unlink()
    reader.file.read()
    assert reader.values == []


def test_damaged_lines_are_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"x": 1}\nnot json\n{"y": 2}\n\xff\xfe\n[1]\n{"x": 3}\n')
    reader = Reader(path)
    reader.file.read()
    assert reader.values == [1, 3]
    assert reader.file.num_damaged == 4
    assert [(one.file, one.line) for one in reader.file.damages] == [
        ("lines", i) for i in (2, 3, 4, 5)
    ]
    reader.file.read()
    assert reader.file.num_damaged == 4


def test_a_directory_in_place_of_a_file_is_damage(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.file.read()
    assert reader.file.num_damaged == 1


@given(st.lists(st.integers(0, 3), max_size=8))
def test_a_growing_trace_is_read_once(batches: list[int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        file = TraceFile(path, clock=lambda: 0)
        trace = TraceReader()
        restarts: list[int] = []

        def restart() -> None:
            restarts.append(1)
            trace.restart()

        reader = LineFile(path, trace.accept, restart, in_array=True)
        written = 0
        for count in batches:
            tracer = Tracer("trainer-0", clock=lambda: 0)
            for _ in range(count):
                tracer.add_span("trainer", "accumulate", written * 10**9, written * 10**9 + 10**8)
                written += 1
            file.write(tracer.drain())
            reader.read()
            assert trace.lanes()["num_spans"] == written
        assert (restarts, reader.num_damaged) == ([], 0)
        file.close()


def ledger_of(*calls: tuple[str, dict[str, Any]]) -> LedgerReader:
    reader = LedgerReader()
    ledger = Ledger(lambda event: reader.accept(event, 0), groups_per_step=2)
    for name, arguments in calls:
        getattr(ledger, name)(**arguments)
    return reader


def test_the_funnel_adds_up() -> None:
    issued = [("issue", {"group_id": i, "prompt_index": i, "version": 0}) for i in range(8)]
    reader = ledger_of(
        *issued,
        ("drop", {"group_id": 0, "reason": "stale"}),
        ("drop", {"group_id": 1, "reason": "reward timeout"}),
        ("drop", {"group_id": 2, "reason": "refused"}),
        ("train", {"oldest_versions": {3: 0, 4: 0}, "step": 1}),
        ("reissue", {"group_id": 7, "version": 0}),
        ("train", {"oldest_versions": {5: 0, 6: 1}, "step": 2}),
        ("issue", {"group_id": 8, "prompt_index": 8, "version": 2}),
        ("drop", {"group_id": 8, "reason": "environment timeout"}),
    )
    funnel = reader.funnel()
    assert [(s["name"], s["groups"], s["lost"]) for s in funnel["stages"]] == [
        ("issued", 9, {"environment timeout": 1, "stale": 1}),
        ("sampled", 6, {"reward timeout": 1}),
        ("scored", 5, {"refused": 1}),
        ("trained", 4, {}),
    ]
    assert (funnel["open"], funnel["reissued"]) == (1, 1)
    assert reader.staleness() == {0: 3, 1: 1}
    assert [(one.group, one.reason, one.step) for one in reader.dropped] == [
        (0, "stale", 0),
        (1, "reward timeout", 0),
        (2, "refused", 0),
        (8, "environment timeout", 2),
    ]


def test_a_resume_takes_back_later_steps() -> None:
    issued = [("issue", {"group_id": i, "prompt_index": i, "version": 0}) for i in range(4)]
    reader = ledger_of(
        *issued,
        ("train", {"oldest_versions": {0: 0, 1: 0}, "step": 1}),
        ("train", {"oldest_versions": {2: 0, 3: 0}, "step": 2}),
        ("resume", {"step": 1}),
    )
    assert reader.funnel()["stages"][-1]["groups"] == 2
    assert (reader.funnel()["open"], reader.resumes, reader.staleness()) == (2, [1], {0: 2})


def test_an_event_of_another_kind_is_damage() -> None:
    for event in ({"event": "lost"}, {"event": "issued"}, 3, None):
        with pytest.raises(ValueError):  # noqa: PT011 - the type is the contract of LineFile
            LedgerReader().accept(event, 0)


VALUES = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=300)


@given(VALUES, st.integers(2, 50))
def test_a_sampled_curve_keeps_its_extremes(values: list[float | None], most: int) -> None:
    ranges = buckets(len(values), most)
    points = sample_curve(values, ranges)
    assert len(points) <= max(most, 2)
    known = [value for value in values if value is not None]
    kept = [value for value in points if value is not None]
    if known:
        assert min(kept) == rounded(min(known))
        assert max(kept) == rounded(max(known))
    else:
        assert kept == []
    assert ranges[0][0] == 0
    assert ranges[-1][1] == len(values)


def test_values_keep_their_order_within_a_bucket() -> None:
    ranges = [(0, 3), (3, 6)]
    assert sample_curve([1, 5, 2, 9, 3, 4], ranges) == [1, 5, 9, 3]
    curves = sample_curves(
        [{"step": 10 + i, "a": float(i)} for i in range(6)] + [{"step": 20, "b": 7.0}], max_points=4
    )
    assert curves["steps"] == [10, 12, 13, 20]
    assert curves["series"] == {"a": [0, 2, 3, 5], "b": [None, None, 7, 7]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.23456789, 1.2346),
        (0, 0),
        (-0.0, 0),
        (math.nan, None),
        (math.inf, None),
        (123456.7, 123460.0),
    ],
)
def test_numbers_are_rounded_to_what_a_chart_shows(value: float, expected: float | None) -> None:
    assert rounded(value) == expected


def test_the_band_of_the_reward_by_hand() -> None:
    lines = [{"step": i, "reward/mean": 0.5, "reward/std": 0.4} for i in range(1, 5)]
    (band, *_) = reward_bands(lines, groups_per_step=16)
    assert band["page/reward"] == 0.5
    assert band["page/reward_high"] - 0.5 == pytest.approx(1.96 * 0.4 / 4)  # 16 groups of a step
    assert reward_bands([{"step": 1}], 4) == [{}]
    assert smoothed([1.0, None, 3.0, 5.0], 3) == [1.0, 2.0, 4.0, 4.0]


@given(st.integers(0, 200))
def test_groups_are_spread_over_the_run(count: int) -> None:
    order = list(spread(count))
    assert sorted(order) == list(range(count))
    assert order[:2] == [count - 1, 0][:count]


def write_rollouts(path: Path, num_groups: int, text: str = "x") -> RolloutIndex:
    index = RolloutIndex(path)
    offset = 0
    with path.open("wb") as file:
        for step in range(num_groups):
            for i in range(2):
                record = {"step": step, "group_id": step, "index": i, "completion": text}
                line = dump_json(record).encode() + b"\n"
                index.accept(record, offset)
                file.write(line)
                offset += len(line)
    return index


def test_a_larger_budget_only_adds_groups(tmp_path: Path) -> None:
    index = write_rollouts(tmp_path / "rollouts.jsonl", 50)
    chosen = [
        [group["step"] for group in index.choose({}, max_bytes=size)]
        for size in (2000, 8000, 10**6)
    ]
    assert chosen[0] == sorted(chosen[0])
    assert set(chosen[0]) < set(chosen[1]) < set(chosen[2]) == set(range(50))
    assert {0, 49} <= set(chosen[0])
    assert index.choose({}, max_bytes=2000) == index.choose({}, max_bytes=2000)
    assert len(index.choose({}, max_bytes=1)) == 1  # one group is always shown


def test_long_texts_are_cut_in_the_middle() -> None:
    text = "a" * 50 + "b" * 50
    assert cut(text, 100) == text
    short = cut(text, 20)
    assert short.startswith("a" * 10 + "\n")
    assert short.endswith("b" * 10)
    assert "80" in short


@pytest.mark.parametrize("record", [3, [], {}, {"step": 1}, {"step": "1", "group_id": 0}])
def test_a_record_without_its_place_is_damage(record: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the type is the contract of LineFile
        RolloutIndex(tmp_path).accept(record, 0)


def traced(*spans: tuple[float, float, str]) -> TraceReader:
    """A trace of one track, from (start, duration, name)."""
    trace = TraceReader()
    trace.accept({"ph": "M", "name": "origin", "pid": 0, "tid": 0, "args": {"unix_ns": 10**9}}, 0)
    for kind, args in (
        ("process_name", {"name": "controller"}),
        ("thread_name", {"name": "train"}),
    ):
        trace.accept({"ph": "M", "name": kind, "pid": 1, "tid": 1, "args": args}, 0)
    for start, duration, name in spans:
        event = {"ph": "X", "name": name, "ts": start * 1e6, "dur": duration * 1e6}
        trace.accept({**event, "pid": 1, "tid": 1}, 0)
    return trace


def test_spans_that_overlap_are_one() -> None:
    trace = traced((0, 2, "a"), (1, 2, "a"), (2.5, 1, "b"), (5, 1, "a"))
    (lane,) = trace.lanes()["lanes"]
    assert lane["spans"] == [[0, 3, 0, 2, 3], [2.5, 1, 1], [5, 1, 0]]
    assert (lane["process"], lane["track"]) == ("controller", "train")


def test_a_long_lane_is_merged_and_its_end_is_complete() -> None:
    count = 20_000
    trace = traced(*((i * 1.0, 0.5, "ab"[i % 2]) for i in range(count)))
    lanes = trace.lanes(max_spans=2000)
    (lane,) = lanes["lanes"]
    assert 500 <= len(lane["spans"]) <= 2000
    assert lanes["num_spans"] == count
    assert lanes["resolution"] > 0.5
    assert [span[0] for span in lane["spans"][-DETAILED:]] == [
        float(i) for i in range(count - DETAILED, count)
    ]
    assert sum(span[3] if len(span) > 3 else 1 for span in lane["spans"]) == count
    within = sum(span[4] if len(span) > 3 else span[1] for span in lane["spans"])
    assert within == pytest.approx(count * 0.5)


def test_events_have_their_cost() -> None:
    trace = traced((40.0, 16.0, "waits for restart"), (70, 2, "waits for checkpoint"))

    def mark(at_s: float, name: str, **args: Any) -> None:
        event = {"ph": "i", "name": name, "ts": at_s * 1e6, "pid": 1, "tid": 7, "args": args}
        trace.accept(event, 0)

    mark(10, "replica died", replica="rollout-0")
    mark(30, "replica joined", replica="rollout-0.1", version=3)
    mark(56, "trainer restarted", step=5, lost_steps=2)
    lines = [
        {"step": 7, "time/unix_s": 1000.0, "time/step_s": 2.0},
        {"step": 8, "time/unix_s": 1100.0, "time/step_s": 3.0},
    ]
    changes = [[{"field": "trainer.layout", "before": '"dp2"', "now": '"dp1"'}]]
    events = event_rows(trace, lines, resumes=[5, 7], changes=changes)
    found = {event["name"]: event["cost_s"] for event in events}
    assert found == {
        "replica died": 20.0,
        "replica joined": None,
        "trainer restarted": 16.0,
        "checkpoints": 2.0,
        "layout change": 97.0,  # 1100 - 3 - 1000
    }
    assert [e["unix_s"] for e in events] == sorted(e["unix_s"] for e in events)
    (resume,) = [event for event in events if event["name"] == "layout change"]
    assert "trainer.layout" in resume["detail"]


def test_texts_of_tokens(tmp_path: Path) -> None:
    tokenizer = {
        "model": {"vocab": {"Ġthe": 0, "Ã©": 1, "x": 2}},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [{"id": 3, "content": "<eos>"}],
    }
    (tmp_path / "tokenizer.json").write_text(dump_json(tokenizer))
    assert token_texts([tmp_path / "none", tmp_path]) == {0: " the", 1: "é", 2: "x", 3: "<eos>"}
    pieces = {"model": {"vocab": [["▁a", 0.0], ["b", -1.0]]}}
    (tmp_path / "tokenizer.json").write_text(dump_json(pieces))
    assert token_texts([tmp_path]) == {0: " a", 1: "b"}
    (tmp_path / "tokenizer.json").write_text("{")
    assert token_texts([tmp_path]) == {}


def test_the_trace_of_a_real_tracer_is_read(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json", clock=lambda: 5 * 10**9)
    now = iter(range(6 * 10**9, 10**12, 10**9))
    tracer = Tracer("reward-0", clock=lambda: next(now))
    tracer.begin("score", 1)
    tracer.begin("score", 2)
    tracer.end("score", 1)
    tracer.end("score", 2)
    batch = tracer.drain()
    file.write(TraceBatch(batch.process, batch.events, 0))
    file.close()
    trace = TraceReader()
    LineFile(tmp_path / "trace.json", trace.accept, trace.restart, in_array=True).read()
    (lane,) = trace.lanes()["lanes"]
    assert (lane["process"], lane["track"]) == ("reward-0", "score")
    (span,) = lane["spans"]
    assert span[1] == 3.0  # two overlapping spans of 2 s
    assert trace.origin_s == 5.0


@pytest.mark.parametrize("number", ["NaN", "1e400", "-Infinity", "1" + "0" * 400])
@pytest.mark.parametrize("file", ["metrics.jsonl", "rollouts.jsonl", "trace.json", "outcome.json"])
def test_no_number_prevents_the_page(tmp_path: Path, file: str, number: str) -> None:
    run = write_run(tmp_path / "run")
    path = run / file
    if path.is_file():
        path.write_text(
            re.sub(r"(?<=[:,\[ ])\d+\.?\d*(?=[,}\]])", number, path.read_text(), count=3)
        )
    page = write_report([run]).read_text()
    model = page.split('id="model">')[1].split("</script>")[0]
    json.loads(model, parse_constant=pytest.fail)


def test_a_page_replaces_no_device_and_no_record(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    before = (run / "metrics.jsonl").read_bytes()
    os.mkfifo(tmp_path / "pipe")
    for target in (run / "metrics.jsonl", tmp_path / "pipe", tmp_path):
        with invalid("output", str(target)):
            write_report([run], target)
    assert (run / "metrics.jsonl").read_bytes() == before
