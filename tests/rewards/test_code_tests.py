"""The reward of programs: programs and tests that it reads, and their value."""

from __future__ import annotations

import asyncio
from typing import Any

import cloudpickle
import pytest

from rlsys.common import pickling
from rlsys.errors import InvalidValue
from rlsys.rewards import code_tests, example_rollout
from rlsys.rewards.code_tests import program_of
from tests.errors import invalid
from tests.tiers import rest_slow

DOUBLE = "```python\nprint(int(input()) * 2)\n```"
PAIRS = [{"stdin": "3\n", "stdout": "6\n"}, {"stdin": "0", "stdout": "0"}]


def score(completion: str, tests: Any, **settings: Any) -> float:
    rollout = example_rollout(completion, metadata={"tests": tests})
    value: float = asyncio.run(code_tests(**settings)(rollout))
    return value


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nand\n```\nx = 2\n```\ndone", "x = 2\n"),
        ("```py\nx = 1\n```\n```\n```", "x = 1\n"),
        ("cut off:\n```python\nx = 1\ny", "x = 1\ny"),
        ("", ""),
    ],
)
def test_the_program_of_a_completion(completion: str, program: str) -> None:
    assert program_of(completion) == program


@pytest.mark.parametrize(
    ("completion", "tests", "all_of_them", "share"),
    rest_slow(
        [
            ("def f(x): return x", ["assert f(1) == 1", "assert f(2) == 2"], 1.0, 1.0),
            ("def f(x): return 1", ["assert f(1) == 1", "assert f(2) == 2"], 0.0, 0.5),
            (
                "def f(x): return 1",
                "assert f(1) == 1\nassert f(2) == 2\nassert f(3) == 1",
                0.0,
                2 / 3,
            ),
            ("f = 1/0", '["assert f(1) == 1"]', 0.0, 0.0),
            (DOUBLE, PAIRS, 1.0, 1.0),
            (DOUBLE, [PAIRS[0], {"input": "1", "output": "3"}], 0.0, 0.5),
            (DOUBLE, {"inputs": ["2", "x"], "outputs": ["4\n\n", "y"]}, 0.0, 0.5),
            (DOUBLE, '[{"stdin": "2", "stdout": "4"}]', 1.0, 1.0),
            ("print('6'); exit(1)", PAIRS[:1], 0.0, 0.0),
            ("print('6')\nwhile True: pass", PAIRS[:1], 0.0, 0.0),
            ("print(6, end='  \\n')", PAIRS[:1], 1.0, 1.0),
            ("print(' 6')", PAIRS[:1], 0.0, 0.0),
        ],
        first=9,
    ),
)
def test_a_program_has_the_value_of_its_tests(
    completion: str, tests: Any, all_of_them: float, share: float
) -> None:
    assert score(completion, tests, timeout_s=2.0) == all_of_them
    assert score(completion, tests, timeout_s=2.0, partial_credit=True) == pytest.approx(share)


@pytest.mark.parametrize(
    "tests",
    [None, 5, [], "", "x = 1", "assert (", [1], [{"stdin": "x"}], "[1", {"inputs": ["1"]}, [[]]],
)
def test_rows_without_tests_are_an_error_and_not_a_zero(tests: Any) -> None:
    with pytest.raises(InvalidValue) as found:
        score("x = 1", tests)
    assert found.value.field in ("metadata['tests']", "tests")


def test_time_is_for_all_tests_of_a_program() -> None:
    pairs = [{"stdin": "", "stdout": "a"}] * 50
    program = "import time\nprint('a', flush=True)\ntime.sleep(0.3)"
    assert score(program, pairs, timeout_s=1.0, partial_credit=True) <= 3 / 50


def test_it_can_be_pickled_and_declares_its_column() -> None:
    reward = cloudpickle.loads(pickling.dumps(code_tests("unit_tests", timeout_s=3.0)))
    assert reward.required_columns == ("unit_tests",)
    assert reward.name == "code_tests"
    assert reward.timeout_s == 63.0  # 3 s of the program and 60 s of overhead
    assert reward.is_async


def test_wrong_settings_are_refused() -> None:
    with invalid("timeout_s", 0.0):
        code_tests(timeout_s=0.0)
    with invalid("memory_mib", 0):
        code_tests(memory_mib=0)
    with invalid("code_tests: column", 5):
        code_tests(5)  # type: ignore[arg-type]
