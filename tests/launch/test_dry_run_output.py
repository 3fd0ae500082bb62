"""Output of a dry run: a file for --config on stdout, and warnings on stderr too."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rlsys
from actors.run.plan_record import run_record
from recipes.grpo import GRPOConfig, grpo
from rlsys.common.number_text import significant
from rlsys.config import ModelConfig
from rlsys.evaluation.held_out_data import HeldOut
from rlsys.launcher.preflight import preflight
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.planner.cpu_probe import save_probe
from tests.errors import invalid
from tests.launch.small_run import ROWS
from tests.planner.cpu_examples import cpu_probe


def broken(rollout: rlsys.Rollout) -> float:
    print("debugging\n[broken")
    return float(rollout.metadata["missing"])


def works(rollout: rlsys.Rollout) -> float:
    return 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), num_layers=1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_of(model: Path, tmp_path: Path, **fields: Any) -> GRPOConfig:
    return GRPOConfig(
        model=ModelConfig(path=str(model)),
        prompts_per_step=4,
        group_size=2,
        runs_dir=str(tmp_path / "runs"),
        **fields,
    )


def printed(
    capfd: pytest.CaptureFixture[str],
    config: GRPOConfig,
    reward: Any,
    dry_run: bool | str,
    rows: Sequence[dict[str, Any]] = ROWS,
) -> tuple[str, str]:
    rlsys.launch(config, grpo(config, [reward], rows=rows), dry_run=dry_run)
    captured = capfd.readouterr()
    assert tomllib.loads(captured.out)["prompts_per_step"] == 4
    return captured.out, captured.err


def test_a_reward_that_raises_leaves_a_file_and_is_reported_twice(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{**row, "a b\nc": 1} for row in ROWS]
    out, err = printed(capfd, config_of(model, tmp_path), broken, True, rows)
    assert "debugging" not in out
    assert out.index("# warning: reward 'broken'") < out.index("# verdict: fits; see 1 warning")
    assert "KeyError" in out
    assert "# warning: reward 'broken'" in err
    assert r"'a b\nc'" in out


def test_a_dry_run_predicts_what_the_start_records(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_probe(cpu_probe())
    config = config_of(model, tmp_path)
    out, _ = printed(capfd, config, works, True)
    flow = grpo(config, [works], rows=ROWS)
    read = preflight(config, flow, held_out=HeldOut(), warm_start=None)
    record = run_record(config, read.graph, read.shape, read.prompts, [{"CPU": 2.0}], None)
    assert record.prediction is not None
    found = re.search(r"# predicted step +(\S+) s", out)
    assert found is not None
    assert found[1] == significant(record.prediction.step_s)
    assert record.prompt_tokens == 2.0
    assert "prompts of 2 tokens, the mean of the first 8" in out
    assert "--prompt-tokens" not in out
    # One machine without GPUs has no lines about other nodes or about GPUs.
    assert not any(part in out for part in ("other node", "CUDA", "warning"))


def test_a_model_that_cannot_be_read_is_planned_by_its_shape(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = config_of(Path("nobody/SmolLM2-135M"), tmp_path)
    config = replace(
        config,
        trainer=rlsys.TrainerConfig(num_gpus=1, micro_batch_tokens=2048),
        rollout=rlsys.RolloutConfig(num_gpus=1, weight_transport="cuda_ipc"),
    )
    out, err = printed(capfd, config, works, "2x2xH100")
    assert tomllib.loads(out)["model"]["path"] == "nobody/SmolLM2-135M"
    assert "memory for 134,515,008 parameters" in out
    assert "verdict: fits; see 1 warning" in out
    assert "data: not read" in out
    # Four bytes per parameter.
    assert re.search(r"^# +on GPUs +513\.1 MiB .*CUDA IPC", out, re.MULTILINE)
    assert re.search(r"^# to replicas on the trainer's node .*CUDA IPC", out, re.MULTILINE)
    assert re.search(r"^# to each other node with replicas .*gloo", out, re.MULTILINE)
    assert re.search(r"^# nodes? 0.*: host memory", out, re.MULTILINE)
    assert "Tokenizer, data and rewards were not checked" in err
    with invalid("model.path", "nobody/SmolLM2-135M"):  # a start here needs it
        rlsys.launch(config, grpo(config, [works], rows=ROWS), dry_run=True)
    other = config_of(Path("nobody/unknown"), tmp_path)
    with invalid("model.path", "nobody/unknown"):
        rlsys.launch(other, grpo(other, [works], rows=ROWS), dry_run="8xH100")
