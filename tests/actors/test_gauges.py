"""Gauges on Ray's metrics endpoint, and the dashboard that reads them."""

from __future__ import annotations

import pickle
import queue
import re
import shutil
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from actors.cluster import gauges
from actors.cluster.gauges import gauge_name
from rlsys import metrics
from rlsys.common.safe_json import parse_json
from rlsys.runs.observe.metrics_file import read_metrics
from tests.clusters import cluster_of_one
from tests.e2e.job import SMALL_QUICKSTART, start

ROOT = Path(__file__).parents[2]
DASHBOARD = parse_json((ROOT / "deploy" / "grafana" / "rlsys.json").read_text())

# A sample of Prometheus' text format: name{labels} value
SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = dict[tuple[str, str], float]  # by gauge and worker


def panels() -> list[Mapping[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def exported() -> set[str]:
    """Every name that Prometheus can get, of metrics without a variable part."""
    own = [
        value
        for word, value in (*vars(metrics).items(), *vars(gauges).items())
        if word.isupper() and isinstance(value, str) and word != "PREFIX"
    ]
    return {f"ray_{gauge_name(name)}" for name in own}


def families() -> list[str]:
    """Names of metrics with a variable part."""
    own = [metrics.rollouts_dropped("stale"), metrics.queue_depth("score"), metrics.pass_at(4)]
    return [f"ray_{gauge_name(name)}" for name in (*own, metrics.mean_at(8))]


def test_names_of_gauges() -> None:
    names = ["reward/mean", "eval/pass@4", "rollouts/dropped/replica died", "1st"]
    assert [gauge_name(name) for name in names] == [
        "rlsys_reward_mean",
        "rlsys_eval_pass_4",
        "rlsys_rollouts_dropped_replica_died",
        "rlsys_1st",
    ]


def test_values_are_reported_again_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: queue.Queue[tuple[str, dict[str, str], float]] = queue.Queue()

    class Recorded:
        def __init__(self, name: str, *, description: str, tag_keys: tuple[str, ...]) -> None:
            assert tag_keys == ("run", "worker")
            self.name = name

        def set_default_tags(self, tags: dict[str, str]) -> Recorded:
            self.tags = tags
            return self

        def set(self, value: float) -> None:
            reported.put((self.name, self.tags, value))

    monkeypatch.setattr(gauges, "Gauge", Recorded)
    own = pickle.loads(pickle.dumps(gauges.Gauges("demo", "store-0", refresh_s=0.001)))
    own.set_all({"step": 3, "reward/mean": 0.5})
    tags = {"run": "demo", "worker": "store-0"}
    counts: Counter[tuple[str, float]] = Counter()
    while len(counts) < 2 or min(counts.values()) < 3:
        name, its_tags, value = reported.get(timeout=60)
        assert its_tags == tags
        counts[name, value] += 1
    own.close()
    assert counts.keys() == {("rlsys_step", 3.0), ("rlsys_reward_mean", 0.5)}


def test_every_expression_of_the_dashboard_names_gauges_that_exist() -> None:
    assert len(expressions()) > 30
    for expression in expressions():
        patterns = re.findall(r'__name__=~"([^"]+)"', expression)
        names = re.findall(r"\bray_rlsys_\w+(?=\{)", expression)
        assert names or patterns, expression
        assert set(names) <= exported(), expression
        for pattern in patterns:
            assert any(re.fullmatch(pattern, name) for name in families()), expression


def test_the_dashboard_has_what_grafana_needs() -> None:
    assert {"title", "uid"} <= DASHBOARD.keys()
    assert DASHBOARD["schemaVersion"] >= 36
    assert "id" not in DASHBOARD, "Grafana would replace another dashboard"
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    text = (ROOT / "deploy" / "grafana" / "rlsys.json").read_text()
    assert set(re.findall(r"\$\{?(\w+)", text)) - {"__all", "1"} == variables
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & cells, f"{panel['title']} covers another panel"
        cells |= own
    for panel in panels():
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_can_parse_every_expression(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$run", ".*")}
        for number, expression in enumerate(expressions())
    ]
    (tmp_path / "rules.yml").write_text(str({"groups": [{"name": "all", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", "rules.yml"], cwd=tmp_path, check=True)
    example = ROOT / "deploy" / "prometheus.yml"
    subprocess.run(["promtool", "check", "config", str(example)], check=True)


def samples_of(text: str, run: str) -> Samples:
    found: Samples = {}
    for name, labels, value in SAMPLE.findall(text):
        tags = dict(LABEL.findall(labels))
        if tags.get("run") == run:
            found[name, tags["worker"]] = float(value)
    return found


def scrape(port: int, run: str) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return samples_of(answer.read().decode(), run)


# About 60 s.
@pytest.mark.slow
def test_the_endpoint_has_what_is_in_metrics_jsonl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "500")
    arguments = [*SMALL_QUICKSTART, "--runs-dir", str(tmp_path / "runs"), "--name", "seen"]
    arguments += ["--num-steps", "20", "--evaluation.every", "5"]
    found: list[Samples] = []
    with cluster_of_one(num_cpus=4) as cluster:
        port = cluster.head_node.metrics_export_port
        job = start(
            "recipes/quickstart.py", [*arguments, "--cluster.address", cluster.address], tmp_path
        )
        try:
            while job.process.poll() is None:
                found.append(scrape(port, "seen"))
                time.sleep(0.5)  # between two reports of Ray
            assert job.wait() == 0, job.output
        finally:
            job.end()
    lines = {line["step"]: line for line in read_metrics(tmp_path / "runs/seen/metrics.jsonl")}
    assert len(lines) == 20
    matched = [step for samples in found if (step := whole_line(samples, lines)) is not None]
    assert matched, found[-1:]
    merged = {name: value for samples in found for name, value in samples.items()}
    for gauge in ("engine_running", "engine_waiting", "engine_generated_tokens", "engine_kv_usage"):
        assert (f"ray_rlsys_{gauge}", "rollout-0") in merged
    capacity = merged["ray_rlsys_store_capacity_bytes", "store-0"]
    used = [samples.get(("ray_rlsys_store_bytes", "store-0"), 0.0) for samples in found]
    assert 0 < max(used) <= capacity
    assert any(name.startswith("ray_rlsys_eval_") for name, _ in merged)


def whole_line(samples: Samples, lines: Mapping[float, Mapping[str, float]]) -> float | None:
    """Return the step whose line the samples of the controller equal, or None.

    None: there is no step yet, or the report contains parts of two steps.
    """
    step = samples.get(("ray_rlsys_step", "controller"))
    if step is None or step not in lines:
        return None
    of_step = {f"ray_{gauge_name(name)}": value for name, value in lines[step].items()}
    is_equal = all(samples.get((name, "controller")) == value for name, value in of_step.items())
    return step if is_equal else None
