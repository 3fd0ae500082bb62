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
from rlsys.planner.cpu_probe import num_cores, save_probe
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
