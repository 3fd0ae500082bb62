"""Each tracker's own library: what was written is read back with the library's own API.

TensorBoard and W&B belong to the extra `dev`. The others are slow tests, which need
`pip install 'rlsys[trackers]' mlflow` (docs/trackers.md).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from rlsys.config.run_config import TrackerName
from rlsys.runs.evaluation_log import read_evaluations
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.observe.trackers.copy_run import copy_run
from rlsys.runs.observe.trackers.mlflow_tracker import accepted_name
from rlsys.runs.observe.trackers.run_trackers import RunTrackers
from rlsys.runs.observe.trackers.tracker_kinds import TRACKERS, check_trackers
from rlsys.runs.observe.trackers.tracker_process import TrackerLimits
from rlsys.runs.observe.trackers.tracker_protocol import COLUMNS
from rlsys.runs.observe.trackers.tracker_state import TrackerState, log_file, state_file
from tests.errors import invalid
from tests.runs.observe.tracked_runs import HOSTILE, TrackedFiles

# The libraries import for long on a busy machine.
PATIENT = TrackerLimits(operation_s=300.0, finish_s=300.0, failed_finish_s=300.0)


@dataclass
class Found:
    """What a tracker has, by step."""

    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    samples: dict[int, list[Any]] = field(default_factory=dict)
    """Rows, or whatever contains their prompts and completions."""

    def add(self, step: int, line: dict[str, float]) -> None:
        """Add a line, or the part of one."""
        lines = self.evaluations if any(name.startswith("eval/") for name in line) else self.metrics
        known = lines.setdefault(step, {})
        assert not known.keys() & line.keys(), f"step {step} has {line} twice"
        known |= line


def expected(directory: Path) -> Found:
    """What is in the files of the run."""
    found = Found()
    for line in read_metrics(directory / "metrics.jsonl"):
        found.metrics[int(line.pop("step"))] = line
    for line in read_evaluations(directory / "evaluations.jsonl"):
        step = int(line.pop("step"))
        found.evaluations[step] = {**line, "eval/step": step}
    return found


def write(directory: Path, name: str) -> int:
    """Write steps 1 to 5, resume after step 3, and write steps 4 to 8. Return the last step.

    Two evaluations end a step late.
    """
    for first_step, last_step, salt in ((0, 5, 0.0), (3, 8, 0.5)):
        files = TrackedFiles(directory, first_step=first_step)
        trackers = RunTrackers([name], directory, first_step=first_step, limits=PATIENT)
        if not first_step:
            files.evaluate(0)
        for step in range(first_step + 1, last_step + 1):
            files.write(step, salt=salt)
            trackers.stepped(step)
            if step in (3, 7):
                files.evaluate(step - 1)
                trackers.evaluated()
        trackers.close(failed=False)
        files.close()
        messages = [*trackers.messages()]
        assert [text for is_warning, text in messages if is_warning] == [], log(directory, name)
        assert len(messages) == 1  # the address
    return last_step


def log(directory: Path, name: str) -> str:
    return log_file(directory, TRACKERS[name].extra).read_text()


def assert_same(found: Found, directory: Path, *, exact: bool, rewinds: bool) -> None:
    """Compare with the files. Steps 4 and 5 were trained twice."""
    wanted = expected(directory)
    if not rewinds:
        for step in (4, 5):
            wanted.metrics[step]["loss"] -= 0.5
            found.metrics[step].pop("time/unix_s")
            wanted.metrics[step].pop("time/unix_s")
    if not exact:
        for line in (*wanted.metrics.values(), *wanted.evaluations.values()):
            line.update({name: float(np.float32(value)) for name, value in line.items()})
    assert found.metrics == wanted.metrics
    assert found.evaluations == wanted.evaluations
    assert sorted(found.samples) == [1, 2, 4, 6, 8]
    for step, rows in found.samples.items():
        assert [f"{step}.{index}" in str(row) for index, row in enumerate(rows)] == [True, True]


def needs(library: str) -> pytest.MarkDecorator:
    reason = f"{library} is not installed: pip install 'rlsys[{library}]'"
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=reason)


def test_tensorboard(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    write(tmp_path, "tensorboard")
    everything = {
        event_accumulator.SCALARS: 0,
        event_accumulator.TENSORS: 0,
    }
    reader = event_accumulator.EventAccumulator(
        str(tmp_path / "trackers" / "tensorboard"), size_guidance=everything
    )
    reader.Reload()
    found = Found()
    for name in reader.Tags()["scalars"]:
        for event in reader.Scalars(name):
            found.add(event.step, {name: event.value})
    for event in reader.Tensors("samples"):
        shape = [dim.size for dim in event.tensor_proto.tensor_shape.dim]
        cells = [cell.decode() for cell in event.tensor_proto.string_val]
        header, *rows = [
            cells[start : start + shape[1]] for start in range(0, len(cells), shape[1])
        ]
        assert header == list(COLUMNS)
        assert rows[0][2] == "    " + HOSTILE.replace("\n", "\n    ")
        found.samples[event.step] = rows
    assert_same(found, tmp_path, exact=False, rewinds=True)


HEADER_BYTES, BLOCK_BYTES, RECORD_HEADER = 7, 32768, "<IHB"  # of wandb's file, in LevelDB's format
FULL, LAST = 1, 4  # kinds of records that end a message


def messages(data: bytes) -> Iterator[bytes]:
    at, message = HEADER_BYTES, b""
    header = struct.calcsize(RECORD_HEADER)
    while at + header <= len(data):
        if (left := BLOCK_BYTES - at % BLOCK_BYTES) < header:
            at += left
            continue
        _, length, kind = struct.unpack_from(RECORD_HEADER, data, at)
        message += data[at + header : at + header + length]
        at += header + length
        if kind in (FULL, LAST):
            yield message
            message = b""


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path) -> None:
    wandb_internal_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    write(tmp_path, "wandb-offline")
    found, axes = Found(), {}
    for file in sorted(tmp_path.glob("trackers/wandb/offline-run-*/*.wandb")):
        for message in messages(file.read_bytes()):
            record: Any = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            if record.WhichOneof("record_type") == "metric":
                axes[record.metric.name] = record.metric.step_metric
            elif record.WhichOneof("record_type") == "history":
                line: dict[str, Any] = {}
                for item in record.history.item:
                    name = "/".join(item.nested_key) or item.key
                    if name.startswith("samples"):
                        line.setdefault("samples", {})[name] = json.loads(item.value_json)
                    elif not name.startswith("_"):
                        line[name] = json.loads(item.value_json)
                if "samples" in line:
                    table = line["samples"].get("samples", line["samples"])
                    path = table.get("path") or table["samples/path"]
                    content = json.loads((file.parent / "files" / path).read_text())
                    assert content["columns"] == list(COLUMNS)
                    assert content["data"][0][2] == HOSTILE
                    found.samples[line["step"]] = content["data"]
                elif "eval/step" in line:
                    found.add(line["eval/step"], line)
                else:
                    found.add(line.pop("step"), line)
    assert_same(found, tmp_path, exact=True, rewinds=False)
    assert axes.pop("step") == axes.pop("eval/step") == ""
    assert {axes[name] for name in axes if name.startswith("eval/")} == {"eval/step"}
    assert {axes[name] for name in axes if not name.startswith("eval/")} == {"step"}


@pytest.mark.slow
@needs("trackio")
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    write(tmp_path, "trackio")
    run_id = TrackerState.read(state_file(tmp_path, "trackio")).run_id
    program = (
        "import json, sys, trackio\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "lines = SQLiteStorage.get_logs('rlsys', sys.argv[1])\n"
        "print(json.dumps(lines, default=str))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program, str(run_id)], check=True, capture_output=True, timeout=300
    ).stdout
    found = Found()
    for line in json.loads(output.splitlines()[-1]):
        step = line.pop("step")
        line.pop("timestamp")
        if "samples" in line:
            rows = line["samples"]["_value"]
            assert rows[0]["prompt"] == HOSTILE
            found.samples[step] = rows
        else:
            found.add(step, line)
    assert_same(found, tmp_path, exact=True, rewinds=False)


@pytest.mark.slow
@needs("swanlab")
def test_swanlab_offline(tmp_path: Path) -> None:
    write(tmp_path, "swanlab-offline")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found = Found()
    for file in sorted(tmp_path.glob("trackers/swanlab/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "scalar":
                scalar = record.scalar
                found.add(scalar.step, {scalar.key: scalar.value.number})
            elif record.WhichOneof("record_type") == "media":
                texts = file.parent / "media" / "text"
                names = [item.filename for item in record.media.value.items]
                rows = [(texts / name).read_text() for name in names]
                assert HOSTILE in rows[0]
                found.samples[record.media.step] = rows
    assert_same(found, tmp_path, exact=True, rewinds=False)


def mlflow_python() -> str:
    """The Python of an environment with MLflow's server; mlflow-skinny has none."""
    return os.environ.get("RLSYS_TEST_MLFLOW_PYTHON", sys.executable)


