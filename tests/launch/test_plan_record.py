"""plan.json of a run: written from its configuration, read for the closing summary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.run.plan_record import prediction_rows, run_record
from recipes.grpo import GRPOConfig, grpo
from rlsys.common.safe_json import dump_json
from rlsys.config import ModelConfig, SamplingConfig
from rlsys.dataflow.graph.run_graph import RunGraph, complete_graph
from rlsys.launcher.step_prediction import predict_step
from rlsys.planner import plan_settings
from rlsys.planner.cpu_probe import num_cores, save_probe
from rlsys.planner.hardware import parse_cluster
from rlsys.planner.lengths import lognormal
from rlsys.planner.plan_request import PlanRequest
from rlsys.planner.planning import plan_run
from rlsys.planner.run_record import PredictedStep, record_text
from rlsys.runs.run_files import RunFiles
from tests.planner.cpu_examples import TINY_CONFIG, cpu_probe
from tests.planner.test_run_measurement import lines

SHAPE: Any = SimpleNamespace(config=SimpleNamespace(to_dict=lambda: TINY_CONFIG))
CPU_NODES = [{"CPU": 64.0}]


@dataclass
class Prompts:
    """Prompts of 4 and 8 tokens in turn."""

    def __len__(self) -> int:
        return 10

    def at(self, index: int) -> Any:
        return SimpleNamespace(token_ids=(1,) * (4 + 4 * (index % 2)))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def configured(tmp_path: Path) -> tuple[GRPOConfig, RunGraph]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(dump_json(TINY_CONFIG))
    config = GRPOConfig(
        model=ModelConfig(path=str(tmp_path / "model")), sampling=SamplingConfig(max_tokens=16)
    )
    return config, complete_graph(grpo(config, [lambda rollout: 0.0]), config)


def record(tmp_path: Path) -> Any:
    config, graph = configured(tmp_path)
    prompts: Any = Prompts()
    return run_record(config, graph, SHAPE, prompts, CPU_NODES, None)


def test_a_run_on_measured_cpus_is_predicted(tmp_path: Path) -> None:
    save_probe(cpu_probe())
    found = record(tmp_path)
    assert found.cluster == f"1x{num_cores()}xCPU"
    assert found.prompt_tokens == 6.0
    assert found.roles[0].architecture.hidden == 128
    assert found.prediction is not None
    assert found.prediction.step_s > 0
    assert found.prediction.completion_tokens == pytest.approx(0.4 * 16, rel=0.01)


def test_a_run_on_a_cluster_has_the_cores_of_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert record(tmp_path).cluster == "1x64xCPU"


def test_a_configuration_is_predicted_like_the_plan_that_states_it(tmp_path: Path) -> None:
    config, _ = configured(tmp_path)
    flow, cluster, prompts = grpo(config, [lambda rollout: 0.0]), "1x2xH100", Prompts()
    request = PlanRequest(
        cluster=parse_cluster(cluster),
        prompt_tokens=6.0,
        completions=lognormal(0.4 * 16, 16),
        turns=1,
    )
    plans = [one for one in plan_run(config, flow, request).plans if one.result is not None]
    assert len({one.ranked.plan.max_staleness for one in plans}) > 1
    assert {one.ranked.plan.placement for one in plans} == {"colocated", "separate"}
    for one in plans:
        stated = plan_settings.configured(config, one.settings)
        graph = complete_graph(flow, stated, max_context=2048)
        found = predict_step(stated, graph, SHAPE, prompts, cluster)  # type: ignore[arg-type]
        assert found is not None
        assert found.step.simulated
        assert found.step.step_s == pytest.approx(one.ranked.estimate.seconds, rel=1e-6)
        assert found.step.high_s == pytest.approx(one.ranked.estimate.high, rel=1e-6)


def test_a_large_step_is_predicted_in_closed_form(tmp_path: Path) -> None:
    config, _ = configured(tmp_path)
    large = replace(config, prompts_per_step=100_000)
    graph = complete_graph(grpo(large, [lambda rollout: 0.0]), large)
    found = predict_step(large, graph, SHAPE, Prompts(), "1x2xH100")  # type: ignore[arg-type]
    assert found is not None
    assert not found.step.simulated


def test_a_run_without_a_probe_has_no_prediction(tmp_path: Path) -> None:
    found = record(tmp_path)
    assert found.prediction is None
    assert found.prompt_tokens == 6.0


def test_the_summary_compares_a_run_with_its_prediction(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert prediction_rows(files, lines(20)) == []  # no file
    predicted = PredictedStep(
        step_s=1.0, low_s=0.8, high_s=1.2, train_s=0.4, generation_s=0.6, completion_tokens=10.0
    )
    found = replace(record(tmp_path), prediction=predicted)
    files.plan.write_text(record_text(found))
    rows = prediction_rows(files, lines(20))
    assert [label for label, _ in rows] == ["predicted", ""]
    assert "2.0 x" in rows[0][1]
    assert "generation" in rows[1][1]  # 1.4 s instead of 0.6 s
    assert prediction_rows(files, lines(3)) == []  # too few steps
    files.plan.write_text(record_text(replace(found, prediction=None)))
    assert prediction_rows(files, lines(20)) == []
    files.plan.write_text("{")
    assert prediction_rows(files, lines(20)) == []
