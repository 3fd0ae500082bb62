"""Gauges on Ray's metrics endpoint, which Prometheus scrapes.

    controller, stores, engines ── Gauges.set ──► Ray's agent of the node ──► http://node:port/metrics
                                                                       ray_rlsys_NAME{run, worker}

Each metric of metrics.jsonl and evaluations.jsonl has a gauge: "reward/mean" is rlsys_reward_mean.
Stores and engines have those of STORE_BYTES and below. Ray adds the prefix ray_. docs/trackers.md
describes the endpoint, deploy/grafana/rlsys.json is a dashboard.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Gauge

PREFIX = "rlsys_"
TAGS = ("run", "worker")

STORE_BYTES = "store_bytes"  # leased
STORE_CAPACITY_BYTES = "store_capacity_bytes"
ENGINE_RUNNING = "engine_running"  # requests that have a token
ENGINE_WAITING = "engine_waiting"
ENGINE_KV_USAGE = "engine_kv_usage"  # share of the memory for keys and values
ENGINE_TOKENS = "engine_generated_tokens"  # since the engine's start


def gauge_name(metric: str) -> str:
    """Return the name of the gauge of a metric, as this process registers it."""
    return PREFIX + re.sub(r"[^A-Za-z0-9_]", "_", metric)


class Gauges:
    """Gauges of one process of a run. It may be sent to the process before its first use.

    Args:
        run: Name of the run, the value of the tag `run`.
        worker: Name of the process, the value of the tag `worker`.
    """

    def __init__(self, run: str, worker: str) -> None:
        self._tags = {"run": run, "worker": worker}
        self._gauges: dict[str, Any] = {}  # by metric

    def set(self, metric: str, value: float) -> None:
        """Set the gauge of a metric."""
        if metric not in self._gauges:
            gauge = Gauge(gauge_name(metric), description=metric, tag_keys=TAGS)
            self._gauges[metric] = gauge.set_default_tags(self._tags)
        self._gauges[metric].set(float(value))

    def set_all(self, line: Mapping[str, float]) -> None:
        """Set the gauges of all metrics of a line."""
        for metric, value in line.items():
            self.set(metric, value)
