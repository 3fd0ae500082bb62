"""The start of a run, until Ray would start."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import json
import math
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rlsys
from actors.run.launch import next_command, resume_note, this_python
from recipes import arithmetic, swarm
from recipes.arithmetic import NUM_PROBLEMS
from recipes.quickstart import QuickstartConfig
from rlsys.common.run_sync import run_to_end
from rlsys.common.user_functions import FunctionFailed
from rlsys.config.fields import to_dict
from rlsys.controller.worker_protocols import PoolDied
from rlsys.errors import InvalidValue, InvalidValues
from rlsys.launcher.tiny_models import OwnModel, build_tokenizer, is_complete
from rlsys.runs.run_directory import RunDirectory
from tests.errors import error_about, invalid
from tests.histories import made_up_run, with_external_groups, write_run
from tests.launch.small_run import ROWS, right, small_flow
from tests.tiers import rest_slow

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def refused(*parts: str) -> Iterator[None]:
    """Assert that the block raises a ValueError whose message contains names and values."""
    with pytest.raises(ValueError) as found:  # noqa: PT011, the parts are checked below
        yield
    for part in parts:
        assert part in str(found.value)


def started(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a process that runs `script`, which may wait until its standard input is closed."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


BUILD = """
import sys
from rlsys.launcher import tiny_models
{patch}
sys.stdin.read()
path = tiny_models.OwnModel(name="own", characters="0123").ensure(sys.argv[1], seed=0)
for _ in range(20):
    {read}
print(path.stat().st_ino)
"""

# Files instead of a model, so that no process has to import torch.
QUICK = BUILD.format(
    patch="""
def build(path, **options):
    for number in range(20):
        (path / f"file-{number}").write_text("x" * 10_000)
    return path
tiny_models.build_tiny_model = build
""",
    read="assert tiny_models.is_complete(path)",
)
WHOLE = BUILD.format(
    patch="""
