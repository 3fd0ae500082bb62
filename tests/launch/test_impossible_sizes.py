"""Impossible sizes are refused before a run starts, by the name of an option."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes import arithmetic
from recipes.grpo import GRPOConfig, grpo
from recipes.quickstart import QuickstartConfig
from rlsys import ClusterConfig, DataConfig, RunConfig, SamplingConfig
from rlsys.config.command_line import MAX_FILE_BYTES, parse
from rlsys.dataflow.graph.run_graph import complete_graph
from rlsys.engines.models.model_shape import model_shape
from rlsys.launcher.memory_estimate import check_store, row_bytes, store_bytes
from rlsys.launcher.tiny_models import build_tiny_model
from tests.errors import invalid


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), characters="0123456789")


@pytest.mark.parametrize("name", ["num_attention_heads", "hidden_size", "vocab_size", "head_dim"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_size_that_is_not_positive_is_refused(
    name: str, value: int, tmp_path: Path, model: Path
) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
    with invalid("model.path", str(tmp_path)) as found:
        model_shape(str(tmp_path))
    assert f"{name}={value}" in found.value.rule


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "intermediate_size"])
def test_a_model_larger_than_any_machine_is_refused(name: str, tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, name: 10**13}))
    with invalid("model.path", str(tmp_path)) as found:
        model_shape(str(tmp_path))
    assert "parameters" in found.value.rule


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_damaged_number_is_a_value_error_or_harmless(
    data: st.DataObject, tmp_path: Path, model: Path
) -> None:
    config = json.loads((model / "config.json").read_text())
    name = data.draw(st.sampled_from(sorted(config)))
    odd: list[Any] = [0, -1, None, "x", [], 0.5, {}, True]
    value = data.draw(st.sampled_from(odd))
    (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
    with contextlib.suppress(ValueError):
        assert model_shape(str(tmp_path)).num_parameters >= 0


@pytest.mark.parametrize(
    "sizes",
    [
        {"group_size": 2**40},
        {"prompts_per_step": 2**40},
        {"prompts_per_step": 2**20, "group_size": 2**20},
    ],
)
def test_too_many_rollouts_are_refused(sizes: dict[str, int]) -> None:
    with invalid("prompts_per_step") as refused:
        RunConfig(**sizes)  # type: ignore[arg-type]
    for field, value in sizes.items():
        assert f"{field}={value}" in str(refused.value)


def test_the_store_expects_no_prompt_beyond_the_context(model: Path) -> None:
    shape = model_shape(str(model))
    sizes = []
    for longest in (shape.max_context, 1_000_000):
        config = GRPOConfig(data=DataConfig(max_prompt_tokens=longest))
        flow = complete_graph(
            grpo(config, [lambda rollout: 1.0]), config, max_context=shape.max_context
        )
        check_store(config, flow)
        sizes.append((row_bytes(config, flow), store_bytes(config, flow)))
    assert sizes[0] == sizes[1]


def test_a_store_below_one_step_is_refused_by_its_option(tmp_path: Path) -> None:
    """The proposed size is large enough, and half of it is not."""
    sizes: dict[str, Any] = {"prompts_per_step": 4, "group_size": 64}
    sizes |= {"data": DataConfig(max_prompt_tokens=1000), "sampling": SamplingConfig()}
    small = GRPOConfig(cluster=ClusterConfig(store_gib=0.001), **sizes)
    flow = grpo(small, [lambda rollout: 1.0])
    with invalid("cluster.store_gib", 0.001) as refused:
        check_store(small, flow)
    needed = float(refused.value.rule.split("needs ")[1].split(" ")[0])
    check_store(GRPOConfig(cluster=ClusterConfig(store_gib=needed), **sizes), flow)
    with invalid("cluster.store_gib"):
        check_store(GRPOConfig(cluster=ClusterConfig(store_gib=0.5 * needed), **sizes), flow)
    config = QuickstartConfig(runs_dir=str(tmp_path), cluster=ClusterConfig(store_gib=0.001))
    assert store_bytes(config, flow) < config.rollouts_per_step * row_bytes(config, flow)
    with invalid("cluster.store_gib", 0.001):
        arithmetic.run(config, grpo, dry_run=True)


def refused(path: Path | str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(RunConfig, ["--config", str(path)])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_pipe_or_a_device_as_configuration_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "run.toml"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        assert str(path) in refused(path, capsys)


def test_a_configuration_has_a_bounded_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("num_steps = 3\n" + "#" * (MAX_FILE_BYTES - 14))
    assert parse(RunConfig, ["--config", str(path)]).config.num_steps == 3
    path.write_text(path.read_text() + "#")
    assert f"{MAX_FILE_BYTES:,}" in refused(path, capsys)
