"""Reward functions that break their process cost no other call its reward."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlsys.rewards import reward
from rlsys.rewards.process_environment import without_secrets
from rlsys.types import Rollout
from tests.rewards.reward_harness import (
    PATIENCE_S,
    Result,
    failure,
    rollout,
    rollouts,
    run,
    running,
    score,
    total,
    wait_until,
)
from tests.tiers import rest_slow

LIMIT_S = 1.0
GIB = 2**30

NUM_GOOD = 12


def end_process() -> float:
    os._exit(1)


def kill_process() -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def stop_process() -> float:
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


def read_nowhere() -> float:
    return float(ctypes.c_int.from_address(8).value)


def backtrack() -> float:
    return float(re.fullmatch(r"(a|aa)+b", "a" * 60) is not None)


def own_files() -> list[int]:
    """Return the descriptors above standard error."""
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2]


def write_everywhere() -> float:
    for fd in own_files():
        try:
            os.write(fd, b"\xff" * 64)
        except OSError:
            continue
    time.sleep(3600)
    return 1.0


def write_everywhere_and_return() -> float:
    for fd in own_files():
        with contextlib.suppress(OSError):
            os.write(fd, os.urandom(5000))
    return 1.0


def allocate() -> float:
    return float(np.ones(8 * GIB, np.uint8).sum())


def allocate_slowly() -> float:
    pieces = []
    while True:
        pieces.append(bytearray(b"x" * 2**20))


def allocate_elsewhere() -> float:
    """Stay within the limit in each process, and exceed it in all together."""
    program = "import time; x = b'x' * (300 << 20); time.sleep(3600)"
    children = [subprocess.Popen([sys.executable, "-S", "-c", program]) for _ in range(6)]
    return float(sum(child.wait() for child in children))


def fork_without_end() -> float:
    while True:
        if os.fork() == 0:
            time.sleep(3600)


ACTS = {
    "os._exit": (end_process, "crash", "ended with exit code 1, alone with it"),
    "kill": (kill_process, "crash", "was ended by SIGKILL"),
    "stop": (stop_process, "crash", "SIGSTOP"),
    "segfault": (read_nowhere, "crash", "was ended by SIGSEGV"),
    "backtrack": (backtrack, "timeout", f"took longer than {LIMIT_S:g} s"),
    "allocate": (allocate, "memory", "MemoryError"),
    "allocate slowly": (allocate_slowly, "memory", "MemoryError"),
    "allocate elsewhere": (allocate_elsewhere, "memory", "more than reward.memory_gib=1"),
    "fork": (fork_without_end, "crash", "had started more than"),
}


def acting(act: Any) -> Any:
    """Return a reward that calls `act` on the third rollout. The others take some time."""

    def acts(rollout: Rollout) -> Any:
        if rollout.index == 2:
            return act()
        time.sleep(0.05)
        return float(rollout.index)

    return acts


def check(results: list[Result], act: str) -> None:
    _, kind, part = ACTS[act]
    failed = failure(results[2])
    assert (failed.kind, failed.reward) == (kind, "acts")
    assert part in failed.message
    assert [total(x) for i, x in enumerate(results) if i != 2] == [
        float(i) for i in range(NUM_GOOD) if i != 2
    ]


@pytest.mark.parametrize("act", rest_slow(ACTS, only=("allocate", "kill")))
def test_a_function_that_ruins_its_process_fails_its_own_rollout_only(act: str) -> None:
    async def scenario() -> None:
        limit_s = LIMIT_S if act == "backtrack" else PATIENCE_S
        async with running(acting(ACTS[act][0]), limit_s=limit_s, concurrency=4) as runner:
            check(await runner.score(rollouts(NUM_GOOD)), act)
            good = await runner.score(rollouts(2))
            assert [total(x) for x in good] == [0.0, 1.0]

    run(scenario)


def test_data_written_to_the_processs_own_channels_is_not_an_outcome() -> None:
    acts = acting(write_everywhere)
    results = score(acts, batch=rollouts(NUM_GOOD), limit_s=LIMIT_S, concurrency=1)
    assert failure(results[2]).kind in ("crash", "timeout")
    assert [total(x) for i, x in enumerate(results) if i != 2] == [
        float(i) for i in range(NUM_GOOD) if i != 2
    ]


@pytest.mark.slow
def test_a_call_that_writes_there_and_returns_costs_no_other() -> None:
    """Each call that may have written is retried alone."""
    results = score(acting(write_everywhere_and_return), batch=rollouts(NUM_GOOD))
    assert failure(results[2]).kind == "crash"
    assert "file descriptors" in failure(results[2]).message
    assert [total(x) for i, x in enumerate(results) if i != 2] == [
        float(i) for i in range(NUM_GOOD) if i != 2
    ]


@pytest.mark.slow
def test_many_that_end_their_process_end_nothing_else() -> None:
    def ends_at_odd(rollout: Rollout) -> float:
        if rollout.index % 2:
            os._exit(7)
        return 1.0

    results = score(ends_at_odd, batch=rollouts(12), concurrency=3)
    assert [x.kind if i % 2 else total(x) for i, x in enumerate(results)] == [1.0, "crash"] * 6  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_process_that_ends_before_any_call_is_not_restarted_forever(tmp_path: Path) -> None:
    class EndsWhenItIsLoadedAgain:
        def __init__(self, file: Path) -> None:
            self.file = file

        def __setstate__(self, state: dict[str, Any]) -> None:
            self.__dict__ = state
            if self.file.exists():
                os._exit(3)
            self.file.touch()

        def __call__(self, rollout: Rollout) -> float:
            os._exit(4)

    async def scenario() -> None:
        ends = reward(name="ends")(EndsWhenItIsLoadedAgain(tmp_path / "loaded"))
        async with running(ends) as runner:
            for _ in range(2):
                found = failure((await runner.score([rollout()]))[0])
                assert found.kind == "crash"
                assert "ended with exit code 3" in found.message

    run(scenario)


def processes_with(mark: str) -> list[psutil.Process]:
    """Return the processes with the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.pid != os.getpid()]


