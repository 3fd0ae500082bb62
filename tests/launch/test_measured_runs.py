"""Run directories as measurements: what is read, what is refused, and the profile that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlsys.commands.plan_command import main
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.config import RunConfig, SamplingConfig
from rlsys.config.fields import to_dict
from rlsys.controller.controller import StallError
from rlsys.launcher.measured_runs import measured_run
from rlsys.planner.cpu_device import cpu_constants
from rlsys.planner.cpu_probe import save_probe
from rlsys.planner.profiles import fitted_constants
from rlsys.planner.run_record import RecordedRole, RunRecord, record_text
from rlsys.planner.stack_profile import StackProfile, default_file, read_profile
from rlsys.runs.observe.records import RolloutRecord
from tests.errors import invalid
from tests.planner.cpu_examples import TINY_CONFIG, cpu_probe
from tests.planner.test_run_measurement import lines

VERSIONS = {"torch": "2.13.0", "vllm": None, "transformers": "5.19.0", "rlsys": "0.1.0"}
PROBE = cpu_probe()
IMPOSSIBLE = StackProfile(versions=VERSIONS, devices=("CPU",), rest_s=1e5)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_probe(PROBE)


def recorded(
    path: Path,
    *,
    metrics: list[dict[str, float]] | None = None,
    settings: Mapping[str, Any] | None = None,
    has_record: bool = True,
    num_rollouts: int = 0,
) -> Path:
    """Write a run directory as a run leaves it."""
    path.mkdir()
    config = RunConfig(
        name=path.name,
        prompts_per_step=8,
        group_size=4,
        sampling=SamplingConfig(max_tokens=16),
    )
    stored = {**to_dict(config), "advantage": "of the recipe", **(settings or {})}
    (path / "config.json").write_text(dump_json({"config": stored, "versions": VERSIONS}))
    rows = lines(20) if metrics is None else metrics
    (path / "metrics.jsonl").write_text("".join(f"{dump_json(one)}\n" for one in rows))
    role = RecordedRole(
        name="policy", model="tiny", config=TINY_CONFIG, forward_passes=1, samples=True
    )
    if has_record:
        record = RunRecord(cluster="1x2xCPU", prompt_tokens=9.0, roles=(role,))
        (path / "plan.json").write_text(record_text(record))
    else:
        (path / "hf").mkdir()
        (path / "hf" / "config.json").write_text(dump_json(TINY_CONFIG))
    rollouts = [rollout(number) for number in range(num_rollouts)]
    (path / "rollouts.jsonl").write_text("".join(f"{dump_json(one)}\n" for one in rollouts))
    return path


def rollout(number: int) -> dict[str, Any]:
    record = RolloutRecord(
        step=1,
        group_id=number // 4,
        index=number % 4,
        prompt="a",
        completion="b",
        token_ids=[1] * (4 if number % 2 else 12),
        policy_versions=[0],
        staleness=0,
        reward=0.0,
        rewards={},
        advantage=0.0,
        finish_reason="stop",
    )
    return asdict(record)


def test_a_run_is_read_with_its_shape_and_its_times(tmp_path: Path) -> None:
    run = measured_run(recorded(tmp_path / "a", num_rollouts=40), PROBE)
    assert (run.engine, str(run.cluster)) == ("torch", "1x2xCPU")
    assert run.versions == VERSIONS
    work = run.shape.workload
    assert (work.prompts, work.group_size, work.prompt_tokens) == (8, 4, 9.0)
    assert run.shape.policy.forward_passes == 1
    # lengths of 4 and 12, scaled to the mean of 10 in the metrics
    assert work.completions.mean == pytest.approx(10.0)
    assert work.completions.quantiles[0] == pytest.approx(5.0)
    assert work.completions.quantiles[-1] == pytest.approx(15.0)
    assert run.medians.step_s == 2.0
    assert run.plan.trainers["policy"].recompute == "none"  # on CPUs


def test_a_run_of_an_earlier_version_has_the_shape_of_its_export(tmp_path: Path) -> None:
    run = measured_run(recorded(tmp_path / "a", has_record=False), PROBE, prompt_tokens=5.0)
    assert run.shape.policy.model.hidden == 128
    assert run.shape.workload.prompt_tokens == 5.0


def test_the_command_writes_a_profile_that_predicts_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(tmp_path / "a", settings={"asynchrony": {"max_staleness": 1}})
    file = tmp_path / "profile.json"
    assert main(["--calibrate", str(path), "--profile", str(file)]) == 0
    assert str(file) in capsys.readouterr().out
    profile = read_profile(file)
    assert profile.probe == PROBE
    assert profile.runs == (f"{path}: 18 steps",)
    run = measured_run(path, PROBE)
    assert run.simulate is not None
    step = run.simulate(profile.constants(fitted_constants()))
    assert step.step_s == pytest.approx(run.medians.step_s, rel=0.05)
    # training took 1 s; the rest of a step is spent by the simulated trainer too
    rest_s = profile.rest_s * run.shape.workload.prompts
    assert step.train_s - rest_s == pytest.approx(1.0, rel=0.1)


def test_generation_ahead_does_not_remove_its_work_from_a_step(tmp_path: Path) -> None:
    """A replica computes the rollouts of a step whenever it does, in larger batches at most."""
    work = []
    for bound in (0, 4, 40):
        settings = {"asynchrony": {"max_staleness": bound}}
        run = measured_run(recorded(tmp_path / str(bound), settings=settings), PROBE)
        assert run.simulate is not None
        work.append(run.simulate(cpu_constants(fitted_constants(), PROBE)).generation_s)
    on_policy, *ahead = work
    assert all(0.5 * on_policy < one <= 1.05 * on_policy for one in ahead)


def test_without_a_file_the_profile_is_that_of_later_runs(tmp_path: Path) -> None:
    assert main(["--calibrate", str(recorded(tmp_path / "a"))]) == 0
    assert read_profile(default_file()).devices == ("CPU",)


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with invalid("--calibrate", str(tmp_path)):
        main(["--calibrate", str(tmp_path)])
    (tmp_path / "config.json").write_text("{}")
    with invalid("--calibrate", str(tmp_path)):
        main(["--calibrate", str(tmp_path)])


def test_a_run_that_has_not_trained(tmp_path: Path) -> None:
    path = recorded(tmp_path / "a")
    (path / "metrics.jsonl").unlink()
    with invalid("--calibrate", str(path)):
        measured_run(path, PROBE)
    short = recorded(tmp_path / "b", metrics=lines(3))
    with invalid(str(short), 3):
        measured_run(short, PROBE)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "x", None, True, [1], 10**400])
def test_a_value_that_is_no_number_is_named_with_its_file_and_line(
    value: Any, tmp_path: Path
) -> None:
    rows = lines(20)
    rows[6]["time/step_s"] = value
    path = recorded(tmp_path / "a", metrics=rows)
    with invalid(f"{path / 'metrics.jsonl'}, line 7"):
        main(["--calibrate", str(path)])


@pytest.mark.parametrize(("value", "field"), [(-1.0, "step_s"), (1e300, "step_s")])
def test_impossible_times_name_run_step_and_number(
    value: float, field: str, tmp_path: Path
) -> None:
    rows = lines(20)
    rows[6]["time/step_s"] = value
    path = recorded(tmp_path / "a", metrics=rows)
    with invalid(f"{path}, step 7, time/{field}"):
        main(["--calibrate", str(path)])


@pytest.mark.parametrize(
    ("edit", "line", "step"),
    [
        (lambda rows: rows + rows, 21, 1),  # the file appended to itself
        (lambda rows: rows[8:], 1, 9),
        (lambda rows: [*rows[:5], *rows[6:]], 6, 7),
        (lambda rows: [*rows[:5], rows[4], *rows[5:]], 6, 5),
        (lambda rows: rows[::-1], 1, 20),
    ],
)
def test_steps_that_are_not_there_once_in_order(
    edit: Callable[[list[dict[str, float]]], list[dict[str, float]]],
    line: int,
    step: int,
    tmp_path: Path,
) -> None:
    path = recorded(tmp_path / "a", metrics=edit(lines(20)))
    with invalid(f"{path / 'metrics.jsonl'}, line {line}", step):
        main(["--calibrate", str(path)])


def test_a_last_line_that_a_crash_cut_does_not_count(tmp_path: Path) -> None:
    path = recorded(tmp_path / "a")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "time/st')
    assert measured_run(path, PROBE).medians.num_steps == 18


@pytest.mark.parametrize("found", [IMPOSSIBLE, StallError(), OverflowError()])
def test_times_that_no_stack_has_give_no_profile(
    found: StackProfile | Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrated(*_: object, **__: object) -> object:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("rlsys.launcher.measured_runs.calibrated", calibrated)
    path, file = recorded(tmp_path / "a"), tmp_path / "profile.json"
    with invalid("--calibrate", [str(path)]):
        main(["--calibrate", str(path), "--profile", str(file)])
    assert not file.exists()


@pytest.mark.parametrize("line", ["{}", '{"step": 1}', '{"step": 1, "token_ids": "x"}', "[]"])
def test_a_damaged_rollout_is_named_with_its_file_and_line(line: str, tmp_path: Path) -> None:
    path = recorded(tmp_path / "a", num_rollouts=40)
    with (path / "rollouts.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with invalid(f"{path / 'rollouts.jsonl'}, line 41"):
        measured_run(path, PROBE)


def test_files_that_contradict_each_other(tmp_path: Path) -> None:
    path = recorded(tmp_path / "a")
    record = parse_json((path / "plan.json").read_text())
    (path / "plan.json").write_text(dump_json({**record, "cluster": "1x8xH100"}))
    with invalid(str(path / "plan.json"), "1x8xH100"):
        measured_run(path, PROBE)


@pytest.mark.parametrize("versions", ["x", [], None, {"torch": 2}])
def test_versions_that_are_no_texts(versions: object, tmp_path: Path) -> None:
    path = recorded(tmp_path / "a")
    stored = parse_json((path / "config.json").read_text())
    (path / "config.json").write_text(dump_json({**stored, "versions": versions}))
    with invalid("--calibrate", str(path)):
        measured_run(path, PROBE)


def test_a_run_on_unknown_gpus(tmp_path: Path) -> None:
    on_gpus = {"trainer": {"num_gpus": 1.0}, "rollout": {"num_gpus": 1.0}}
    path = recorded(tmp_path / "a", settings=on_gpus, has_record=False)
    with invalid("--calibrate", str(path)):
        measured_run(path)


def with_run_id(path: Path, run_id: str) -> Path:
    stored = parse_json((path / "config.json").read_text())
    (path / "config.json").write_text(dump_json({**stored, "run_id": run_id}))
    return path


def test_a_run_is_measured_once(tmp_path: Path) -> None:
    first = with_run_id(recorded(tmp_path / "a"), "one")
    copy = with_run_id(recorded(tmp_path / "b"), "one")
    link, former = tmp_path / "link", recorded(tmp_path / "former")
    link.symlink_to(former)  # a run of an earlier version has no run_id
    for runs in ([first, first], [first, copy], [former, link], [former, first, copy]):
        with invalid("--calibrate", [str(one) for one in runs[-2:]]):
            main(["--calibrate", *map(str, runs)])
    other = with_run_id(recorded(tmp_path / "c"), "two")
    file = tmp_path / "profile.json"
    assert main(["--calibrate", str(first), str(other), "--profile", str(file)]) == 0
    assert read_profile(file).training.runs == 2


@pytest.mark.parametrize("text", ["{}", "[]", '{"config": 1}', '{"config": {}}', "nonsense"])
def test_a_config_without_its_parts_is_named_with_its_run(text: str, tmp_path: Path) -> None:
    path = recorded(tmp_path / "a")
    (path / "config.json").write_text(text)
    with invalid("--calibrate", str(path)) as found:
        measured_run(path, PROBE)
    assert "config" in found.value.rule or "nonsense" in text


def test_a_run_without_the_shape_of_its_model_is_named(tmp_path: Path) -> None:
    path = recorded(tmp_path / "a", has_record=False)
    (path / "hf" / "config.json").unlink()
    with invalid(f"{path}: model.path", ""):
        measured_run(path, PROBE)


def test_the_advice_about_a_damaged_line_leads_to_no_other_refusal(tmp_path: Path) -> None:
    path = recorded(tmp_path / "a")
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(f"nonsense{text}")
    with invalid(f"{path / 'metrics.jsonl'}, line 1") as found:
        measured_run(path, PROBE)
    assert "sed" not in found.value.fix  # a removed line is a missing step


@pytest.mark.parametrize("name", ["9xFOO", "1x2xFOO", "many"])
@pytest.mark.parametrize("uses_gpus", [False, True])
def test_a_cluster_that_no_planner_knows_is_named_with_its_file(
    name: str, uses_gpus: bool, tmp_path: Path
) -> None:
    on_gpus = {"trainer": {"num_gpus": 1.0}, "rollout": {"num_gpus": 1.0}}
    path = recorded(tmp_path / "a", settings=on_gpus if uses_gpus else {})
    record = parse_json((path / "plan.json").read_text())
    (path / "plan.json").write_text(dump_json({**record, "cluster": name}))
    with invalid(str(path / "plan.json"), name):
        measured_run(path, PROBE)
