from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.runs.observe.trace import TraceBatch, Tracer, unix_clock
from rlsys.runs.observe.trace_file import TraceFile
from tests.errors import invalid

ORIGIN_NS = 1_800_000_000_000_000_000


class FakeClock:
    """Unix nanoseconds that advance only by `advance`."""

    def __init__(self) -> None:
        self.now_ns = ORIGIN_NS

    def __call__(self) -> int:
        return self.now_ns


def load(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def of_phase(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


def busy_tracer(clock: FakeClock, process: str) -> Tracer:
    """One event of every kind; the span from 1.5 µs to 4 µs."""
    tracer = Tracer(process, clock=clock)
    clock.now_ns += 1500
    with tracer.span("train", "micro-batch", tokens=512):
        tracer.arrow_in("train", "group", 7)
        clock.now_ns += 2500
    tracer.counter("queue/score", 3)
    tracer.begin("group", 7, prompt=4)
    tracer.end("group", 7)
    tracer.instant("train", "checkpoint")
    tracer.arrow_out("train", "group", 8)
    return tracer


def test_the_file_has_the_trace_event_format(tmp_path: Path) -> None:
    clock = FakeClock()
    file = TraceFile(tmp_path / "trace.json", clock=clock)
    file.write(busy_tracer(clock, "trainer 0").drain())
    file.close()
    events = load(tmp_path / "trace.json")

    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in of_phase(events, "M")}
    assert names["process_name", 1, 0] == {"name": "trainer 0"}
    assert names["thread_name", 1, 1] == {"name": "train"}
    assert names["origin", 0, 0] == {"unix_ns": ORIGIN_NS}
    # https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    assert [e for e in events if e["ph"] != "M"] == [
        {"ph": "f", "name": "group", "ts": 1.5, "pid": 1, "tid": 1}
        | {"cat": "rlsys", "id": 7, "bp": "e"},
        {"ph": "X", "name": "micro-batch", "ts": 1.5, "dur": 2.5, "pid": 1, "tid": 1}
        | {"args": {"tokens": 512}},
        {"ph": "C", "name": "queue/score", "ts": 4.0, "pid": 1, "tid": 0, "args": {"value": 3}},
        {"ph": "b", "name": "group", "ts": 4.0, "pid": 1, "tid": 0}
        | {"cat": "rlsys", "id": 7, "args": {"prompt": 4}},
        {"ph": "e", "name": "group", "ts": 4.0, "pid": 1, "tid": 0, "cat": "rlsys", "id": 7},
        {"ph": "i", "name": "checkpoint", "ts": 4.0, "pid": 1, "tid": 1, "s": "t"},
        {"ph": "s", "name": "group", "ts": 4.0, "pid": 1, "tid": 1, "cat": "rlsys", "id": 8},
    ]


def test_processes_and_tracks_are_named_once_and_kept_apart(tmp_path: Path) -> None:
    clock = FakeClock()
    file = TraceFile(tmp_path / "trace.json", clock=clock)
    tracers = [Tracer(f"rollout {i}", clock=clock) for i in range(2)]
    for _ in range(3):
        for tracer in tracers:
            for track in ("generate", "weights"):
                with tracer.span(track, "work"):
                    clock.now_ns += 1000
            file.write(tracer.drain())
    file.close()
    events = load(tmp_path / "trace.json")
    assert len(of_phase(events, "M")) == 1 + 2 + 4
    assert len(of_phase(events, "X")) == 12
    tracks = {(e["pid"], e["tid"]) for e in of_phase(events, "X")}
    assert tracks == {(e["pid"], e["tid"]) for e in of_phase(events, "M") if e["tid"]}


def test_the_file_is_complete_after_every_batch(tmp_path: Path) -> None:
    clock = FakeClock()
    path = tmp_path / "trace.json"
    file = TraceFile(path, clock=clock)
    for count in range(1, 4):
        file.write(busy_tracer(clock, "trainer 0").drain())
        assert len(of_phase(load(path), "X")) == count
    file.write(TraceBatch("trainer 0", [], 0))
    assert len(of_phase(load(path), "X")) == 3


