"""What scripts/submit.sh does: uploads a recipe, submits it as a Ray job, and follows it.

A recipe of the checkout is uploaded with the checkout. One from elsewhere is uploaded with the
directory that it lies in, and the checkout's packages beside it.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.job_submission import JobStatus, JobSubmissionClient

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rlsys", "actors", "recipes")

USAGE = "usage: bash scripts/submit.sh RECIPE.py [ARGS...]"

# A head node takes jobs some seconds after `ray start` has returned; on a busy machine, later.
AGENT_TIMEOUT_S = 90.0
NO_AGENT = "No available agent"

# Between a job's last line and its status.
STATUS_TIMEOUT_S = 30.0

# After `ray job stop`, Ray would kill the run 3 s later; ending in good order can take longer.
STOP_WAIT_S = 60


def upload(recipe: str) -> tuple[str, dict[str, Any]]:
    """The recipe's path within the upload, and the job's runtime environment.

    Ray leaves .git, .venv and whatever .gitignore names out of it: runs/ among it. Raises
    ValueError for what is no file.
    """
    path = Path(recipe)
    if not path.is_file() and not path.is_absolute():  # as it is written in the documentation
        path = ROOT / recipe
    if not path.is_file():
        raise ValueError(f"{recipe} is no file (looked in {Path.cwd()} and {ROOT})")
    path = path.resolve()
    environment: dict[str, Any] = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}}
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT)), {**environment, "working_dir": str(ROOT)}
    modules = [str(ROOT / package) for package in PACKAGES]
    return path.name, {**environment, "working_dir": str(path.parent), "py_modules": modules}


def connect(address: str) -> JobSubmissionClient:
    """Raises ConnectionError where no cluster answers."""
    try:
        return JobSubmissionClient(address)
    except ConnectionError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address}; name one, export "
            "RAY_API_SERVER_ADDRESS=http://HEAD:8265, or start one here, ray start --head (see "
            "docs/cluster.md)"
        ) from error


def submit(client: JobSubmissionClient, entrypoint: str, environment: dict[str, Any]) -> str:
    """The job's id. Waits until the head node takes jobs; raises RuntimeError where it does not."""
    deadline = time.monotonic() + AGENT_TIMEOUT_S
    told = False
    while True:
        try:
            return str(client.submit_job(entrypoint=entrypoint, runtime_env=environment))
        except RuntimeError as error:
            if NO_AGENT not in str(error) or time.monotonic() > deadline:
                raise
        if not told:
            print("The cluster has just started; waiting until it takes jobs ...", flush=True)
            told = True
        time.sleep(1)


async def follow(client: JobSubmissionClient, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)


def final_status(client: JobSubmissionClient, job: str) -> JobStatus:
    deadline = time.monotonic() + STATUS_TIMEOUT_S
    while not (status := client.get_job_status(job)).is_terminal():
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    return status


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(f"error: no recipe; {USAGE}", file=sys.stderr)
        return 2
    try:
        recipe, environment = upload(arguments[0])
    except ValueError as error:
        print(f"error: {error}; {USAGE}", file=sys.stderr)
        return 2
    address = os.environ.get("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265")
    entrypoint = shlex.join(["python", recipe, *arguments[1:]])
    try:
        client = connect(address)
        job = submit(client, entrypoint, environment)
        print(f"Job {job} was submitted to {address}.", flush=True)
        asyncio.run(follow(client, job))
        status = final_status(client, job)
    except KeyboardInterrupt:
        print(f"\nThe job goes on; `ray job stop --address {address} ID` ends it.")
        return 130
    except (RuntimeError, ConnectionError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"Job {job}: {status.value.lower()}.")
    return 0 if status is JobStatus.SUCCEEDED else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
