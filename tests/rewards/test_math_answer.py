"""The math-verify reward in its child processes."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from rlsys.rewards import RewardFailure, RewardResult, math_answer
from rlsys.rewards.math_answer import _Children
from rlsys.types import FinishReason, Rollout
from tests.errors import invalid
from tests.rewards.reward_harness import score, wait_until

pytest.importorskip("math_verify", reason="the extra 'math' is not installed")


def rollout(completion: str, answer: Any) -> Rollout:
    no_tokens = np.zeros(0, np.int32)
    return Rollout(
        group_id=0,
        index=0,
        prompt_text="",
        completion_text=completion,
        prompt_token_ids=no_tokens,
        token_ids=no_tokens,
        finish_reason=FinishReason.STOP,
        metadata={"answer": answer},
    )


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("So it is $(x+1)^2$.", "x^2 + 2x + 1", 1.0),
        ("So it is $(x+1)^2$.", "$x^2 + 2x + 2$", 0.0),
        ("The answer is 18.", "9 * 2 = 18\n#### 18", 1.0),
        ("The answer is 19.", "9 * 2 = 18\n#### 18", 0.0),
        ("no idea", "18", 0.0),
        ("\\boxed{", "18", 0.0),
        ("\\boxed{\\infty}", "\\infty", 1.0),
        ("\\boxed{5}", 2**1024, 0.0),
        ("line\nbreaks \u2028 and \N{GREEK SMALL LETTER PI} \\boxed{3}", 3, 1.0),
    ],
)
def test_equivalence(completion: str, answer: Any, value: float) -> None:
    assert math_answer()(rollout(completion, answer)) == value


def test_a_reference_without_mathematics_is_an_error_of_the_dataset() -> None:
    with invalid("metadata['answer']", "#### "):
        math_answer()(rollout("1", "#### "))


def test_a_computation_without_end_times_out_and_stops_no_other() -> None:
    batch = [rollout("\\boxed{2}", "2"), rollout("$10^{10^{10}}$", "2"), rollout("$2$", "2")]
    first, second, third = score(math_answer(cpu_limit_s=0.5), batch=batch)
    assert isinstance(first, RewardResult)
    assert isinstance(third, RewardResult)
    assert (first.total, third.total) == (1.0, 1.0)
    assert isinstance(second, RewardFailure)
    assert second.kind == "timeout"
    assert "0.5 s" in second.message
    assert "'$10^{10^{10}}$'" in second.message


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Return a list that gets each process that is started."""
    processes: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def recorded(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(start(*args, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    return processes


def test_a_child_that_was_killed_is_replaced(started: list[subprocess.Popen[bytes]]) -> None:
    children = _Children()
    assert children.ask("2", "$2$", cpu_limit_s=5) is True
    (child,) = started
    os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=300)
    assert children.ask("2", "$3$", cpu_limit_s=5) is False
    assert children.ask("2", "$2$", cpu_limit_s=5) is True
    assert len(started) == 2


def test_the_child_ends_with_its_input(started: list[subprocess.Popen[bytes]]) -> None:
    children = _Children()
    children.ask("2", "$2$", cpu_limit_s=5)
    (child,) = started
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(timeout=300) == 0


def test_without_the_library_the_error_has_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError) as found:
        math_answer()
    assert "pip install 'math-verify" in str(found.value)


@pytest.mark.slow
def test_waiting_for_a_child_does_not_count_against_the_limit_of_a_call() -> None:
    """More bombs than cores keep every child busy for longer than the limit of one call."""
    num_bombs = 2 * len(os.sched_getaffinity(0))
    bombs = [rollout("$9^{9^{9^9}}$", "2") for _ in range(num_bombs)]
    innocent = [rollout("\\boxed{2}", "2") for _ in range(3)]
    results = score(math_answer(cpu_limit_s=1.5), batch=[*bombs, *innocent], limit_s=2.5)
    assert [getattr(one, "kind", "") for one in results[:num_bombs]] == ["timeout"] * num_bombs
    for one in results[num_bombs:]:
        assert isinstance(one, RewardResult), one
        assert one.total == 1.0


def test_an_exception_for_the_waiting_thread_ends_the_child_and_frees_its_place(
    started: list[subprocess.Popen[bytes]],
) -> None:
    children = _Children()
    assert children.ask("2", "$2$", cpu_limit_s=5) is True
    (child,) = started
    os.kill(child.pid, signal.SIGSTOP)
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            children.ask("2", "$2$", cpu_limit_s=5)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert thread.ident is not None
    name = thread.ident
    wait_until(lambda: sys._current_frames()[name].f_code.co_name == "_line")
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(name), ctypes.py_object(KeyboardInterrupt)
    )
    thread.join(timeout=300)
    assert [type(error) for error in failed] == [KeyboardInterrupt]
    assert child.wait(timeout=300) == -signal.SIGKILL
    assert children.ask("2", "$2$", cpu_limit_s=5) is True


def test_a_long_completion_is_judged() -> None:
    assert math_answer()(rollout("words " * 50_000 + "\\boxed{7}", "7")) == 1.0