class MlflowServer:
    """A tracking server with its database in a directory."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._directory = directory
        self.uri = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Start the server and wait until it answers."""
        store = f"sqlite:///{self._directory}/mlflow.db"
        command = [mlflow_python(), "-m", "mlflow", "server", "--workers", "1"]
        command += ["--backend-store-uri", store, "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--artifacts-destination", str(self._directory / "artifacts")]
        environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
        with (self._directory / "server.log").open("ab") as log_of_server:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdout=log_of_server,
                stderr=log_of_server,
                start_new_session=True,
            )
        deadline = time.monotonic() + 300
        while not self._is_healthy():
            assert self._process.poll() is None, (self._directory / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)  # between attempts to connect

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """Kill the server and its workers."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture
def mlflow_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowServer]:
    (tmp_path / "server").mkdir()
    server = MlflowServer(tmp_path / "server")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    yield server
    server.kill()


def in_mlflow(directory: Path) -> Found:
    from mlflow import MlflowClient

    client = MlflowClient()
    run_id = TrackerState.read(state_file(directory, "mlflow")).run_id
    assert run_id is not None
    found = Found()
    for name in client.get_run(run_id).data.metrics:
        if name == "step":
            continue
        for one in client.get_metric_history(run_id, name):
            found.add(one.step, {name: one.value})
    for artifact in client.list_artifacts(run_id, "samples"):
        table = json.loads(Path(client.download_artifacts(run_id, artifact.path)).read_text())
        assert table["columns"] == list(COLUMNS)
        assert table["data"][0][2] == HOSTILE
        found.samples[int(artifact.path.removesuffix(".json")[-8:])] = table["data"]
    return found


def with_accepted_names(found: Found) -> Found:
    for lines in (found.metrics, found.evaluations):
        for step, line in lines.items():
            lines[step] = {accepted_name(name): value for name, value in line.items()}
    return found


@pytest.mark.slow
@needs("mlflow")
def test_mlflow(tmp_path: Path, mlflow_server: MlflowServer) -> None:
    directory = tmp_path / "run"
    write(directory, "mlflow")
    found, wanted = in_mlflow(directory), with_accepted_names(expected(directory))
    for step in (4, 5):  # trained twice
        wanted.metrics[step]["loss"] -= 0.5
        for side in (found, wanted):
            side.metrics[step].pop("time/unix_s")
    assert found.metrics == wanted.metrics
    assert found.evaluations == wanted.evaluations
    assert sorted(found.samples) == [1, 2, 4, 6, 8]


@pytest.mark.slow
@needs("mlflow")
def test_mlflow_whose_server_dies_and_comes_back(
    tmp_path: Path, mlflow_server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first run could not send is copied afterwards."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    directory = tmp_path / "run"
    files = TrackedFiles(directory)
    limits = TrackerLimits(operation_s=60.0, first_delay_s=0.1, finish_s=120.0)
    trackers = RunTrackers(["mlflow"], directory, limits=limits)
    files.train(range(1, 4), trackers.stepped)
    while not [*trackers.messages()]:  # until the run is open
        time.sleep(0.1)
    mlflow_server.kill()
    files.train(range(4, 7), trackers.stepped)
    trackers.close(failed=False)
    files.close()
    warnings = [text for is_warning, text in trackers.messages() if is_warning]
    assert 1 <= len(warnings) <= 2
    mlflow_server.start()
    assert copy_run(directory, ["mlflow"], limits=PATIENT) == []
    found = in_mlflow(directory)
    assert found.metrics == with_accepted_names(expected(directory)).metrics


def test_names_that_mlflow_accepts() -> None:
    names = ["eval/pass@4", "rollouts/dropped/replica died", "a(b)=ü", "time/wait_s/train"]
    assert [accepted_name(name) for name in names] == [
        "eval/pass_at_4",
        "rollouts/dropped/replica died",
        "a_b__" + "_",
        "time/wait_s/train",
    ]


def test_names_of_trackers_are_those_of_the_configuration() -> None:
    assert set(get_args(TrackerName)) == set(TRACKERS)


def test_a_tracker_that_is_not_installed_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, kind in TRACKERS.items():
        with invalid("trackers", name) as error:
            check_trackers([name])
        assert f"rlsys[{kind.extra}]" in error.value.fix


def test_trackers_that_are_unknown_repeated_or_lack_their_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with invalid("trackers", "aim"):
        check_trackers(["wandb", "aim"])
    with invalid("trackers", "wandb-offline"):
        check_trackers(["wandb", "wandb-offline"])
    with invalid("trackers", "mlflow"):
        check_trackers(["mlflow"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    check_trackers(["tensorboard", "wandb", "mlflow"])
