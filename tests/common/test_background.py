"""Failures of background threads and tasks are noticed."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from rlsys.common.background_tasks import (
    FAILED_EXIT_CODE,
    BackgroundEnded,
    guarded,
    start_task,
    start_thread,
)

ROOT = Path(__file__).parents[2]


class Expected(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(0), KeyboardInterrupt()])
def test_a_thread_that_raises_calls_fail_with_the_error(error: BaseException) -> None:
    def run() -> None:
        raise error

    found: list[BaseException] = []
    start_thread(run, name="one", fail=found.append).join()
    assert found == [error]


def test_a_return_is_only_a_failure_of_work_that_must_not_return() -> None:
    found: list[BaseException] = []
    start_thread(lambda: None, name="one", fail=found.append).join()
    assert found == []
    start_thread(lambda: None, name="sender", fail=found.append, returns=False).join()
    (error,) = found
    assert isinstance(error, BackgroundEnded)
    assert "sender" in str(error)


def test_an_expected_exception_ends_a_thread_without_a_failure() -> None:
    def run() -> None:
        raise Expected

    found: list[BaseException] = []
    start_thread(run, name="one", fail=found.append, expected=(Expected,)).join()
    assert found == []


def test_a_task_that_raises_calls_fail_and_a_cancelled_one_does_not() -> None:
    async def scenario() -> list[BaseException]:
        found: list[BaseException] = []

        async def raising() -> None:
            raise ValueError("x")

        tasks = [
            start_task(raising(), fail=found.append),
            start_task(asyncio.sleep(0), fail=found.append),
            start_task(asyncio.sleep(0), name="watcher", fail=found.append, returns=False),
            start_task(asyncio.sleep(3600), fail=found.append, returns=False),
        ]
        tasks[-1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        return found

    first, second = asyncio.run(scenario())
    assert isinstance(first, ValueError)
    assert isinstance(second, BackgroundEnded)
    assert "watcher" in str(second)


def test_a_guarded_callback_of_a_loop_calls_fail() -> None:
    found: list[BaseException] = []

    async def scenario() -> None:
        asyncio.get_running_loop().call_soon(guarded(int, name="x", fail=found.append), "no number")
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert [type(error) for error in found] == [ValueError]


@pytest.mark.parametrize("kind", ["thread", "task"])
def test_by_default_a_failure_ends_the_process_with_its_traceback(kind: str) -> None:
    program = {
        "thread": "start_thread(run, name='one'); threading.Event().wait()",
        "task": "asyncio.run(forever())",
    }[kind]
    lines = [
        "import asyncio, threading",
        "from rlsys.common.background_tasks import start_task, start_thread",
        "def run(): raise ZeroDivisionError('the cause')",
        "async def failing(): run()",
        "async def forever(): task = start_task(failing()); await asyncio.Event().wait()",
        program,
    ]
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == FAILED_EXIT_CODE
    assert "ZeroDivisionError: the cause" in ended.stderr


# Files whose threads are joined, and the helper itself.
AWAITED_THREADS = {
    "rlsys/common/background_tasks.py",
    "rlsys/common/run_sync.py",
    "rlsys/data/hub.py",
    "actors/cluster/local_ray.py",
}
# Scripts that run in a process of their own without the package.
SCRIPTS = {
    "rlsys/common/process_supervisor.py",
    "rlsys/rewards/math_child.py",
    "rlsys/environments/adapters/verifiers_child.py",
    "rlsys/rewards/sandbox/isolation_levels.py",
}


@cache
def attributes() -> list[tuple[str, str]]:
    """(file, "module.name") of each attribute of a plain name in rlsys and actors."""
    return [
        (str(path.relative_to(ROOT)), f"{node.value.id}.{node.attr}")
        for package in ("rlsys", "actors")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]


def test_threads_are_started_by_the_common_helper() -> None:
    """Engines have their own channel for failures: every call raises them."""
    found = {path for path, name in attributes() if name == "threading.Thread"}
    assert {path for path in found if "engines" not in path} <= AWAITED_THREADS


def test_json_is_written_and_read_by_functions_that_user_code_cannot_replace() -> None:
    found = {path for path, name in attributes() if name in ("json.dumps", "json.loads")}
    assert not {path for path in found - SCRIPTS if "sandbox/inside" not in path}
