"""Gauges on Ray's metrics endpoint, which Prometheus scrapes.

    controller, stores, engines ── Gauges.set ──► Ray's agent of the node ──► http://node:port/metrics
                                                                       ray_rlsys_NAME{run, worker}

Each metric of metrics.jsonl and evaluations.jsonl has a gauge: "reward/mean" is rlsys_reward_mean.
Stores and engines have those of STORE_BYTES and below. Ray adds the prefix ray_. docs/trackers.md
describes the endpoint, deploy/grafana/rlsys.json is a dashboard.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Gauge

from rlsys.common.background_tasks import report, start_thread

PREFIX = "rlsys_"
TAGS = ("run", "worker")

STORE_BYTES = "store_bytes"  # leased
STORE_CAPACITY_BYTES = "store_capacity_bytes"
ENGINE_RUNNING = "engine_running"  # requests that have a token
ENGINE_WAITING = "engine_waiting"
ENGINE_KV_USAGE = "engine_kv_usage"  # share of the memory for keys and values
ENGINE_PREEMPTED = "engine_preempted"  # preemptions since the engine's start
ENGINE_TOKENS = "engine_generated_tokens"  # since the engine's start


def gauge_name(metric: str) -> str:
    """Return the name of the gauge of a metric, as this process registers it."""
    return PREFIX + re.sub(r"[^A-Za-z0-9_]", "_", metric)


# Ray's endpoint forgets a gauge that was not set for two of its intervals of 10 s. A step may take
# longer.
REFRESH_S = 5.0


class Gauges:
    """Gauges of one process of a run. It may be sent to the process before its first use.

    A thread sets all gauges again every `refresh_s`, from the first use until `close`.

    Args:
        run: Name of the run, the value of the tag `run`.
        worker: Name of the process, the value of the tag `worker`.
        refresh_s: Seconds between two reports of a value that does not change.
    """

    def __init__(self, run: str, worker: str, *, refresh_s: float = REFRESH_S) -> None:
        self._tags = {"run": run, "worker": worker}
        self._refresh_s = refresh_s
        self._gauges: dict[str, Any] = {}  # by metric
        self._values: dict[str, float] = {}
        self._closed: threading.Event | None = None  # None before the first use

    def set(self, metric: str, value: float) -> None:
        """Set the gauge of a metric."""
        if metric not in self._gauges:
            gauge = Gauge(gauge_name(metric), description=metric, tag_keys=TAGS)
            self._gauges[metric] = gauge.set_default_tags(self._tags)
        self._values[metric] = float(value)
        self._gauges[metric].set(float(value))
        if self._closed is None:
            self._closed = threading.Event()
            start_thread(self._refresh, self._closed, name="rlsys-gauges", fail=report)

    def close(self) -> None:
        """Stop reporting. The endpoint forgets the gauges within seconds."""
        if self._closed is not None:
            self._closed.set()

    def _refresh(self, closed: threading.Event) -> None:
        while not closed.wait(self._refresh_s):
            for metric, value in list(self._values.items()):
                self._gauges[metric].set(value)

    def set_all(self, line: Mapping[str, float]) -> None:
        """Set the gauges of all metrics of a line."""
        for metric, value in line.items():
            self.set(metric, value)
