"""Lanes of a run's timeline, with few enough spans for a page.

    trace.json ── every event ──► TraceReader ── lanes ──► spans of each actor's tracks

A lane with too many spans is shown at a coarser resolution: spans of one kind that are closer than
the resolution are merged into one, with the number of spans and the time within them.
Its last spans are kept as they are. Spans that overlap in a lane, such as the calls of
a reward worker, are merged where they overlap.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsys.runs.observe.trace import BEGIN, END, INSTANT, SPAN

MAX_SPANS = 12_000  # of a page
DETAILED = 300  # last spans of each lane, or fewer if there are many lanes
MAX_LANES = 200
MAX_KINDS = 1_000  # names of spans; more have one name in common
OTHER_KIND = "other"
MAX_NAME = 200  # characters of a process, a track or a kind
MERGED_LENGTH = 8  # of a merged span, in resolutions, so that a long run keeps its shape
RESOLUTIONS = 24  # each twice as coarse as the one before


@dataclass
class Track:
    """Spans of one track: start and duration in seconds, and the number of the kind."""

    starts: array[float] = field(default_factory=lambda: array("d"))
    durations: array[float] = field(default_factory=lambda: array("d"))
    kinds: array[int] = field(default_factory=lambda: array("H"))

    def add(self, start: float, duration: float, kind: int) -> None:
        """Append a span."""
        self.starts.append(start)
        self.durations.append(duration)
        self.kinds.append(kind)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point in time with a name and its details."""

    time_s: float
    process: str
    name: str
    details: Mapping[str, Any]


