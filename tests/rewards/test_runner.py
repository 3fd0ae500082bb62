"""The runner: every rollout gets a result or a failure, in order, within its limit."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest

from rlsys.rewards import RewardResult, exact_match, reward, sandbox
from rlsys.types import Rollout
from tests.errors import invalid
from tests.rewards.reward_harness import (
    PATIENCE_S,
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

LIMIT_S = 0.2


def by_index(rollout: Rollout) -> float:
    return float(rollout.index)


async def async_by_index(rollout: Rollout) -> float:
    await asyncio.sleep(0)
    return float(rollout.index)


def test_results_come_in_the_order_of_the_rollouts() -> None:
    for function in (by_index, async_by_index):
        assert [total(x) for x in score(function, batch=rollouts(40))] == list(range(40))


def test_sync_and_async_rewards_add_up_with_their_weights() -> None:
    weighted = reward(weight=10.0)(async_by_index)
    outcomes = score(by_index, weighted, batch=rollouts(3))
    assert [total(x) for x in outcomes] == [0.0, 11.0, 22.0]
    assert outcomes[2] == RewardResult(
        total=22.0, components={"by_index": 2.0, "async_by_index": 2.0}
    )


def test_an_empty_batch_has_no_results() -> None:
    assert score(by_index, batch=[]) == []


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_(error: BaseException) -> NoReturn:
    raise error


ACTS: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: raise_(KeyError("answer")), "exception", "raised KeyError: 'answer'"),
    (lambda: raise_(Unprintable()), "exception", "Unprintable"),
    (lambda: raise_(TimeoutError("sandbox")), "timeout", "sandbox"),
    (lambda: sys.exit(3), "exception", "SystemExit: 3"),
    (lambda: raise_(BaseException("panic")), "exception", "panic"),
    (lambda: raise_(asyncio.CancelledError("me")), "exception", "Cancelled"),
    (lambda: raise_(ValueError("\x1b[2J\x1b]0;gotcha\x07")), "exception", r"\x1b[2J\x1b]0;"),
    (lambda: raise_(ValueError("x" * 10**6)), "exception", "x [...] x"),
    (lambda: math.nan, "nan", "returned nan"),
    (lambda: "1.0", "type", "returned '1.0' (str)"),
    (lambda: None, "type", "returned None (NoneType)"),
    (lambda: async_by_index(rollout()), "type", "coroutine"),
]


@pytest.mark.parametrize("is_async", rest_slow([False, True]))
def test_a_function_that_fails_fails_its_own_rollout_only(is_async: bool) -> None:
    def plain(rollout: Rollout) -> Any:
        return ACTS[rollout.index][0]() if rollout.index < len(ACTS) else 1.0

    async def awaited(rollout: Rollout) -> Any:
        return plain(rollout)

    function: Any = awaited if is_async else plain
    results = score(function, batch=rollouts(len(ACTS) + 2))
    assert [total(x) for x in results[len(ACTS) :]] == [1.0, 1.0]
    for (_, kind, part), result in zip(ACTS, results, strict=False):
        failed = failure(result)
        assert (failed.kind, failed.reward) == (kind, function.__name__)
        assert part in failed.message
        assert "\x1b" not in failed.message
        assert len(failed.message) < 5000


def test_the_message_of_an_exception_shows_the_line_that_raised_it() -> None:
    def broken(rollout: Rollout) -> float:
        return 1 / rollout.index

    message = failure(score(broken, batch=[rollout(0)])[0]).message
    assert message.startswith("broken raised ZeroDivisionError: ")
    assert "return 1 / rollout.index" in message
    assert "call_scheduler.py" not in message


def test_a_function_that_takes_no_rollout_fails_with_the_reason() -> None:
    def forgetful(*arguments: Rollout) -> float:
        return inner()  # type: ignore[call-arg]

    def inner(rollout: Rollout) -> float:
        return 1.0

    message = failure(score(forgetful, batch=[rollout()])[0]).message
    assert "missing 1 required positional argument" in message


def test_changes_by_one_function_do_not_affect_others() -> None:
    def spoils(rollout: Rollout) -> float:
        rollout.metadata["answer"] = "spoilt"  # type: ignore[index]
        rollout.metadata["list"].append(3)
        with pytest.raises(ValueError):  # noqa: PT011 - numpy has no type for it
            rollout.token_ids[0] = 7
        assert not rollout.token_ids.flags.writeable
        return 0.0

    def reads(rollout: Rollout) -> float:
        assert rollout.metadata == {"answer": "7", "list": [1, 2]}
        assert rollout.token_ids.tolist() == [5, 6]
        return 1.0

    metadata = {"answer": "7", "list": [1, 2]}
    tokens = np.array([5, 6], np.int32)
    group = [
        Rollout(**{**vars(rollout(index)), "metadata": metadata, "token_ids": tokens})
        for index in range(4)
    ]
    assert [total(x) for x in score(spoils, reads, batch=group, concurrency=1)] == [1.0] * 4
    assert metadata == {"answer": "7", "list": [1, 2]}


def test_each_rollout_has_its_own_tokens() -> None:
    def sums(rollout: Rollout) -> dict[str, float]:
        return {
            "prompt": float(rollout.prompt_token_ids.sum()),
            "tokens": float(rollout.token_ids.sum()),
        }

    def with_tokens(prompt: list[int], tokens: list[int]) -> Rollout:
        arrays = {"prompt_token_ids": np.array(prompt, np.int32)}
        return Rollout(**{**vars(rollout()), **arrays, "token_ids": np.array(tokens, np.int32)})

    batch = [with_tokens([1, 2], [3]), with_tokens([], []), with_tokens([4], [5, 6])]
    results = score(sums, batch=batch)
    assert [total(x) for x in results] == [6.0, 0.0, 15.0]
    assert results[2].components["sums/prompt"] == 4.0  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_cheap_call_takes_a_free_place_while_a_slow_batch_runs() -> None:
    def sleeps(rollout: Rollout) -> float:
        time.sleep(float(rollout.completion_text))
        return 1.0

    async def scenario() -> tuple[float, float]:
        async with running(sleeps, concurrency=4) as runner:
            started = time.monotonic()
            slow = asyncio.create_task(runner.score([rollout(i, "8.0") for i in range(3)]))
            await asyncio.sleep(0.2)
            await runner.score([rollout(0, "0.01") for _ in range(20)])
            cheap_s = time.monotonic() - started
            await slow
            return cheap_s, time.monotonic() - started

    cheap_s, slow_s = run(scenario)
    assert slow_s >= 8.0
    assert cheap_s < 6.0


def test_slow_calls_run_as_many_at_a_time_as_allowed() -> None:
    state: dict[str, Any] = {}  # the process has its own copy

    def meets_three_others(rollout: Rollout) -> float:
        state.setdefault("barrier", threading.Barrier(4)).wait(PATIENCE_S)
        return 1.0

    async def async_meets_three_others(rollout: Rollout) -> float:
        barrier = state.setdefault("async barrier", asyncio.Barrier(4))
        await asyncio.wait_for(barrier.wait(), PATIENCE_S)
        return 1.0

    for function in (meets_three_others, async_meets_three_others):
        results = score(function, batch=rollouts(8), concurrency=4)
        assert [total(x) for x in results] == [1.0] * 8


def test_no_more_calls_run_at_a_time_than_allowed() -> None:
    running_now: set[tuple[str, int]] = set()

    def plain(rollout: Rollout) -> float:
        running_now.add(("plain", rollout.index))
        time.sleep(0.02)
        most = len(running_now)
        running_now.remove(("plain", rollout.index))
        return most

    async def awaited(rollout: Rollout) -> float:
        running_now.add(("awaited", rollout.index))
        await asyncio.sleep(0.02)
        most = len(running_now)
        running_now.remove(("awaited", rollout.index))
        return most

    results = score(plain, awaited, batch=rollouts(16), concurrency=3)
    components = [value for x in results for value in x.components.values()]  # type: ignore[union-attr]
    assert max(components) == 3.0


def test_a_function_that_hangs_fails_its_own_rollout() -> None:
    def hangs_on_first(rollout: Rollout) -> float:
        if rollout.index == 0:
            time.sleep(3600)
        return 1.0

    async def scenario() -> None:
        async with running(hangs_on_first, limit_s=LIMIT_S) as runner:
            for _ in range(2):
                first, *others = await runner.score(rollouts(20))
                assert failure(first).kind == "timeout"
                assert failure(first).message.startswith(
                    f"hangs_on_first took longer than {LIMIT_S} s"
                )
                assert [total(x) for x in others] == [1.0] * 19

    run(scenario)


def test_hung_functions_do_not_use_up_the_places() -> None:
    def hangs(rollout: Rollout) -> float:
        if rollout.index < 80:  # more than MAX_STUCK
            time.sleep(3600)
        return 1.0

    results = score(hangs, batch=rollouts(90), concurrency=16, limit_s=LIMIT_S)
    assert [failure(x).kind for x in results[:80]] == ["timeout"] * 80
    assert [total(x) for x in results[80:]] == [1.0] * 10


def test_python_code_past_its_limit_is_stopped(tmp_path: Any) -> None:
    end = tmp_path / "stopped"

    def loops(rollout: Rollout) -> float:
        try:
            while True:
                pass
        finally:
            end.touch()

    async def scenario() -> None:
        async with running(loops, limit_s=LIMIT_S) as runner:
            assert failure((await runner.score([rollout()]))[0]).kind == "timeout"
            await asyncio.to_thread(wait_until, end.exists)

    run(scenario)


@pytest.mark.slow
def test_a_rewards_own_limit_replaces_the_runners() -> None:
    @reward(timeout_s=LIMIT_S)
    def hangs(rollout: Rollout) -> float:
        time.sleep(3600)
        return 1.0

    @reward(timeout_s=PATIENCE_S)
    def patient(rollout: Rollout) -> float:
        time.sleep(2 * LIMIT_S)
        return 1.0

    (hung,) = score(patient, hangs, batch=[rollout()], limit_s=PATIENCE_S)
    assert (failure(hung).reward, failure(hung).kind) == ("hangs", "timeout")
    (slow,) = score(patient, batch=[rollout()], limit_s=LIMIT_S)
    assert total(slow) == 1.0


def test_async_functions_past_their_limit_are_cancelled_and_block_no_other() -> None:
    async def stubborn(rollout: Rollout) -> float:
        while rollout.index < 4:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if rollout.index < 2:
                    raise
        return 1.0

    results = score(stubborn, batch=rollouts(6), concurrency=2, limit_s=LIMIT_S)
    assert [failure(x).kind for x in results[:4]] == ["timeout"] * 4
    assert [total(x) for x in results[4:]] == [1.0] * 2


def test_a_step_that_blocks_the_event_loop_is_found() -> None:
    async def blocks_on_second(rollout: Rollout) -> float:
        await asyncio.sleep(0)
        if rollout.index == 1:
            time.sleep(3600)  # noqa: ASYNC251, the fault to find
        await asyncio.sleep(LIMIT_S / 4)
        return 1.0

    def cheap(rollout: Rollout) -> float:
        return 1.0

    first, second, *others = score(blocks_on_second, cheap, batch=rollouts(6), limit_s=LIMIT_S)
    assert (failure(second).kind, failure(second).reward) == ("timeout", "blocks_on_second")
    assert [total(x) for x in (first, *others)] == [2.0] * 5


def test_functions_that_cannot_be_loaded_are_an_error_at_the_start() -> None:
    class Broken:
        def __call__(self, rollout: Rollout) -> float:
            return 1.0

        def __reduce__(self) -> Any:
            return os.listdir, ("/no/such/directory",)

    with invalid("rewards", ["Broken"]) as found:
        score(Broken(), batch=[rollout()])
    assert "no/such/directory" in found.value.rule


@pytest.mark.slow
def test_a_cheap_batch_is_scored_in_milliseconds() -> None:
    batch = [rollout(index, f" {index} ", answer="7") for index in range(256)]

    async def scenario() -> float:
        async with running(exact_match()) as runner:
            times: list[float] = []
            for _ in range(40):
                started = time.perf_counter()
                results = await runner.score(batch)
                times.append(time.perf_counter() - started)
            assert sum(total(x) for x in results) == 1.0
            return min(times)

    # 8 ms on an idle machine. The best of 40 calls, because other processes use the machine too.
    assert run(scenario) <= 0.1


async def runs_a_program(rollout: Rollout) -> float:
    result = await sandbox.run("while True: pass", timeout_s=1.0)
    return float(result.reason == "time")


def runs_a_program_sync(rollout: Rollout) -> float:
    result = sandbox.run_sync("while True: pass", timeout_s=1.0)
    return float(result.reason == "time")


@pytest.mark.slow
@pytest.mark.parametrize("function", rest_slow([runs_a_program, runs_a_program_sync]))
def test_waiting_for_the_sandbox_does_not_count_against_a_limit(function: Any) -> None:
    """Four programs of a second for each processor, and three seconds for a call."""
    num = 4 * len(os.sched_getaffinity(0))
    assert [total(one) for one in score(function, batch=rollouts(num), limit_s=3.0)] == [1.0] * num