from rlsys.data.prompts import load_tokenizer
from rlsys.engines.models.causal_lm import load_causal_lm
""",
    read="load_causal_lm(path, dtype='float32'), load_tokenizer(str(path))",
)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param(WHOLE, id="whole", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_eight_processes_at_once_build_one_model(tmp_path: Path, script: str) -> None:
    starts = [started(script, str(tmp_path)) for _ in range(8)]
    for process in starts:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    answers = [process.communicate(timeout=1000) for process in starts]
    assert [process.returncode for process in starts] == [0] * 8, answers
    assert len({out for out, _ in answers}) == 1  # all of them saw one and the same directory
    assert [path.name for path in (tmp_path / ".models").iterdir()] == [
        OwnModel(name="own", characters="0123").path(tmp_path, seed=0).name
    ]


def test_a_complete_model_is_not_written_again(tmp_path: Path) -> None:
    own = OwnModel(name="own", characters="0123")
    path = own.ensure(tmp_path, seed=0)
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    assert own.ensure(tmp_path, seed=0) == path
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before
    others = {own.ensure(tmp_path, seed=1), OwnModel(name="own").ensure(tmp_path, seed=0)}
    assert len(others | {path}) == 3
    (tmp_path / "probe").touch()
    mode = stat.S_IMODE((tmp_path / "probe").stat().st_mode)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {mode}


@pytest.mark.parametrize("damage", ["cut", "removed", "changed"])
def test_a_damaged_model_is_built_again(tmp_path: Path, damage: str) -> None:
    own = OwnModel(name="own", characters="0123")
    weights = own.ensure(tmp_path, seed=0) / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "removed":
        weights.unlink()
    else:
        weights.write_bytes(
            whole[:1000] if damage == "cut" else whole[:-1] + bytes([whole[-1] ^ 1])
        )
    assert not is_complete(weights.parent)
    own.ensure(tmp_path, seed=0)
    assert weights.read_bytes() == whole
    assert len(list((tmp_path / ".models").iterdir())) == 1


def test_partial_directories_of_killed_processes_are_removed(tmp_path: Path) -> None:
    old, young = (tmp_path / ".models" / f".own.{name}.partial" for name in ("old", "young"))
    for leftover in (old, young):
        leftover.mkdir(parents=True)
    an_hour_ago = time.time() - 4000
    os.utime(old, (an_hour_ago, an_hour_ago))
    OwnModel(name="own", characters="0123").ensure(tmp_path, seed=0)
    assert (old.exists(), young.exists()) == (False, True)


FULL_DISK = """
import resource, sys
from rlsys.launcher.tiny_models import OwnModel
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
OwnModel(name="own").ensure(sys.argv[1], seed=0)
"""


@pytest.mark.slow
def test_a_full_disk_is_an_error_about_runs_dir(tmp_path: Path) -> None:
    process = started(FULL_DISK, str(tmp_path))
    _, err = process.communicate(timeout=300)
    last = err.strip().splitlines()[-1]
    assert last.startswith(f"rlsys.errors.InvalidValue: runs_dir='{tmp_path}': ")
    assert list((tmp_path / ".models").iterdir()) == []


# Mistakes that are found before Ray starts, in a minimal recipe.


def launch(tmp_path: Path, rows: Any = None, **fields: Any) -> rlsys.RunResult:
    options = {
        "own_model": fields.pop("own_model", OwnModel(name="own")),
        "warm_start": fields.pop("warm_start", None),
    }
    config = config_of(tmp_path, **fields)
    return rlsys.launch(config, small_flow(config, rows), **options, dry_run=True)


def config_of(tmp_path: Path, **fields: Any) -> rlsys.RunConfig:
    sizes: dict[str, Any] = {"prompts_per_step": 4, "group_size": 2, "runs_dir": f"{tmp_path}/runs"}
    return rlsys.RunConfig(**(sizes | fields))


def without_answer(number: int, value: Any) -> list[dict[str, Any]]:
    return [{**row, "answer": value} if n == number else row for n, row in enumerate(ROWS)]


def test_a_dry_run_writes_nothing_and_prints_a_file_that_config_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{n}\x1b[2J\n=", "answer": str(n)} for n in range(8)]
    result = launch(tmp_path, rows, seed=3, name="dry")
    assert (result.outcome, result.metrics) == ("dry run", ())
    assert result.directory == tmp_path / "runs" / "dry"
    assert repr(result) == f"RunResult(dry run, 0 steps, {str(result.directory)!r})"
    assert list(tmp_path.iterdir()) == []
    printed = capsys.readouterr().out
    assert re.search(r"8 prompts.*'answer'.* 7 tokens", printed)
    assert "\x1b" not in printed
    (tmp_path / "run.toml").write_text(printed)
    parsed = rlsys.parse(rlsys.RunConfig, ["--config", str(tmp_path / "run.toml")])
    assert parsed.config.seed == 3
    assert parsed.config.runs_dir == str(tmp_path / "runs")
    assert parsed.config.model.path == ""


def printed_dry(tmp_path: Path, layout: str) -> list[str]:
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.suppress(InvalidValue),  # 16 ranks need more CPUs than this machine may have
    ):
        launch(tmp_path, ROWS, trainer=rlsys.TrainerConfig(layout=layout))
    return printed.getvalue().splitlines()


@pytest.mark.slow
def test_a_dry_run_prints_the_traffic_of_each_link(tmp_path: Path) -> None:
    """Few ranks are listed one by one, many as a sum. The model has 0.8M parameters."""
    # A process in which torch.distributed was not initialised by other tests.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        layouts = ["dp2", "dp4pp4", "dp2,dp1"]
        of_two, of_many, of_list = apart.map(printed_dry, [tmp_path] * len(layouts), layouts)
    links = [re.fullmatch(r"# +(.*?) +([0-9.]+) MiB(.*)", line) for line in of_two]
    sizes = {found[1]: float(found[2]) for found in links if found}
    whole = sizes["to replicas on the trainer's node"]
    assert [sizes[f"sent by rank {rank}"] for rank in (0, 1)] == pytest.approx(
        [whole / 2] * 2, abs=0.1
    )
    assert sizes["read by each replica"] == whole
    start = of_many.index("# weights sent after each step")
    sent = re.fullmatch(
        r"#   sent by each of 16 ranks: ([0-9.]+)(?: to ([0-9.]+))? MiB", of_many[start + 2]
    )
    assert sent
    # Together they send the weights once; each number is rounded to 0.1 MiB.
    least, most = float(sent[1]), float(sent[2] or sent[1])
    assert 16 * (least - 0.05) <= whole <= 16 * (most + 0.05)
    assert not any("by rank" in line or "other node" in line for line in of_many)
    assert any("sent by rank 1" in line for line in of_list)
    per_rank = re.compile(r"#   as dp1 +\S+ MiB  per rank, and \S+ MiB of .*")
    assert any(per_rank.fullmatch(line) for line in of_list)


def test_a_dry_run_names_the_reward_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(tmp_path, ROWS, reward=rlsys.RewardConfig(num_workers=1))
    assert "# reward-0 and the store reserve nothing" in capsys.readouterr().out
    launch(tmp_path, ROWS, reward=rlsys.RewardConfig(num_workers=3))
    assert "# reward-0 .. reward-2 and the store reserve nothing" in capsys.readouterr().out


def test_a_dry_run_warns_about_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch(tmp_path, ROWS, sampling=rlsys.SamplingConfig(top_p=0.8))
    printed = capsys.readouterr().out
    assert "# warning: sampling.top_p=0.8: " in printed
    launch(tmp_path, ROWS)
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([], ["rows"]),
        (ROWS[:3], ["prompts_per_step=4", "3"]),
        (without_answer(5, None), ["answer", "1 of 8 rows", "row 5"]),
        (without_answer(5, math.nan), ["answer", "1 of 8 rows", "row 5"]),
        ([{"prompt": "1="} for _ in range(8)], ["'right'", "answer"]),
        ([{"prompt": None, "answer": "1"}] * 8, ["prompt", "row 0", "None"]),
        ([{"prompt": "\ud800", "answer": "1"}] * 8, ["prompt", "row 0"]),
    ],
)
def test_data_that_cannot_train_is_refused(tmp_path: Path, rows: Any, parts: list[str]) -> None:
    with refused(*parts):
        launch(tmp_path, rows)


def test_a_latin_1_dataset_is_refused_by_line(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "1=", "answer": "1"}), '{"prompt": "für", "answer": "1"}']
    path = tmp_path / "data.jsonl"
    path.write_bytes("\n".join(lines * 4).encode("latin-1"))
    with refused("data.source=", "UTF-8", "line 2", "iconv"):
        launch(tmp_path, data=rlsys.DataConfig(source=str(path)))


def damaged(tmp_path: Path, damage: Callable[[Path], object]) -> rlsys.ModelConfig:
    path = OwnModel(name="own", characters="0123456789=").build(tmp_path / "model", seed=0)
    damage(path)
    return rlsys.ModelConfig(path=str(path))


def remove_tokenizer(path: Path) -> None:
    for file in path.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (remove_tokenizer, "tokenizer"),
        (lambda p: (p / "tokenizer.json").write_text("{"), "tokenizer"),
        (lambda p: (p / "config.json").unlink(), "causal language model"),
        (lambda p: (p / "config.json").write_text("{"), "causal language model"),
        (lambda p: (p / "config.json").write_text("[]"), "causal language model"),
    ],
)
def test_an_incomplete_model_is_refused(
    tmp_path: Path, damage: Callable[[Path], object], part: str
) -> None:
    with refused("model.path=", part):
        launch(tmp_path, ROWS, model=damaged(tmp_path, damage))


def test_weights_that_are_nan_are_refused_by_name(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from rlsys.engines.models.causal_lm import load_causal_lm

    path = OwnModel(name="own", characters="0123").build(tmp_path / "model", seed=0)
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with refused("1 of 128", "model.norm.weight", "NaN"):
        load_causal_lm(path, dtype="float32")
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with refused("model.path=", "causal language model"):
        load_causal_lm(path, dtype="float32")


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("no/such/place", "hub name"),
        ("~/model", "hub name"),
        ("./model", "hub name"),
        (__file__, "a file"),
    ],
)
def test_a_path_without_a_model_is_refused(tmp_path: Path, path: str, part: str) -> None:
    with refused(f"model.path={os.path.expanduser(path)!r}", part):
        launch(tmp_path, ROWS, model=rlsys.ModelConfig(path=path))


def test_adapters_of_unknown_layers_are_refused(tmp_path: Path) -> None:
    with invalid("model.lora", "r4:q_proj,v_prj") as found:
        launch(tmp_path, ROWS, model=rlsys.ModelConfig(lora="r4:q_proj,v_prj"))
    assert "'v_prj'" in found.value.rule
    assert "q_proj, up_proj" in found.value.fix


def test_errors_of_held_out_rows_name_their_source(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"question": "1=", "answer": "1"}\n')
    evaluation = rlsys.HeldOutConfig(every=5, source=str(held_out))
    with refused("prompt", "evaluation.source", "held_out.jsonl"):
        launch(tmp_path, ROWS, evaluation=evaluation)
    missing = rlsys.HeldOutConfig(every=5, source="missing.jsonl")
    with refused("evaluation.source='missing.jsonl'"):
        launch(tmp_path, ROWS, evaluation=missing)
    held_out.write_text('{"prompt": "1=", "answer": "1"}\n')
    with refused("evaluation.num_prompts=1", "evaluation.source='"):
        launch(tmp_path, ROWS, evaluation=evaluation)


def test_an_evaluation_can_use_the_loss_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipes.sft import SFTConfig, sft

    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "completion": "2"}\n' * 4)
    config = SFTConfig(
        data=rlsys.DataConfig(source=str(rows)),
        evaluation=rlsys.HeldOutConfig(every=5, source=str(rows)),
        prompts_per_step=4,
        runs_dir=str(tmp_path),
    )
    rlsys.launch(config, sft(config), own_model=OwnModel(name="own"), dry_run=True)
    assert re.search("data: 4 prompts.*'completion'", capsys.readouterr().out)


def test_without_a_model_nothing_can_be_trained(tmp_path: Path) -> None:
    with invalid("model.path", ""):
        launch(tmp_path, ROWS, own_model=None)


@pytest.mark.parametrize("make", ["file", "parent is a file"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_runs_dir_that_cannot_be_made_is_refused(
    tmp_path: Path, make: str, dry_run: bool
) -> None:
    (tmp_path / "file").touch()
    runs_dir = tmp_path / "file" / ("runs" if make == "parent is a file" else "")
    flow = rlsys.Dataflow()
    flow.model("policy")
    config = QuickstartConfig(runs_dir=str(runs_dir))
    with refused("runs_dir=", "/file"):
        rlsys.launch(config, flow, own_model=OwnModel(name="a"), dry_run=dry_run)


@pytest.mark.slow
def test_a_swarm_node_with_a_damaged_log_is_refused_before_writing(
    tmp_path: Path,
) -> None:
    run = with_external_groups(made_up_run(4))
    settings: dict[str, Any] = {
        "name": "node",
        "runs_dir": str(tmp_path),
        "prompts_per_step": 2,
        "external_groups": 2,
        "group_size": 2,
        "num_steps": 99,
        "resume": True,
    }
    cfg = swarm.Config(**settings)
    order = {"seed": cfg.seed, "num_prompts": NUM_PROBLEMS}
    files = write_run(replace(run, prompt_order=order), tmp_path / "node")
    shutil.rmtree(files.hf)
    with RunDirectory(files.path) as directory:
        directory.write_config(to_dict(cfg))

    def content() -> dict[Path, bytes]:
        found = [path for path in files.path.rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in found if path.name != ".lock"}

    whole = files.external.read_bytes()
    # The log also has lines after the newest checkpoint, which is of an earlier step.
    shutil.rmtree(max(files.checkpoints.iterdir()))
    lines = whole.splitlines(keepends=True)
    for damaged, part in (
        (None, "missing"),
        (whole[:99], "0 lines"),
        (bytes(range(256)) * 99, " lines ("),
        (b"".join(lines[:-1]), f"prompt {len(lines) - 1}"),
        (whole + b"\xff\n", f"line {len(lines) + 1} "),
        (whole * 2, f"line {len(lines) + 1} "),
    ):
        files.external.unlink(missing_ok=True)
        if damaged is not None:
            files.external.write_bytes(damaged)
        before = content()
        with refused("external.jsonl", part):
            arithmetic.run(cfg, swarm.swarm)
        assert content() == before


def test_the_next_command_calls_the_interpreter_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The `python` of both environments links to the same file."""
    for name in (".venv", "other"):
        (tmp_path / name / "bin").mkdir(parents=True)
        for link in ("python", "python3"):
            (tmp_path / name / "bin" / link).symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python3"))
    with RunDirectory.create("runs", "first", {}) as directory:
        monkeypatch.setenv("PATH", str(tmp_path / ".venv" / "bin"))
        assert next_command(directory, "finished").startswith("rlsys ")
        monkeypatch.setenv("PATH", str(tmp_path / "other" / "bin"))
        command = next_command(directory, "finished")
    assert command == ".venv/bin/python3 -m rlsys report runs/first"
    monkeypatch.chdir("/")
    assert this_python() == str(tmp_path / ".venv" / "bin" / "python3").lstrip("/")