@given(torn_bytes=st.integers(0, 1200))
def test_a_resumed_run_continues_a_file_that_a_crash_tore(
    tmp_path_factory: pytest.TempPathFactory, torn_bytes: int
) -> None:
    clock = FakeClock()
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    file = TraceFile(path, clock=clock)
    file.write(busy_tracer(clock, "trainer 0").drain())
    file.close()
    before = load(path)
    content = path.read_bytes()
    torn = content[: max(0, len(content) - torn_bytes)]
    path.write_bytes(torn)

    clock.now_ns += 10**9
    resumed = TraceFile(path, clock=clock)
    load(path)  # whole again before anything is added
    resumed.write(busy_tracer(clock, "trainer 0").drain())
    resumed.close()
    events = load(path)
    num_kept = torn.count(b"},\n") + torn.count(b"}\n")  # whole lines
    assert events[:num_kept] == before[:num_kept]
    new = [event for event in events[num_kept:] if event["ph"] != "M"]
    assert [event["ph"] for event in new] == ["f", "X", "C", "b", "e", "i", "s"]
    assert new[1]["ts"] == (1_000_005.5 if num_kept else 1.5)  # since the first run's beginning
    spans = of_phase(events, "X")
    named = [(e["name"], e["pid"], e["tid"]) for e in of_phase(events, "M")]
    assert sorted(named) == [("origin", 0, 0), ("process_name", 1, 0), ("thread_name", 1, 1)]
    assert {(e["pid"], e["tid"]) for e in spans} == {(1, 1)}


@pytest.mark.parametrize(
    ("former", "edited"),
    [
        (b',"args":{"unix_ns"', b',"others":{"unix_ns"'),
        (b'{"unix_ns":18', b'{"unix_ns":1e999,"":18'),
        (b'"trainer 0"', b'["trainer 0"]'),
        (b'"trainer 0"', b'"trainer \xff"'),
        (b'"trainer 0"', b"[" * 5000),
    ],
)
def test_a_file_that_was_edited_is_refused_as_it_is(
    tmp_path: Path, former: bytes, edited: bytes
) -> None:
    clock = FakeClock()
    path = tmp_path / "trace.json"
    file = TraceFile(path, clock=clock)
    file.write(busy_tracer(clock, "trainer 0").drain())
    file.close()
    content = path.read_bytes().replace(former, edited)
    path.write_bytes(content)
    with invalid(str(path)):
        TraceFile(path, clock=clock)
    assert path.read_bytes() == content


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace.json")
    with invalid(str(tmp_path / "trace.json")):
        TraceFile(tmp_path / "trace.json")


def test_the_file_stays_under_its_bound_and_marks_missing_events(tmp_path: Path) -> None:
    clock = FakeClock()
    path = tmp_path / "trace.json"
    file = TraceFile(path, clock=clock, max_bytes=8000)
    for _ in range(50):
        file.write(busy_tracer(clock, "trainer 0").drain())
        assert path.stat().st_size <= 8000
    file.close()
    events = load(path)
    written = [event for event in events if event["ph"] != "M"]
    assert "full (8000 bytes)" in written[-1]["name"]
    assert len(written) - 1 + file.num_lost == 50 * 7
    assert file.num_lost > 100

    for _ in range(20):  # resumed again and again
        resumed = TraceFile(path, clock=clock, max_bytes=8000)
        resumed.write(busy_tracer(clock, "trainer 0").drain())
        resumed.close()
        assert path.stat().st_size <= 8000
        assert load(path)[: len(events)] == events


def test_work_and_wait_times_add_up() -> None:
    clock = FakeClock()
    tracer = Tracer("trainer 0", clock=clock, max_pending=0)
    clock.now_ns += 1_000_000_000
    tracer.job_begins()
    clock.now_ns += 2_000_000_000
    with tracer.working("train", "micro-batch"):  # concurrent with the first job: counts once
        clock.now_ns += 3_000_000_000
    tracer.job_ends()
    clock.now_ns += 4_000_000_000
    report = tracer.drain()
    assert (report.work_s, report.wait_s) == (5.0, 5.0)

    tracer.job_begins()
    clock.now_ns += 6_000_000_000
    report = tracer.drain()  # in the middle of a job
    assert (report.work_s, report.wait_s) == (6.0, 0.0)
    clock.now_ns += 7_000_000_000
    tracer.job_ends()
    assert tracer.drain().work_s == 7.0