class TraceReader:
    """The events of a trace so far."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all events."""
        self.origin_s: float | None = None
        self._processes: dict[int, str] = {}
        self._threads: dict[int, str] = {}
        self._tracks: defaultdict[tuple[int, str], Track] = defaultdict(Track)
        self._kinds: dict[str, int] = {}
        self._begun: dict[tuple[int, str, object], float] = {}
        self.marks: list[Mark] = []
        self.end_s = 0.0

    def accept(self, event: Any, offset: int) -> None:
        """Add an event of the trace event format."""
        phase, pid = event["ph"], event["pid"]
        if phase == "M":
            self._name(event)
            return
        if phase not in (SPAN, INSTANT, BEGIN, END):
            return
        time_s, name = float(event["ts"]) / 1e6, str(event["name"])
        track = self._threads.get(event["tid"], "")
        if phase == SPAN:
            self._add(pid, track, name, time_s, float(event["dur"]) / 1e6)
        elif phase == BEGIN:
            self._begun[pid, name, event["id"]] = time_s
        elif phase == END:
            start = self._begun.pop((pid, name, event["id"]), None)
            if start is not None:
                self._add(pid, name, name, start, time_s - start)
        elif track != "engine":  # submissions of requests are no events of the run
            process = self._processes.get(pid, "")
            details = event.get("args") or {}
            self.marks.append(Mark(time_s=time_s, process=process, name=name, details=details))

    def _name(self, event: Mapping[str, Any]) -> None:
        kind, given = event["name"], event["args"]
        if kind == "origin":
            self.origin_s = int(given["unix_ns"]) / 1e9
        elif kind == "process_name":
            self._processes[event["pid"]] = str(given["name"])
        elif kind == "thread_name":
            self._threads[event["tid"]] = str(given["name"])

    def _add(self, pid: int, track: str, name: str, start: float, duration: float) -> None:
        if len(self._kinds) >= MAX_KINDS and name not in self._kinds:
            name = OTHER_KIND
        kind = self._kinds.setdefault(name, len(self._kinds))
        self._tracks[pid, track].add(start, max(0.0, duration), kind)
        self.end_s = max(self.end_s, start + duration)

    def lanes(self, *, max_spans: int = MAX_SPANS) -> dict[str, Any]:
        """Return the lanes, and the resolution in seconds below which spans were merged.

        A span is [start, duration, kind, number of spans, time within them] in seconds. The last
        two are missing for a single span.
        """
        found = {key: track for key, track in self._tracks.items() if track.starts}
        tracks = {key: found[key] for key in sorted(found, key=self._order)[:MAX_LANES]}
        num_detailed = min(DETAILED, max_spans // (2 * len(tracks) or 1))
        orders = {
            key: sorted(range(len(track.starts)), key=track.starts.__getitem__)
            for key, track in tracks.items()
        }

        def merged(resolution: float) -> dict[tuple[int, str], list[list[float]]]:
            return {
                key: _merged(tracks[key], orders[key], resolution, num_detailed) for key in tracks
            }

        finest = max(self.end_s, 1e-3) / 2**RESOLUTIONS
        resolution, shown = 0.0, merged(0.0)
        too_fine, fits = -1, RESOLUTIONS
        if sum(map(len, shown.values())) > max_spans:
            while fits - too_fine > 1:
                power = (too_fine + fits) // 2
                count = sum(map(len, merged(finest * 2**power).values()))
                too_fine, fits = (too_fine, power) if count <= max_spans else (power, fits)
            resolution = finest * 2**fits
            shown = merged(resolution)
        lanes = [
            {
                "process": self._processes.get(pid, str(pid))[:MAX_NAME],
                "track": name[:MAX_NAME],
                "spans": shown[pid, name],
            }
            for pid, name in tracks
        ]
        return {
            "lanes": lanes,
            "kinds": [name[:MAX_NAME] for name in self._kinds],
            "resolution": resolution,
            "end": self.end_s,
            "num_spans": sum(len(track.starts) for track in found.values()),
            "left_out": len(found) - len(tracks),
        }

    def _order(self, key: tuple[int, str]) -> tuple[int, str, str]:
        process = self._processes.get(key[0], "")
        order = ("trainer", "rollout", "environment", "reward", "controller")
        kind = process.partition("-")[0]
        return order.index(kind) if kind in order else len(order), process, key[1]

    def waits_for(self, reason: str) -> list[tuple[float, float]]:
        """Return start and duration of the spans in which the training loop waited for a reason."""
        name = f"waits for {reason}"
        kind = self._kinds.get(name)
        found: list[tuple[float, float]] = []
        for (_, track), spans in self._tracks.items():
            if track == "train" and kind is not None:
                found += [
                    (start, duration)
                    for start, duration, one in zip(
                        spans.starts, spans.durations, spans.kinds, strict=True
                    )
                    if one == kind
                ]
        return sorted(found)


def _merged(
    track: Track, order: Sequence[int], resolution: float, num_detailed: int
) -> list[list[float]]:
    """Return the spans in order, merged where they overlap or are closer than the resolution.

    The last `num_detailed` spans are merged only where they overlap.
    """
    first_detailed = len(order) - num_detailed
    longest = MERGED_LENGTH * resolution
    spans: list[list[float]] = []
    last_of: dict[int, list[float]] = {}  # by kind: kinds alternate in a lane
    for number, i in enumerate(order):
        start, duration, kind = track.starts[i], track.durations[i], track.kinds[i]
        last = last_of.get(kind)
        if last is not None:
            end = last[0] + last[1]
            is_close = start - resolution < end and start + duration - last[0] <= longest
            if start < end or (is_close and number < first_detailed):
                _extend(last, start, duration)
                continue
        last_of[kind] = [start, duration, kind]
        spans.append(last_of[kind])
    return [[_short(value) for value in span] for span in spans]


def _extend(span: list[float], start: float, duration: float) -> None:
    """Merge a span of the same kind into `span`. The time within counts overlaps once."""
    end = span[0] + span[1]
    if len(span) == 3:
        span += [1, span[1]]
    span[3] += 1
    span[4] += max(0.0, start + duration - max(start, end))
    span[1] = max(end, start + duration) - span[0]


def _short(value: float) -> float:
    return round(value, 5)
