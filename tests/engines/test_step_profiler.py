"""Profiles of chosen steps, around an engine that multiplies matrices."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.engines.training import step_profiler
from rlsys.engines.training.step_profiler import ProfiledEngine
from rlsys.types import StepResult


class Multiplies:
    """An engine whose forward pass is one matrix product."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.num_closed = 0
        self.weight = torch.ones(4, 4)

    def accumulate(self, *micro_batches: Any) -> None:
        torch.mm(self.weight, self.weight)

    def optimizer_step(self, *, last: bool = True) -> StepResult:
        torch.add(self.weight, 1.0)
        self.policy_version += 1
        return StepResult(policy_version=self.policy_version, metrics={}, num_tokens=1)

    def publish(self, node_ids: Any, *, on_device: bool) -> None:
        self.weight.clone()

    def close(self) -> None:
        self.num_closed += 1

    def attention(self) -> str:
        return "passes through"


def train(engine: Any, num_steps: int, num_calls: int = 3) -> None:
    for _ in range(num_steps):
        for _ in range(num_calls):
            engine.accumulate()
        engine.optimizer_step()
        engine.publish(["node"], on_device=True)


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def names(path: Path) -> Counter[str]:
    return Counter(event["name"] for event in events(path) if event.get("ph") == "X")


def test_each_chosen_step_has_a_trace_with_its_calls(tmp_path: Path) -> None:
    inner: Any = Multiplies()
    engine = ProfiledEngine(inner, steps=range(2, 4), directory=tmp_path, name="trainer-0")
    train(engine, 5)
    assert engine.attention() == "passes through"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "trainer-0-step-000002.json.gz",
        "trainer-0-step-000003.json.gz",
    ]
    for step in (2, 3):
        found = names(tmp_path / f"trainer-0-step-{step:06d}.json.gz")
        assert found[f"step {step}"] == 1
        assert found[f"step {step}: accumulate"] == 3
        assert found[f"step {step}: optimizer_step"] == 1
        assert found[f"step {step}: publish"] == 1
        assert found["aten::mm"] == 3
        steps = {match[1] for name in found if (match := re.match(r"step (\d+)", name))}
        assert steps == {str(step)}


def test_the_last_step_is_written_when_the_engine_closes(tmp_path: Path) -> None:
    inner: Any = Multiplies()
    engine = ProfiledEngine(inner, steps=range(2, 3), directory=tmp_path / "new", name="critic-1")
    train(engine, 2)
    engine.close()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["critic-1-step-000002.json.gz"]
    assert inner.num_closed == 1


def test_a_long_step_has_a_bounded_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first calls and its optimizer step are recorded."""
    monkeypatch.setattr(step_profiler, "MAX_CALLS", 4)
    inner: Any = Multiplies()
    engine = ProfiledEngine(inner, steps=range(1, 2), directory=tmp_path, name="trainer-0")
    train(engine, 1, num_calls=50)
    engine.close()
    found = names(tmp_path / "trainer-0-step-000001.json.gz")
    assert 4 <= found["aten::mm"] <= 5
    assert found["aten::add"] == 1


def test_a_disk_that_refuses_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    inner: Any = Multiplies()
    engine = ProfiledEngine(inner, steps=range(1, 2), directory=tmp_path / "profile", name="x")
    train(engine, 2)
    assert inner.policy_version == 2