def test_the_next_command_exists_without_a_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with RunDirectory.create(tmp_path, "first", {}) as directory:
        assert next_command(directory, "finished").endswith(str(directory.path))


def test_a_model_that_was_never_exported_is_not_called_damaged(tmp_path: Path) -> None:
    history: Any = SimpleNamespace(checkpoint=SimpleNamespace(step=3), last_step=3)
    with RunDirectory.create(tmp_path, "first", {}) as directory:
        text = resume_note(history, rlsys.RunConfig(num_steps=3), directory)
        assert str(directory.hf) in text
        assert "damaged" not in text
        directory.hf.mkdir()
        text = resume_note(history, rlsys.RunConfig(num_steps=3), directory)
        assert "exported.json" in text


def test_a_jobs_next_command_names_the_users_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray runs a job in a temporary copy of the uploaded directory."""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with RunDirectory.create(tmp_path, "first", {}) as directory:
        command = next_command(directory, "finished")
    assert command == f"rlsys report {tmp_path / 'first'}"


def test_a_run_that_failed_needs_more_than_the_same_command(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "first", {}) as directory:
        interrupted = next_command(directory, "interrupted")
        failed = next_command(directory, "failed")
        assert interrupted in failed != interrupted
        directory.metrics.write_text('{"step": 1}\n')
        resumed = next_command(directory, "failed")
        assert failed in resumed
        assert 'resume="auto"' in resumed


def test_damaged_records_do_not_hide_the_error_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(*_: object) -> None:
        raise PoolDied("the judge died")

    config = rlsys.RunConfig(runs_dir=str(tmp_path))
    with RunDirectory.create(tmp_path, "first", {}) as directory:
        directory.metrics.write_bytes(b'{"step": 1}\n\xff\xfe\n')
        directory.evaluations.write_bytes(b"[]\n")
        job = SimpleNamespace(run=fail)
        prepared = (directory, job)
        launching = importlib.import_module("actors.run.launch")
        monkeypatch.setattr(launching, "_prepare", lambda *_, **__: prepared)
        with error_about(rlsys.RunFailed, "the judge died"):
            rlsys.launch(config, graph())
    assert "Failed: 1 of" in capsys.readouterr().out


# Arguments of the wrong type.


def graph(*rewards: Any) -> rlsys.Dataflow:
    flow = rlsys.Dataflow()
    prompts = rlsys.Prompts(config=rlsys.DataConfig(), rows=ROWS)
    rollouts = flow.generate(flow.model("policy"), prompts, group_size=2)
    flow.score(rollouts, rewards or [right])
    return flow


@pytest.mark.parametrize(
    ("arguments", "options", "field"),
    [
        ((None, None), {}, "config"),
        ((rlsys.parse, None), {}, "config"),
        ((rlsys.RunConfig(), None), {}, "flow"),
        ((rlsys.RunConfig(), graph), {}, "flow"),
        ((rlsys.RunConfig(), graph()), {"warm_start": 5}, "warm_start"),
        ((rlsys.RunConfig(), graph()), {"own_model": "own"}, "own_model"),
        ((rlsys.RunConfig(), graph()), {"held_out": ROWS}, "held_out"),
        ((rlsys.RunConfig(), graph()), {"dry_run": "yes"}, "dry_run"),
    ],
)
def test_arguments_of_launch_have_their_type(arguments: Any, options: Any, field: str) -> None:
    positional = dict(zip(("config", "flow"), arguments, strict=True))
    with invalid(f"launch: {field}", (positional | options)[field]):
        rlsys.launch(*arguments, **options)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 3),
        ("name", "a/b"),
        ("width", "wide"),
        ("width", 0),
        ("characters", ""),
        ("characters", "0120"),
    ],
)
def test_an_impossible_model_is_refused(field: str, value: Any) -> None:
    with invalid(f"OwnModel.{field}", value):
        OwnModel(**{"name": "own", field: value})


def test_all_mistakes_are_raised_together(tmp_path: Path) -> None:
    rows = [{"prompt": "1="} for _ in range(3)]
    with pytest.raises(InvalidValues) as found:
        launch(tmp_path, rows, group_size=4)
    mistakes = [str(error) for error in found.value.errors]
    for mistake, part in zip(mistakes, ("group_size", "prompts_per_step", "answer"), strict=True):
        assert part in mistake


def test_mistakes_of_evaluation_and_warm_start_are_raised_with_the_others(tmp_path: Path) -> None:
    warm_start = rlsys.WarmStart(num_steps=1, batches=iter([[]]), learning_rate=1e-3)
    with pytest.raises(InvalidValues) as found:
        launch(
            tmp_path,
            ROWS,
            prompts_per_step=16,
            evaluation=rlsys.HeldOutConfig(every=1),
            warm_start=warm_start,
        )
    fields = [error.field for error in found.value.errors if isinstance(error, InvalidValue)]
    assert fields[1:] == ["evaluation.every", "WarmStart.batches"]
    assert "prompts_per_step" in str(found.value.errors[0])


def test_characters_without_a_token_are_refused(tmp_path: Path) -> None:
    own = OwnModel(name="own", characters="0123456789")
    with refused("prompt", "row 0", "'0='", "'='"):
        launch(tmp_path, ROWS, own_model=own)


def test_a_dry_run_prints_what_the_model_sees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = OwnModel(name="own").build(tmp_path / "model", seed=0)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Prepend", "prepend": "> "}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    launch(tmp_path, ROWS, model=rlsys.ModelConfig(path=str(model)), data=in_order())
    assert "#   > 0=\n" in capsys.readouterr().out


def in_order() -> rlsys.DataConfig:
    return rlsys.DataConfig(shuffle=False)


@pytest.mark.parametrize("has_model", [True, False])
def test_a_run_directory_is_not_a_model(tmp_path: Path, has_model: bool) -> None:
    for name in ("config.json", "metrics.jsonl", *(["hf/config.json"] if has_model else [])):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("{}")
    with invalid("model.path", str(tmp_path / "run")) as found:
        launch(tmp_path, ROWS, model=rlsys.ModelConfig(path=str(tmp_path / "run")))
    assert (f"{tmp_path}/run/hf" in str(found.value)) == has_model


def test_a_tokenizer_with_more_tokens_than_its_model_is_refused(tmp_path: Path) -> None:
    def exchange_tokenizer(path: Path) -> None:
        build_tokenizer("0123456789=+").save_pretrained(path)

    with refused("model.path=", "14", "'+'"):
        launch(tmp_path, ROWS, model=damaged(tmp_path, exchange_tokenizer))


def test_an_error_of_a_layout_has_the_text_of_the_option(tmp_path: Path) -> None:
    with invalid("trainer.layout", "dp1tp3"):
        launch(tmp_path, ROWS, trainer=rlsys.TrainerConfig(layout="dp1tp3"))


def test_a_dry_run_warns_about_an_existing_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run can start under another name, but a resumed run cannot."""
    directory = tmp_path / "runs" / "run"
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    launch(tmp_path, ROWS)
    printed = capsys.readouterr().out
    assert f"# warning: name='run': {directory} " in printed
    with invalid("name", "run"):
        launch(tmp_path, ROWS, resume=True)
    launch(tmp_path, ROWS, resume="auto")  # starts a new run
    assert "warning" not in capsys.readouterr().out
    assert [path.name for path in directory.iterdir()] == ["metrics.jsonl"]


