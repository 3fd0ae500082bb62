"""Rows of experts by cache slot and request, against a scheduler that remembers everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.engines.generation.vllm.vllm_expert_rows import ExpertRows, ScheduledTokens
from rlsys.engines.generation.vllm.vllm_routing import OutputExperts, WorkerExperts
from rlsys.engines.models.expert_layout import Routing

BLOCK, WIDTH = 4, 3


def scheduled(name: str, start: int, end: int, num_known: int, slots: Sequence[int]) -> Any:
    return ScheduledTokens(
        request_id=name,
        start=start,
        end=end,
        num_known=num_known,
        slots=lambda first, last: np.array(slots[first:last], np.int64),
    )


def rows_of(*numbers: int) -> np.ndarray:
    return np.repeat(np.array(numbers, np.uint8)[:, None], WIDTH, 1)


def test_a_chunked_prompt_and_a_completion_are_recorded_beside_another_request() -> None:
    kept = ExpertRows(16, WIDTH, np.uint8)
    kept.record([scheduled("a", 0, 3, 5, range(8, 16))], rows_of(1, 2, 3))
    kept.record(
        [scheduled("a", 3, 5, 5, range(8, 16)), scheduled("b", 0, 2, 2, range(4))],
        rows_of(4, 5, 60, 61),
    )
    kept.record(
        [scheduled("b", 2, 3, 3, range(4)), scheduled("a", 5, 6, 6, range(8, 16))], rows_of(62, 6)
    )
    assert kept.rows("a", 0)[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert kept.rows("a", 4)[:, 0].tolist() == [5, 6]
    assert kept.rows("b", 0).tolist() == rows_of(60, 61, 62).tolist()
    kept.forget(["a", "unknown"])
    assert kept.rows("a", 0).shape == (0, WIDTH)


def test_reused_tokens_have_the_rows_of_the_request_that_computed_them() -> None:
    kept = ExpertRows(16, WIDTH, np.uint8)
    # In one step, b reuses the block that a computes in the same step.
    kept.record(
        [scheduled("b", 4, 5, 5, [0, 1, 2, 3, 8]), scheduled("a", 0, 6, 6, range(6))],
        rows_of(50, 1, 2, 3, 4, 5, 6),
    )
    assert kept.rows("b", 0)[:, 0].tolist() == [1, 2, 3, 4, 50]


def test_a_preempted_request_keeps_the_rows_that_sampled_and_rejected_drafts_go() -> None:
    kept = ExpertRows(32, WIDTH, np.uint8)
    kept.record([scheduled("a", 0, 3, 3, range(16))], rows_of(1, 2, 3))
    # One new token and two drafts, of which the first is accepted.
    kept.record([scheduled("a", 3, 6, 4, range(16))], rows_of(4, 5, 99))
    kept.record([scheduled("a", 5, 6, 6, range(16))], rows_of(6))
    assert kept.rows("a", 0)[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    # After a preemption, other weights compute all tokens again, and one more.
    kept.record([scheduled("a", 0, 7, 7, range(16, 32))], rows_of(*range(71, 78)))
    assert kept.rows("a", 0)[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 77]


@dataclass
class Sequence_:
    """A request of the reference scheduler."""

    name: str
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    expected: list[int] = field(default_factory=list)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60), st.integers(1, 7))
def test_rows_follow_a_scheduler_with_prefixes_chunks_and_preemptions(
    choices: list[int], chunk: int
) -> None:
    """The expert of a token is a function of its prefix and of the weights' version.

    The reference remembers, for each position of a request, the first row that was computed for it,
    or that of the cached block which it reused.
    """
    kept = ExpertRows(BLOCK * 64, WIDTH, np.uint8)
    running: dict[str, Sequence_] = {}
    cached: dict[tuple[int, ...], tuple[int, list[int]]] = {}  # blocks by prefix: number and rows
    free = iter(range(64))
    version = 0
    for number, choice in enumerate(choices):
        kind = choice % 4
        if kind == 0 or not running:
            shared = [1, 1, 1, 1, 2, 2, 2, 2][: choice % 9]
            one = Sequence_(f"r{number}", [*shared, 3 + choice % 5])
            running[one.name] = one
        elif kind == 1:
            one = list(running.values())[choice % len(running)]
            one.blocks, one.computed = [], 0
            version += choice % 2
        step, rows, after = [], [], []
        for one in running.values():
            if not one.blocks:
                for end in range(BLOCK, len(one.tokens), BLOCK):
                    if (hit := cached.get(tuple(one.tokens[:end]))) is None:
                        break
                    one.blocks.append(hit[0])
                    one.expected.extend(hit[1][len(one.expected) - end + BLOCK :])
                    one.computed = end
            end = min(len(one.tokens), one.computed + chunk)
            while len(one.blocks) * BLOCK < end:
                if (block := next(free, None)) is None:
                    return
                one.blocks.append(block)
            new = [
                (7 * sum(one.tokens[: place + 1]) + 31 * version + place) % 251
                for place in range(one.computed, end)
            ]
            slots = [block * BLOCK + place for block in one.blocks for place in range(BLOCK)]
            step.append(scheduled(one.name, one.computed, end, len(one.tokens), slots))
            rows += new
            after.append((one, end, new))
        kept.record(step, rows_of(*rows))
        for one, end, new in after:
            one.expected += new[len(one.expected) - one.computed :]
            whole = range(one.computed // BLOCK * BLOCK + BLOCK, end + 1, BLOCK)
            for last in whole:
                place = last - BLOCK
                if one.computed <= place:  # the block is computed by this step alone
                    key = tuple(one.tokens[:last])
                    block_rows = new[place - one.computed : last - one.computed]
                    cached.setdefault(key, (one.blocks[place // BLOCK], block_rows))
            one.computed = end
            if end == len(one.tokens):
                one.tokens = [*one.tokens, (choice + end) % 3]
    for one in running.values():
        assert kept.rows(one.name, 0)[:, 0].tolist() == one.expected


class Worker:
    """A worker with rows of width 1: row n of request "r" is n + 100."""

    def __init__(self, lengths: Mapping[str, int]) -> None:
        self.lengths = dict(lengths)
        self.calls: list[tuple[dict[str, int], list[str]]] = []

    async def read(self, starts: Mapping[str, int], ended: Sequence[str]) -> dict[str, np.ndarray]:
        self.calls.append((dict(starts), list(ended)))
        await asyncio.sleep(0)
        found = {
            name: np.arange(100 + start, 100 + self.lengths.get(name, start), dtype=np.uint8)[
                :, None
            ]
            for name, start in starts.items()
        }
        for name in ended:
            self.lengths.pop(name, None)
        return found


def numbers(rows: np.ndarray | None) -> list[int] | None:
    return None if rows is None else rows[:, 0].tolist()


def run(make: Callable[[], Any]) -> Any:
    return asyncio.run(make())


def test_requests_that_end_together_share_a_call() -> None:
    worker = Worker({"a": 3, "b": 5, "c": 4})

    async def end() -> Any:
        source = WorkerExperts(worker.read)
        return await asyncio.gather(
            source.of_ended("a", 3, None),
            source.of_ended("b", 4, None),
            source.of_ended("c", 0, None),
        )

    assert [numbers(one) for one in run(end)] == [[100, 101, 102], [100, 101, 102, 103], None]
    assert [sorted(ended) for _, ended in worker.calls] in ([["a", "b", "c"]], [["a"], ["b", "c"]])
    assert worker.lengths == {}


def test_rows_of_running_requests_are_read_once_and_those_of_ended_ones_are_left_out() -> None:
    worker = Worker({"a": 4})

    async def look() -> tuple[Any, Any]:
        source = WorkerExperts(worker.read)
        running = await source.of_running({"a": 3, "gone": 2}, {})
        worker.lengths["a"] = 6
        return running, await source.of_ended("a", 6, None)

    running, ended = run(look)
    assert {name: numbers(rows) for name, rows in running.items()} == {"a": [100, 101, 102]}
    assert numbers(ended) == [100, 101, 102, 103, 104, 105]
    assert worker.calls == [({"a": 0, "gone": 0}, []), ({"a": 3}, ["a"])]


def test_layers_without_experts_are_left_out_of_vllms_own_rows() -> None:
    source = OutputExperts(Routing(num_layers=2, num_chosen=2, num_experts=300), layers=[1, 3])
    rows = np.arange(3 * 4 * 2, dtype=np.uint16).reshape(3, 4, 2)

    @dataclass
    class Completion:
        routed_experts: np.ndarray

    @dataclass
    class State:
        routed_experts_chunks: list[np.ndarray]

    async def read() -> tuple[Any, Any, Any]:
        return (
            await source.of_ended("a", 2, Completion(rows)),
            await source.of_ended("a", 0, Completion(rows)),
            await source.of_running({"a": 2, "b": 9}, {"a": State([rows[:1], rows[1:]])}),
        )

    ended, nothing, running = run(read)
    assert ended.tolist() == [[2, 3, 6, 7], [10, 11, 14, 15]]
    assert ended.dtype == np.int16
    assert nothing is None
    assert list(running) == ["a"]
    assert running["a"].tolist() == ended.tolist()


pytestmark = pytest.mark.unit
