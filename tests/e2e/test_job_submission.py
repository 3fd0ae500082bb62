"""`rlsys submit` against a cluster that `ray start --head` made, with its own token."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from actors.cluster.cluster_checks import SUBMITTED, check_runs_dir
from actors.run import job_submission
from actors.run.job_submission import connect, submit, upload
from rlsys.commands import submit_command
from rlsys.errors import NOT_GIVEN
from rlsys.runs.audit import audit
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.run_history import read_evidence
from tests.e2e.job import PATIENCE_S, ROOT, SMALL_QUICKSTART, Job, copied, start, start_command
from tests.e2e.own_recipe import SMALL_COUNTING, own_recipe
from tests.errors import invalid

SUBMIT = (sys.executable, "-m", "rlsys", "submit")
BIN = Path(sys.executable).parent  # directory of `ray` and `python`
CHECKOUT = ("actors", "recipes", "rlsys", "scripts", ".gitignore")
NOT_UPLOADED = (".git", ".venv", "runs", "rlsys/__pycache__")

# The quickstart, which also records where its process and its reward's process find their imports,
# and what was uploaded.
PROBE = """
import json
import os
from pathlib import Path

import actors
import recipes.quickstart as recipe
import rlsys

RECORDS = Path({recorded!r})


def record(who: str) -> None:
    files = [module.__file__ for module in (actors, recipe, rlsys)]
    RECORDS.joinpath(who).write_text(json.dumps({{"directory": os.getcwd(), "files": files}}))


@rlsys.reward
def recorded(rollout: rlsys.Rollout) -> float:
    record("reward")
    return 1.0


record("entrypoint")
RECORDS.joinpath("upload").write_text(json.dumps([str(path) for path in Path().rglob("*")]))
recipe.correct = recorded
recipe.main()
"""


# Processes of a run: the recipe and Ray's actors.
OF_THE_RUN = re.compile(r"\bquickstart\.py\b|ray::\w*(Actor|Shard|Holder)\b")


@dataclass(kw_only=True)
class Head:
    """A running head node."""

    job: Job
    address: str
    environment: dict[str, str]  # environment of authorized clients

    def submit(
        self, checkout: Path, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*SUBMIT, *arguments],
            cwd=checkout,
            env={**self.environment, "RAY_API_SERVER_ADDRESS": self.address, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOME": str(tmp_path),  # the token is below it
        "RAY_AUTH_MODE": "token",
        "RAY_worker_niceness": "0",  # otherwise actors may not run for minutes on a busy machine
    }
    environment.pop("RAY_ADDRESS", None)
    subprocess.run(
        [BIN / "ray", "get-auth-token", "--generate"],
        env=environment,
        stdout=subprocess.DEVNULL,
        timeout=PATIENCE_S,
        check=True,
    )
    port = free_port()
    # Socket paths are below it, and limited to 107 characters.
    short = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
    with short as directory:
        options = {
            "port": 0,
            "dashboard-port": port,
            "dashboard-agent-listen-port": 0,
            "dashboard-agent-grpc-port": 0,
            "ray-client-server-port": free_port(),
            "min-worker-port": 0,
            "max-worker-port": 0,
            "num-cpus": 2,
            "object-store-memory": 80 * 2**20,
            "temp-dir": directory,
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        job = start(
            str(BIN / "ray"), ["start", "--head", "--block", *arguments], tmp_path, **environment
        )
        try:
            job.wait_for_output("will now block forever")
            yield Head(job=job, address=f"http://127.0.0.1:{port}", environment=environment)
            job.process.terminate()
            job.wait()
            assert job.left_behind() == {}
        finally:
            job.end()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of this checkout, with other files that a used one contains."""
    copy = copied(CHECKOUT, tmp_path / "checkout")
    for name in NOT_UPLOADED:
        (copy / name).mkdir(exist_ok=True)
        (copy / name / "large").write_bytes(bytes(1000))
    return copy


@pytest.mark.slow
def test_a_submitted_quickstart_trains_from_its_upload(
    head: Head, checkout: Path, tmp_path: Path
) -> None:
    (checkout / "recipes" / "probe.py").write_text(PROBE.format(recorded=str(tmp_path)))
    runs = ["--runs-dir", str(tmp_path / "runs")]

    refused = head.submit(checkout, "recipes/probe.py", *runs, RAY_AUTH_TOKEN="f" * 64)
    assert refused.returncode == 1
    assert "Invalid authentication token" in refused.stdout  # Ray's message

    submitted = head.submit(checkout, "recipes/probe.py", *SMALL_QUICKSTART, *runs)
    assert submitted.returncode == 0, submitted.stdout
    assert "3 of 3 steps" in submitted.stdout
    lines = read_metrics(tmp_path / "runs" / "quickstart" / "metrics.jsonl")
    assert [line["reward/mean"] for line in lines] == [1.0, 1.0, 1.0]

    entrypoint, reward = (
        json.loads((tmp_path / who).read_text()) for who in ("entrypoint", "reward")
    )
    upload = Path(entrypoint["directory"])
    assert "working_dir_files" in upload.parts
    for recorded in (entrypoint, reward):
        assert all(Path(file).is_relative_to(upload) for file in recorded["files"]), recorded
    uploaded = json.loads((tmp_path / "upload").read_text())
    assert "recipes/data/gsm8k/train.jsonl" in uploaded
    # Python may have written its own cache by now.
    assert not {f"{name}/large" for name in NOT_UPLOADED} & set(uploaded)