def test_a_dry_run_of_another_experiment_under_its_name_is_refused(tmp_path: Path) -> None:
    before = to_dict(config_of(tmp_path, seed=1))
    with RunDirectory.create(tmp_path / "runs", "run", before) as run:
        (run.checkpoints / "step_000001").mkdir()
    with invalid("seed", 0):
        launch(tmp_path, ROWS, resume=True)
    with invalid(str(run.checkpoints / "step_000001")):
        launch(tmp_path, ROWS, resume=True, seed=1)


# Warm starts.


def test_a_dry_run_checks_the_first_batch_of_a_warm_start_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = OwnModel(name="own", characters="0123456789=")
    lessons = warm_start([("1=", "1")], [("2=", "2")])
    launch(tmp_path, ROWS, own_model=own, warm_start=lessons)
    assert [lessons.batch(1), lessons.batch(2)] == [[("1=", "1")], [("2=", "2")]]
    with invalid("WarmStart.batches"):
        launch(tmp_path, ROWS, own_model=own, warm_start=warm_start())
    with refused("WarmStart.batches", "step 1", "'+'"):
        launch(tmp_path, ROWS, own_model=own, warm_start=warm_start([("1+1=", "2")]))


def warm_start(*batches: list[tuple[str, str]]) -> rlsys.WarmStart:
    return rlsys.WarmStart(num_steps=2, batches=iter(batches), learning_rate=1e-3)