def test_the_cpu_time_of_a_process_counts_once() -> None:
    cpu = iter([10.0, 10.5, 12.0])
    tracer = Tracer("rollout 0", clock=FakeClock(), cpu_clock=lambda: next(cpu))
    further = tracer.of("rollout 1")
    assert [tracer.drain().cpu_s for _ in range(2)] == [0.5, 1.5]
    assert further.drain().cpu_s == 0.0


def test_a_tracer_takes_the_clock_of_where_it_arrives() -> None:
    tracer = Tracer("rollout 0", clock=FakeClock(), max_pending=3)
    tracer.instant("generate", "token")
    arrived = pickle.loads(pickle.dumps(tracer))
    before_ns = time.time_ns()
    for _ in range(5):
        arrived.instant("generate", "token")
    batch = arrived.drain()
    assert (batch.process, len(batch.events), batch.num_lost) == ("rollout 0", 3, 2)
    assert abs(batch.events[0][3] - before_ns) < 60e9


def test_a_tracer_that_is_never_drained_stays_bounded(tmp_path: Path) -> None:
    tracer = Tracer("rollout 0", max_pending=3)
    for _ in range(5):
        tracer.instant("generate", "token")
    batch = tracer.drain()
    assert (len(batch.events), batch.num_lost) == (3, 2)
    assert tracer.drain().events == []
    file = TraceFile(tmp_path / "trace.json")
    file.write(batch)
    assert file.num_lost == 2


def test_a_span_that_raises_is_recorded() -> None:
    clock = FakeClock()
    tracer = Tracer("reward 0", clock=clock)

    def fail() -> None:
        with tracer.span("score", "reward"):
            clock.now_ns += 5
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [event[4] for event in tracer.drain().events] == [5]


def test_numbers_that_are_not_json_are_refused(tmp_path: Path) -> None:
    tracer = Tracer("controller")
    tracer.counter("queue/score", float("nan"))
    file = TraceFile(tmp_path / "trace.json")
    with pytest.raises(ValueError):  # noqa: PT011 - json has no type for it
        file.write(tracer.drain())
    assert len(load(tmp_path / "trace.json")) == 1


def _answer_with_a_span(connection: Connection) -> None:
    tracer = Tracer("rollout 0")
    connection.send("ready")
    connection.recv()
    with tracer.span("generate", "inner"):
        pass
    connection.send(tracer.drain())


@pytest.fixture
def child() -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_answer_with_a_span, args=(there,))
    process.start()
    yield here
    process.join(timeout=300)
    assert process.exitcode == 0


def test_two_processes_agree_on_the_time(child: Connection) -> None:
    assert child.poll(60)
    child.recv()
    tracer = Tracer("controller")
    with tracer.span("calls", "outer"):
        child.send("go")
        assert child.poll(60)
        batch: TraceBatch = child.recv()
    ((_, _, _, outer_ns, outer_long, _),) = tracer.drain().events
    ((_, name, _, inner_ns, inner_long, _),) = batch.events
    assert name == "inner"
    slack_ns = 50_000  # reading two clocks is not atomic
    assert outer_ns - slack_ns <= inner_ns
    assert inner_ns + inner_long <= outer_ns + outer_long + slack_ns


def test_the_clock_tells_unix_time() -> None:
    clock = unix_clock()
    differences = [abs(clock() - time.time_ns()) for _ in range(9)]
    assert min(differences) < 1_000_000


def test_a_span_costs_microseconds() -> None:
    costs_us = []
    for _ in range(20):
        tracer = Tracer("rollout 0")
        start = time.perf_counter()
        for tokens in range(2000):
            with tracer.span("generate", "decode", tokens=tokens):
                pass
        costs_us.append((time.perf_counter() - start) / 2000 * 1e6)
    # About one on an idle machine; the smallest of several has least of a machine's other work.
    assert min(costs_us) < 20, statistics.median(costs_us)
