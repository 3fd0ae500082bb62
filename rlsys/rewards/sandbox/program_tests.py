"""Unit tests of untrusted programs, which run in another process than their tests.

    tests ──► examiner (trusted, its own sandbox) ──► verdicts
                  │  ▲ calls, plain data
                  ▼  │
              program (its own sandbox)

The program's process has no test, no expected value and no verdict. It can only pass by returning
the value that the test expects from each call.
"""

from __future__ import annotations

import ast
import builtins
import socket
import sys
from collections.abc import Collection, Iterator, Sequence

from rlsys.common.call_clock import waiting
from rlsys.common.safe_json import dump_json
from rlsys.errors import InvalidValue, require
from rlsys.rewards.sandbox.fork_server_client import host
from rlsys.rewards.sandbox.programs import finished, job, limits

SUBJECT = "from rlsys.rewards.sandbox.inside import subject\nsubject.main({program!r})\n"
EXAMINER = "from rlsys.rewards.sandbox.inside import examiner\nexaminer.main()\n"


async def check(
    program: str, tests: str | Sequence[str], *, timeout_s: float = 5.0, memory_mib: int = 256
) -> list[bool]:
    """Return which of the tests a program passes.

    Tests and program exchange plain data: numbers, texts, bytes, None, and lists, tuples, sets and
    dictionaries of them. Other objects stay in the program's process. A test can call them and
    their methods, and iterate over them. Changes that a call makes to its arguments are lost.

    Args:
        program: The source of the program.
        tests: Python source, or several sources. At the top level, each assert statement and each
            call of a function is a test, and so is a loop or another block that asserts, raises,
            or calls a function of the tests. Other statements prepare the tests after them.
        timeout_s: Time limit of all tests together in seconds. Tests left after it have failed.
        memory_mib: Memory limit of each process in MiB, in addition to the interpreter's.

    Returns:
        A bool for each test, in order.

    Raises:
        InvalidValue: The tests are not Python or contain no test, or a limit is wrong.
        SandboxUnavailable: Programs cannot be isolated on this machine.
        SandboxFailed: The sandbox itself failed.
    """
    steps, names = read_tests(tests)
    bounds = limits(timeout_s, memory_mib, 1)
    ours, theirs = socket.socketpair()
    examiner = job(EXAMINER, dump_json({"tests": steps, "names": names}), bounds, ours)
    subject = job(SUBJECT.format(program=program), "", bounds, theirs)
    with waiting() as begin:
        verdicts, other = host().submit(examiner, subject, on_begin=begin)
        try:
            ended = await finished(verdicts)
        finally:
            host().kill(other)
    digits = ended.stdout[: len(steps)].decode()
    return [i < len(digits) and digits[i] == "1" for i in range(len(steps))]


def read_tests(tests: str | Sequence[str]) -> tuple[list[dict[str, str]], list[str]]:
    """Return the tests, each with the statements before it, and the names that they need.

    Raises:
        InvalidValue: The text is not Python, or contains no test.
    """
    text = tests if isinstance(tests, str) else "\n".join(tests)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise InvalidValue(
            "tests", text, rule=f"are not Python ({error})", fix="Give assert statements."
        ) from error
    steps: list[dict[str, str]] = []
    before: list[str] = []
    own = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    for statement in tree.body:
        source = ast.get_source_segment(text, statement) or ""
        if _is_test(statement, own):
            steps.append({"before": "\n".join(before), "test": source})
            before = []
        else:
            before.append(source)
    require(len(steps) > 0, "tests", text, rule="contain no test", fix="Give assert statements.")
    return steps, _needed_names(tree, steps)


def _is_test(statement: ast.stmt, own: Collection[str]) -> bool:
    """Return whether a statement is a test. `own` are the functions that the tests define."""
    match statement:
        case ast.Assert() | ast.Expr(value=ast.Call()):
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return False
        case _:
            return any(_examines(inner, own) for inner in _statements(statement))


def _examines(statement: ast.stmt, own: Collection[str]) -> bool:
    match statement:
        case ast.Assert() | ast.Raise():
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))):
            return name in own
        case _:
            return False


def _statements(block: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a block, except those inside nested functions and classes."""
    for inner in ast.iter_child_nodes(block):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(inner, ast.stmt):
            yield inner
        yield from _statements(inner)


def _needed_names(tree: ast.Module, steps: list[dict[str, str]]) -> list[str]:
    """Return the names that tests read, except built-in names and modules.

    Adds imports of modules of the standard library that the tests use without importing them.
    """
    read, bases = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            read.add(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            bases.add(node.value.id)
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    modules = sorted((bases & set(sys.stdlib_module_names)) - called)
    if modules:
        steps[0]["before"] = f"import {', '.join(modules)}\n{steps[0]['before']}"
    return sorted(read - set(modules) - set(dir(builtins)))