def test_a_warm_start_needs_examples_for_each_step() -> None:
    lessons = warm_start([("1+1=", "2")], [])
    assert lessons.batch(1) == [("1+1=", "2")]
    with invalid("WarmStart.batches"):
        lessons.batch(2)
    with invalid("WarmStart.batches"):
        warm_start([("1+1=", "2")]).batch(2)


def test_batches_of_a_restarted_warm_start_are_the_same() -> None:
    lessons = warm_start([("1=", "1")], [("2=", "2")])
    assert [lessons.batch(1), lessons.batch(2)] == [lessons.batch(1), lessons.batch(2)]


def test_an_example_of_a_warm_start_is_a_pair_of_texts() -> None:
    wrong: Any = ["1+1=", "2"]
    with invalid("WarmStart.batches", "1+1="):
        warm_start(wrong).batch(1)
    batches: Any = [[("1+1=", "2")]]
    with invalid("WarmStart.batches", batches):
        rlsys.WarmStart(num_steps=1, batches=batches, learning_rate=1e-3)


@pytest.mark.parametrize(
    ("num_steps", "rate", "field"),
    [
        ("1", 1e-3, "num_steps"),
        (1, "x", "learning_rate"),
        (-1, 1e-3, "num_steps"),
        (1, math.nan, "learning_rate"),
        (1, math.inf, "learning_rate"),
        (1, 0.0, "learning_rate"),
    ],
)
def test_an_impossible_warm_start_is_refused(num_steps: Any, rate: Any, field: str) -> None:
    with invalid(f"WarmStart.{field}"):
        rlsys.WarmStart(num_steps=num_steps, batches=iter([]), learning_rate=rate)


