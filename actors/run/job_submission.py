"""Upload a recipe, submit it as a Ray job and follow its output, for `rlsys submit`.

A recipe of the checkout is uploaded with the checkout. Another one is uploaded with its directory
and the packages of rlsys, so that the cluster runs the same version.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import shlex
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ray.job_submission import JobStatus, JobSubmissionClient

from rlsys.errors import RunFailed, require

# The checkout, or the directory of installed packages.
ROOT = Path(__file__).resolve().parents[2]
IS_CHECKOUT = not (ROOT / "rlsys_actors").is_dir()  # as the wheel calls the package
PACKAGES = ("rlsys", "actors", "recipes") if IS_CHECKOUT else ("rlsys", "rlsys_actors")

# A head node accepts jobs some seconds after `ray start` has returned, later on a busy machine.
AGENT_TIMEOUT_S = 90.0
NO_AGENT = "No available agent"

# The head node's agent accepts jobs. It ends if another program has this port.
AGENT_PORT = 52365
AGENT_OPTION = "--dashboard-agent-listen-port"
LOCAL = ("127.0.0.1", "localhost", "::1", socket.gethostname())
PROBE_TIMEOUT_S = 2.0

# Time limit between a job's last line and its final status.
STATUS_TIMEOUT_S = 30.0

# Ray would kill the run 3 s after `ray job stop`; a regular end can take longer.
STOP_WAIT_S = 60


def upload(recipe: str) -> tuple[str, dict[str, Any]]:
    """Return the recipe's path within the upload, and the job's runtime environment.

    Ray leaves out .git, .venv and everything in .gitignore, such as runs/.

    Raises:
        InvalidValue: The recipe is not a file.
    """
    path = Path(recipe)
    if not path.is_file() and not path.is_absolute() and IS_CHECKOUT:
        path = ROOT / recipe  # as it is written in the documentation
    places = dict.fromkeys([str(Path.cwd()), *([str(ROOT)] if IS_CHECKOUT else [])])
    require(
        path.is_file(),
        "RECIPE",
        recipe,
        rule=f"is not a file in {' or '.join(places)}",
        fix="Give the file of a recipe.",
    )
    path = path.resolve()
    environment: dict[str, Any] = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}}
    if IS_CHECKOUT and path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT)), {**environment, "working_dir": str(ROOT)}
    modules = [str(ROOT / package) for package in PACKAGES]
    return path.name, {**environment, "working_dir": str(path.parent), "py_modules": modules}


def connect(address: str) -> JobSubmissionClient:
    """Return a client of the cluster.

    Raises:
        ConnectionError: No cluster answers.
    """
    try:
        return JobSubmissionClient(address)
    except ConnectionError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address}. Export "
            "RAY_API_SERVER_ADDRESS=http://HEAD:8265, or start one here with ray start --head "
            "(see docs/cluster.md)"
        ) from error


def agent_fault(address: str, port: int = AGENT_PORT) -> str | None:
    """Return why the head node's agent cannot run, or None.

    The cause is known if this is the head node and another program has the agent's port.
    """
    if urlsplit(address).hostname not in LOCAL:
        return None
    url = f"http://127.0.0.1:{port}/api/local_raylet_healthz"
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S) as answer:
            if answer.status == 200:  # an agent
                return None
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):  # nothing is there yet
            return None
    except (OSError, http.client.HTTPException):  # another program without HTTP
        pass
    return f"port {port} is used by another program, so Ray's agent, which accepts jobs, has ended"


def agent_advice(port: int = AGENT_PORT) -> str:
    """Return how to start a head node whose agent has another port."""
    return (
        f"End that program, or restart the head node with another port: ray stop; ray start --head "
        f"{AGENT_OPTION}={port + 1}. rlsys doctor checks every port"
    )


def submit(
    client: JobSubmissionClient, entrypoint: str, environment: dict[str, Any], address: str
) -> str:
    """Wait until the head node accepts jobs, submit one, and return its id.

    Raises:
        RuntimeError: The head node accepts no jobs; the message has the cause.
    """
    deadline = time.monotonic() + AGENT_TIMEOUT_S
    reported = False
    while True:
        try:
            return str(client.submit_job(entrypoint=entrypoint, runtime_env=environment))
        except RuntimeError as error:
            if NO_AGENT not in str(error):
                raise
            if (fault := agent_fault(address)) is not None:
                raise RuntimeError(f"{fault}. {agent_advice()}") from error
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the cluster at {address} accepted no job within {AGENT_TIMEOUT_S:g} s: the "
                    f"agent of its head node is not running. If another program or cluster has its "
                    f"port {AGENT_PORT}: {agent_advice()}. Its log is "
                    "/tmp/ray/session_latest/logs/dashboard_agent.log there"
                ) from error
        if not reported:
            print("The cluster has just started; waiting until it accepts jobs ...", flush=True)
            reported = True
        time.sleep(1)


async def follow(client: JobSubmissionClient, job: str) -> None:
    """Print the output of a job until it ends."""
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)


def final_status(client: JobSubmissionClient, job: str) -> JobStatus:
    """Return the status of a job that has ended."""
    deadline = time.monotonic() + STATUS_TIMEOUT_S
    while not (status := client.get_job_status(job)).is_terminal():
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    return status


def run_job(recipe: str, arguments: Sequence[str]) -> int:
    """Submit the recipe, follow its output and return the exit code.

    Raises:
        InvalidValue: The recipe is not a file.
        RunFailed: No cluster answers, or it accepts no jobs.
    """
    path, environment = upload(recipe)
    address = os.environ.get("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265")
    entrypoint = shlex.join(["python", path, *arguments])
    try:
        client = connect(address)
        job = submit(client, entrypoint, environment, address)
        print(f"Job {job} was submitted to {address}.", flush=True)
        asyncio.run(follow(client, job))
        status = final_status(client, job)
    except KeyboardInterrupt:
        print(f"\nThe job continues. `ray job stop --address {address} ID` ends it.")
        return 130
    except (RuntimeError, ConnectionError) as error:
        raise RunFailed(str(error)) from error
    print(f"Job {job}: {status.value.lower()}.")
    return 0 if status is JobStatus.SUCCEEDED else 1