@pytest.mark.slow
def test_a_recipe_outside_the_checkout_trains(head: Head, checkout: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "beside.py").write_text("NAME = 'counting'\n")
    (project / "mine.py").write_text(
        own_recipe().replace("import rlsys\n", "import rlsys\nimport beside\n", 1)
    )
    arguments = [*SMALL_COUNTING, "--runs-dir", str(tmp_path / "runs")]
    submitted = head.submit(checkout, str(project / "mine.py"), *arguments)
    assert submitted.returncode == 0, submitted.stdout
    assert "2 of 2 steps" in submitted.stdout


@pytest.mark.slow
def test_ray_job_stop_ends_a_run_cleanly(head: Head, checkout: Path, tmp_path: Path) -> None:
    arguments = [*SMALL_QUICKSTART, "--num-steps", "100000", "--runs-dir", str(tmp_path / "runs")]
    job = start_command(
        [*SUBMIT, "recipes/quickstart.py", *arguments],
        tmp_path,
        checkout,
        **head.environment,
        RAY_API_SERVER_ADDRESS=head.address,
    )
    try:
        job.wait_for_step(tmp_path / "runs" / "quickstart", 1)
        submission = re.search(r"raysubmit_\w+", job.output)
        assert submission is not None
        subprocess.run(
            [BIN / "ray", "job", "stop", "--address", head.address, submission[0]],
            env=head.environment,
            stdout=subprocess.DEVNULL,
            timeout=PATIENCE_S,
            check=True,
        )
        job.wait()
        assert "Interrupted" in job.output
        assert "Traceback" not in job.output
    finally:
        job.end()


@pytest.mark.slow
def test_a_killed_job_resumes_when_it_is_submitted_again(
    head: Head, checkout: Path, tmp_path: Path
) -> None:
    # With the same command, as a retry uses.
    options = shlex.split("--num-steps 12 --checkpoint-every 2 --resume auto")
    arguments = [*SMALL_QUICKSTART, *options, "--runs-dir", str(tmp_path / "runs")]
    command = [*SUBMIT, "recipes/quickstart.py", *arguments]
    directory = tmp_path / "runs" / "quickstart"
    job = start_command(
        command, tmp_path, checkout, **head.environment, RAY_API_SERVER_ADDRESS=head.address
    )
    try:
        job.wait_for_step(directory, 5)
        job.wait_for_checkpoint(directory)
        killed = [
            pid for pid, recorded in head.job.processes().items() if OF_THE_RUN.search(recorded)
        ]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        assert job.wait() != 0, job.output
    finally:
        job.end()
    assert len(read_metrics(directory / "metrics.jsonl")) < 12
    again = head.submit(checkout, "recipes/quickstart.py", *arguments)
    assert again.returncode == 0, again.stdout
    assert "12 of 12 steps" in again.stdout
    evidence, damages = read_evidence(directory)
    verdict = audit(evidence)
    assert [*damages, *verdict.faults] == []
    assert "1 resume," in verdict.summary


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([], NOT_GIVEN),
        (["--name", "first"], "--name"),
        (["recipes/none.py"], "recipes/none.py"),
        (["recipes"], "recipes"),
    ],
)
def test_submit_requires_a_file(
    arguments: list[str], value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with invalid("RECIPE", value):
        submit_command.main(arguments)


def test_the_error_of_submit_without_a_cluster_names_the_remedies() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # not listening
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ConnectionError) as failed:
            connect(address)
        assert "RAY_API_SERVER_ADDRESS=" in str(failed.value)
        assert "ray start --head" in str(failed.value)


def test_a_recipe_of_the_checkout_is_uploaded_with_it(tmp_path: Path) -> None:
    for recipe in ("recipes/quickstart.py", str(ROOT / "recipes" / "quickstart.py")):
        path, environment = upload(recipe)
        assert (path, environment["working_dir"]) == ("recipes/quickstart.py", str(ROOT))
        assert "py_modules" not in environment


def test_another_recipe_is_uploaded_with_its_directory_and_the_packages(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").touch()
    path, environment = upload(str(tmp_path / "mine.py"))
    assert (path, environment["working_dir"]) == ("mine.py", str(tmp_path))
    assert [Path(m).name for m in environment["py_modules"]] == ["rlsys", "actors", "recipes"]


class HeadThatHasJustStarted:
    """Head that accepts a job only after `refusals` requests."""

    def __init__(self, refusals: int, reason: str) -> None:
        self.refusals = refusals
        self.reason = reason

    def submit_job(self, **_: object) -> str:
        self.refusals -= 1
        if self.refusals >= 0:
            raise RuntimeError(f"Request failed with status code 500: {self.reason}.")
        return "raysubmit_1"


HEAD = "http://127.0.0.1:8265"


def test_submit_waits_until_the_head_accepts_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setattr(job_submission, "agent_fault", lambda address: None)
    agent = "No available agent to submit job, please try again later"
    assert submit(HeadThatHasJustStarted(3, agent), "python x.py", {}, HEAD) == "raysubmit_1"
    assert len(waited) == 3
    with pytest.raises(RuntimeError) as refused:
        submit(
            HeadThatHasJustStarted(1, "disk is full"), "python x.py", {}, "http://127.0.0.1:8265"
        )
    assert "disk is full" in str(refused.value)
    monkeypatch.setattr(job_submission, "AGENT_TIMEOUT_S", -1.0)
    with pytest.raises(RuntimeError) as refused:
        submit(HeadThatHasJustStarted(1, agent), "python x.py", {}, HEAD)
    assert "52365" in str(refused.value)


def test_a_submitted_job_requires_an_absolute_runs_dir(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(SUBMITTED, raising=False)
    check_runs_dir("runs")
    monkeypatch.setenv(SUBMITTED, "{}")
    check_runs_dir(str(tmp_path))
    with invalid("runs_dir", "runs"):
        check_runs_dir("runs")