def test_an_empty_batch_of_a_warm_start_is_refused_at_construction() -> None:
    with refused("warm_start_batch=0"):
        QuickstartConfig(warm_start_batch=0)


# Threads and notebooks.


async def name_of_the_thread() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def fails() -> None:
    raise ValueError("failed")


def test_work_runs_in_this_thread_without_a_running_loop() -> None:
    assert run_to_end(name_of_the_thread) == threading.current_thread().name
    with error_about(ValueError, "failed"):
        run_to_end(fails)


def test_work_runs_in_another_thread_of_a_notebook() -> None:
    async def notebook() -> str:
        with error_about(ValueError, "failed"):
            run_to_end(fails)
        return run_to_end(name_of_the_thread)

    assert asyncio.run(notebook()) != threading.current_thread().name


def test_interrupting_a_notebook_cell_cancels_the_work() -> None:
    ended = []

    async def long() -> None:
        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C reaches the waiting main thread
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("in good order")

    async def notebook() -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            run_to_end(long)

    before = signal.getsignal(signal.SIGINT)
    try:
        asyncio.run(notebook())
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == ["in good order"]


def test_a_dry_run_works_in_a_thread_and_in_a_running_loop(tmp_path: Path) -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(launch(tmp_path, ROWS).outcome))
    thread.start()
    thread.join(120)

    async def notebook() -> None:
        found.append(launch(tmp_path, ROWS).outcome)

    asyncio.run(notebook())
    assert found == ["dry run", "dry run"]


