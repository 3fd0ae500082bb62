"""A reward for programs that pass their unit tests.

In: the completion, whose last fenced block is a program (or all of it without such a block), and
the tests in a column of its row. Out: 1.0 if the program passes all of them, or the share that it
passes. The program runs in the sandbox, where it can neither see its tests nor do harm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rlsys.common.safe_json import parse_json
from rlsys.errors import InvalidValue
from rlsys.rewards import sandbox
from rlsys.rewards.column_paths import value_at
from rlsys.rewards.reward import Reward, check_column_name
from rlsys.rewards.sandbox.program_tests import read_tests
from rlsys.types import Rollout

FENCED = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)

TESTS: tuple[type, ...] = (str, list, dict)

# Names in datasets for the input and output of a program.
INPUTS, OUTPUTS = ("stdin", "input", "inputs"), ("stdout", "output", "outputs")

# Additional time to start the programs and to read their output on a very busy machine. Waiting for
# a processor does not count (call_clock.py).
OVERHEAD_S = 60.0

Pairs = list[tuple[str, str]]


def code_tests(
    column: str = "tests",
    *,
    partial_credit: bool = False,
    timeout_s: float = 5.0,
    memory_mib: int = 256,
) -> Reward:
    """Return a reward that is 1.0 if the completion's program passes its tests.

    Args:
        column: The metadata column with the tests: assert statements (a text or a list of texts,
            see `sandbox.check`), or a list of {"stdin": ..., "stdout": ...} with the input and the
            expected output of the program, or either of them as JSON text. Lines of output are
            compared without the white space at their ends.
        partial_credit: The reward is the share of tests that the program passes.
        timeout_s: Time limit of all tests of a program, in seconds.
        memory_mib: Memory limit of a program, in MiB.

    Raises:
        SandboxUnavailable: Programs cannot be isolated on this machine.
        InvalidValue: A limit is wrong, or `column` is not a name.
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
    tests = parse_tests(value_at(rollout.metadata, column), column)
    program = program_of(rollout.completion_text)
    if isinstance(tests, str):
        passed = await sandbox.check(program, tests, timeout_s=timeout_s, memory_mib=memory_mib)
    else:
        passed = await _run_pairs(
            program, tests, timeout_s=timeout_s, memory_mib=memory_mib, all_of_them=partial_credit
        )
    return sum(passed) / len(passed) if partial_credit else float(all(passed))


def program_of(completion: str) -> str:
    """Return the last fenced block that is not empty, or the whole text."""
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


def parse_tests(value: Any, column: str) -> str | Pairs:
    """Return assert statements as one text, or pairs of input and output.

    Raises:
        InvalidValue: The value is neither, which is an error of the dataset and not a 0 for the
            model.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise InvalidValue(
                f"metadata[{column!r}]",
                value,
                rule=f"is not JSON ({error})",
                fix="Give JSON text, or assert statements.",
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
    raise InvalidValue(
        f"metadata[{column!r}]",
        value,
        rule="contains no tests",
        fix='Give assert statements, or a list of {"stdin": "...", "stdout": "..."}.',
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


def _either(row: Mapping[str, object], names: Sequence[str]) -> object:
    return next((row[name] for name in names if name in row), None)
