"""A program's unit tests as a reward.

In: the completion, whose last fenced block is a program (or all of it, where there is none), and
the tests in a column of its row. Out: 1.0 if the program passes all of them, or the share that it
passes. The program runs in the sandbox (rlsys/sandbox), where it can neither see its tests nor do
harm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rlsys.common.safe_json import parse_json
from rlsys.rewards import sandbox
from rlsys.rewards.column_paths import value_at
from rlsys.rewards.reward import Reward, check_column_name
from rlsys.rewards.sandbox.program_tests import read_tests
from rlsys.types import Rollout

FENCED = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)

TESTS: tuple[type, ...] = (str, list, dict)

# The names that data sets give to what a program reads and writes.
INPUTS, OUTPUTS = ("stdin", "input", "inputs"), ("stdout", "output", "outputs")

# Beside the time of the programs themselves: to start each and to read what it wrote, on a machine
# that is very busy. The wait for a processor does not count (call_clock.py).
OVERHEAD_S = 60.0

Pairs = list[tuple[str, str]]


def code_tests(
    column: str = "tests",
    *,
    partial_credit: bool = False,
    timeout_s: float = 5.0,
    memory_mib: int = 256,
) -> Reward:
    """Whether the completion's program passes its tests, or with `partial_credit` the share of them
    that it passes. `timeout_s` is for all tests of a program, `memory_mib` for one.

    The column holds assert statements (a text, or a list of them: see `sandbox.check`), or what the
    program reads and must write: a list of {"stdin": ..., "stdout": ...}; a text of JSON holds
    either. Written lines are compared without the white space at their ends.

    Raises SandboxUnavailable where programs cannot be isolated, ValueError for wrong limits.
    """
    check_column_name(column, "code_tests")
    sandbox.check_limits(timeout_s, memory_mib)
    sandbox.way()
    return Reward(
        function=partial(
            _code_tests,
            column=column,
            partial_credit=partial_credit,
            timeout_s=timeout_s,
            memory_mib=memory_mib,
        ),
        name="code_tests",
        timeout_s=timeout_s + OVERHEAD_S,
        required_columns=(column,),
        column_types=TESTS,
    )


async def _code_tests(
    rollout: Rollout, *, column: str, partial_credit: bool, timeout_s: float, memory_mib: int
) -> float:
    tests = given_tests(value_at(rollout.metadata, column), column)
    program = program_of(rollout.completion_text)
    if isinstance(tests, str):
        passed = await sandbox.check(program, tests, timeout_s=timeout_s, memory_mib=memory_mib)
    else:
        passed = await _run_pairs(
            program, tests, timeout_s=timeout_s, memory_mib=memory_mib, all_of_them=partial_credit
        )
    return sum(passed) / len(passed) if partial_credit else float(all(passed))


def program_of(completion: str) -> str:
    """The last fenced block that is not empty, or the whole text."""
    blocks = [block for block in FENCED.findall(completion) if block.strip()]
    return str(blocks[-1]) if blocks else completion


async def _run_pairs(
    program: str, pairs: Pairs, *, timeout_s: float, memory_mib: int, all_of_them: bool
) -> list[bool]:
    left_s = timeout_s
    passed: list[bool] = []
    for stdin, stdout in pairs:
        if left_s <= 0 or (passed and not passed[-1] and not all_of_them):
            passed.append(False)
            continue
        result = await sandbox.run(program, stdin=stdin, timeout_s=left_s, memory_mib=memory_mib)
        left_s -= result.wall_s
        passed.append(result.ok and _lines(result.stdout) == _lines(stdout))
    return passed


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def given_tests(value: Any, column: str) -> str | Pairs:
    """Assert statements as one text, or pairs of input and output. Raises ValueError for what is
    neither, which is the data set's fault and no 0 for the model.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise ValueError(
                f"metadata[{column!r}]={value[:200]!r} is no JSON ({error})."
            ) from error
    if isinstance(value, Mapping):
        inputs, outputs = _either(value, INPUTS), _either(value, OUTPUTS)
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs):
            value = [{"stdin": i, "stdout": o} for i, o in zip(inputs, outputs, strict=True)]
    if isinstance(value, str) or (_is_list(value) and all(isinstance(one, str) for one in value)):
        text = value if isinstance(value, str) else "\n".join(value)
        read_tests(text)
        return text
    if _is_list(value) and all(isinstance(one, Mapping) for one in value):
        pairs = [(_either(one, INPUTS), _either(one, OUTPUTS)) for one in value]
        if all(isinstance(i, str) and isinstance(o, str) for i, o in pairs):
            return [(str(i), str(o)) for i, o in pairs]
    raise ValueError(
        f"metadata[{column!r}]={str(value)[:200]!r} holds no tests; give assert statements, or a "
        'list of {"stdin": "...", "stdout": "..."}.'
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


def _either(row: Mapping[str, object], names: Sequence[str]) -> object:
    return next((row[name] for name in names if name in row), None)