def test_a_second_run_of_the_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ends = threading.Event(), threading.Event()

    async def wait(*_: Any) -> None:
        started.set()
        assert await asyncio.to_thread(ends.wait, 120)

    monkeypatch.setattr(importlib.import_module("actors.run.launch"), "_dry_run", wait)
    thread = threading.Thread(target=lambda: launch(tmp_path, ROWS))
    thread.start()
    assert started.wait(120)
    try:
        with invalid("name", "second"):
            launch(tmp_path, ROWS, name="second")
    finally:
        ends.set()
        thread.join(120)
    launch(tmp_path, ROWS, name="second")


INTERRUPTED_PROGRAM = """
import asyncio, pathlib, sys, threading
import rlsys
from actors.run import launch
from tests.launch.small_run import ROWS, small_flow

class Endless:
    def __init__(self, *_): pass

    async def run(self, *_):
        print("under way", flush=True)
        await asyncio.Event().wait()

launch.Job = Endless
config = rlsys.RunConfig(prompts_per_step=4, group_size=2, runs_dir=sys.argv[1])
start = lambda: rlsys.launch(config, small_flow(config, ROWS), own_model=rlsys.OwnModel(name="own"))
threading.Thread(target=rlsys.main(start)).start()
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_run_in_a_thread_ends_with_the_main_thread(tmp_path: Path) -> None:
    process = started(INTERRUPTED_PROGRAM, str(tmp_path))
    assert process.stdout is not None
    while "under way" not in (line := process.stdout.readline()):
        assert line, process.communicate()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert "Interrupted: 0 of " in out
    assert err.rstrip().endswith("Interrupted.")
    assert process.returncode == 130


def test_too_few_open_files_are_an_error_before_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (48, 1024))
    config = rlsys.RunConfig(prompts_per_step=4, group_size=2, runs_dir=str(tmp_path / "runs"))
    with error_about(rlsys.RunFailed, "48"):
        rlsys.launch(config, small_flow(config, ROWS), own_model=OwnModel(name="own"))
    assert list(tmp_path.iterdir()) == []


READING_PROGRAM = """
import sys, time
import rlsys
from actors.run import launch
from tests.launch.small_run import ROWS, small_flow

def preflight(*_, **__):
    open(sys.argv[2], "w").close()  # a pipe of the test
    for _ in range(6000):
        time.sleep(0.1)
    print("read", file=sys.__stdout__, flush=True)