def fork_and_go_on(rollout: Rollout) -> float:
    """Start a child in this process group, one in another session, and one without a parent."""
    program = "import time; time.sleep(3600)"
    command = [sys.executable, "-S", "-c", program]
    subprocess.Popen(command)
    subprocess.Popen(command, start_new_session=True)
    subprocess.Popen(["setsid", "-f", *command])
    if os.fork() == 0:
        time.sleep(0.1)  # and returns from here too
    return 1.0


def test_all_processes_that_a_function_starts_end_with_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark = f"rewards-test-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("REWARDS_TEST_MARK", mark)

    async def scenario() -> None:
        async with running(fork_and_go_on) as runner:
            assert [total(x) for x in await runner.score(rollouts(3))] == [1.0] * 3
            assert len(processes_with(mark)) >= 3 * 3

    run(scenario)
    wait_until(lambda: processes_with(mark) == [])


ACTOR = """
import asyncio, sys
from tests.rewards.test_bounds import fork_and_go_on
from tests.rewards.reward_harness import rollouts, running

async def main():
    async with running(fork_and_go_on) as runner:
        await runner.score(rollouts(3))
        print("scored", flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_everything_ends_when_the_supervisor_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"rewards-test-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("REWARDS_TEST_MARK", mark)
    supervisor = subprocess.Popen(
        [sys.executable, "-c", ACTOR], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == b"scored\n"
    assert len(processes_with(mark)) >= 1 + 3 * 3
    supervisor.kill()
    supervisor.wait(PATIENCE_S)
    supervisor.stdout.close()
    wait_until(lambda: processes_with(mark) == [])


def test_functions_do_not_see_the_runs_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "JUDGE_API_KEY", "MY_SETTING"):
        monkeypatch.setenv(name, "there")

    @reward(environment=["JUDGE_API_KEY"])
    def sees(rollout: Rollout) -> dict[str, float]:
        supervisor = Path(f"/proc/{os.getppid()}/environ").read_bytes()
        assert b"HF_TOKEN" not in supervisor
        names = ("WANDB_API_KEY", "HF_TOKEN", "JUDGE_API_KEY", "MY_SETTING")
        return {name: float(name in os.environ) for name in names}

    (result,) = score(sees, batch=[rollout()])
    assert total(result) == 2.0
    assert result.components["sees/JUDGE_API_KEY"] == 1.0  # type: ignore[union-attr]


def test_secrets_are_recognized_by_name_and_by_value() -> None:
    secret = ["HF_TOKEN", "WANDB_MODE", "AWS_REGION", "OPENAI_API_KEY", "RAY_AUTH_TOKEN"]
    secret += ["GITHUB_PAT", "DB_PASSWORD", "my_secret", "MYSQL_PWD", "SSH_AUTH_SOCK"]
    secret += ["TOKEN_FILE", "GOOGLE_APPLICATION_CREDENTIALS"]
    plain = "PATH PWD HOME TOKENIZERS_PARALLELISM HF_HOME KEYBOARD PYTHONPATH CUDA_VISIBLE_DEVICES"
    environment = dict.fromkeys([*secret, *plain.split()], "x")
    environment |= {"DATABASE": "postgres://me:pass@host/db", "INDEX": "https://host:80/a@b"}
    assert without_secrets(environment).keys() == {*plain.split(), "INDEX"}
    assert "HF_TOKEN" in without_secrets(environment, keep={"HF_TOKEN"})


def test_the_process_is_the_first_that_the_kernel_ends() -> None:
    def adjustment(rollout: Rollout) -> float:
        return float(Path("/proc/self/oom_score_adj").read_text())

    assert total(score(adjustment, batch=[rollout()])[0]) == 1000.0


def test_it_inherits_no_open_files(tmp_path: Path) -> None:
    def sees(rollout: Rollout) -> float:
        files = Path("/proc/self/fd").iterdir()
        return float(any("inherited" in os.path.realpath(file) for file in files))

    async def scenario() -> Result:
        async with running(sees) as runner:
            return (await runner.score([rollout()]))[0]

    with (tmp_path / "inherited").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        assert total(asyncio.run(scenario())) == 0.0