launch.preflight = preflight
config = rlsys.RunConfig(prompts_per_step=4, group_size=2, runs_dir=sys.argv[1])
dry_run = sys.argv[3:] == ["dry"]
start = lambda: rlsys.launch(
    config, small_flow(config, ROWS), own_model=rlsys.OwnModel(name="own"), dry_run=dry_run
)
rlsys.main(start)()
"""


@pytest.mark.parametrize(
    ("number", "options"),
    rest_slow(
        [(signal.SIGTERM, []), (signal.SIGINT, []), (signal.SIGHUP, []), (signal.SIGTERM, ["dry"])]
    ),
)
def test_a_signal_while_the_data_is_read_ends_the_run_at_once(
    tmp_path: Path, number: signal.Signals, options: list[str]
) -> None:
    pipe = tmp_path / "reading"
    os.mkfifo(pipe)
    process = started(READING_PROGRAM, str(tmp_path / "runs"), str(pipe), *options)
    pipe.read_text()  # until preflight has begun
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, out + err
    assert "read\n" not in out
    assert err == ""


# Exit codes and messages of a recipe.


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("wrong"), 1, "error: wrong\n"),
        (rlsys.RunFailed("failed"), 1, "error: failed\n"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (
            ValueError("the template raised \x1b[2J\x1b]0;gotcha\x07\n\x1b[31mred\x1b[0m 9\u20ac"),
            1,
            "error: the template raised \\x1b[2J\\x1b]0;gotcha\\x07\nred 9\u20ac\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_recipes_main_turns_errors_into_codes(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @rlsys.main
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    "error",
    [
        FloatingPointError("loss nan"),
        FunctionFailed("stage 'advantages': mine raised"),
        PoolDied("3 workers in a row died"),
    ],
)
def test_a_run_that_cannot_continue_fails_with_the_message(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def diverge(*_: Any) -> None:
        raise error

    monkeypatch.setattr(importlib.import_module("actors.run.launch"), "_dry_run", diverge)
    with pytest.raises(rlsys.RunFailed) as raised:
        launch(tmp_path, ROWS)
    assert str(raised.value) == str(error)


def test_a_bug_keeps_its_trace() -> None:
    @rlsys.main
    def main() -> None:
        raise AssertionError("a bug")

    with pytest.raises(AssertionError):
        main()


TALKS = """
import rlsys
from rlsys.runs.observe.advised_settings import AdvisedSettings
from rlsys.runs.observe.console import RunConsole

@rlsys.main
def main():
    console = RunConsole(
        num_steps=1, settings=AdvisedSettings(), rollouts_per_step=1, print_every=1, print_samples=0
    )
    for number in range(100_000):
        console.note(f"line {number}")
main()
"""


def test_a_closed_output_ends_the_recipe_quietly() -> None:
    process = started(TALKS)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "line 0\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=300) == 141


# A hub that cannot be reached.


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the hub to a port without a server."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "HTTP_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert constants.HF_HUB_OFFLINE is False
    assert "HF_HUB_OFFLINE" not in os.environ


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of the seconds of each sleep, which takes no time."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["nobody/has-this-model", "nobody-has-this-model"])
def test_a_hub_name_without_a_network_is_refused_at_once(
    tmp_path: Path, name: str, pauses: list[float]
) -> None:
    with refused(f"model.path='{name}'", "hub"):
        launch(tmp_path, ROWS, model=rlsys.ModelConfig(path=name))
    assert sum(pauses) < 1  # the retries of the hub's library take 23 s


@pytest.mark.usefixtures("no_network")
def test_a_hub_dataset_without_a_network_is_refused_at_once(
    tmp_path: Path, pauses: list[float]
) -> None:
    import datasets

    with refused("data.source='nobody/data'"):
        launch(tmp_path, data=rlsys.DataConfig(source="nobody/data"))
    assert sum(pauses) < 1
    assert datasets.config.HF_HUB_OFFLINE is False


def test_a_reward_model_without_weights_of_its_own_is_refused(tmp_path: Path) -> None:
    from recipes.ppo import PPOConfig, ppo

    config = PPOConfig(runs_dir=str(tmp_path), prompts_per_step=4)
    with invalid("reward_model.model.path", ""):
        rlsys.launch(config, ppo(config, [right], rows=ROWS), own_model=OwnModel(name="own"))


def test_an_interpreter_that_strips_docstrings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stripping = SimpleNamespace(flags=SimpleNamespace(optimize=2))
    monkeypatch.setattr("actors.run.launch.sys", stripping)
    with refused("PYTHONOPTIMIZE"):
        launch(tmp_path)
