"""Tests of a program that the program cannot get round: it and its tests run in two processes.

    tests ──► examiner (trusted, its own sandbox) ──► verdicts
                  │  ▲ calls, plain data
                  ▼  │
              program (its own sandbox)

The program's process holds no test, no expected value and no verdict. All that it can do to pass is
to return, to each call, the value that the test expects.
"""

from __future__ import annotations

import ast
import builtins
import socket
import sys
from collections.abc import Collection, Iterator, Sequence

from rlsys.common.call_clock import waiting
from rlsys.common.safe_json import dump_json
from rlsys.rewards.sandbox.fork_server_client import host
from rlsys.rewards.sandbox.programs import finished, job, limits

SUBJECT = "from rlsys.rewards.sandbox.inside import subject\nsubject.main({program!r})\n"
EXAMINER = "from rlsys.rewards.sandbox.inside import examiner\nexaminer.main()\n"


async def check(
    program: str, tests: str | Sequence[str], *, timeout_s: float = 5.0, memory_mib: int = 256
) -> list[bool]:
    """Which of the tests the program passes: at the top of `tests` each assert statement and each
    call of a function is one, and so is a loop or another block that asserts, raises, or calls a
    function of the tests; other statements prepare those below them.

    timeout_s: of all tests together; those that are left when it is over have failed. Values
    between the two are plain data: numbers, texts, bytes, None, and lists, tuples, sets and
    dictionaries of them. Other objects stay with the program; a test can call them and their
    methods, and iterate over them. What a call changes in its arguments does not come back.

    Raises ValueError for tests that are no Python or hold no test, and as `run` does.
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
    told = ended.stdout[: len(steps)].decode()
    return [i < len(told) and told[i] == "1" for i in range(len(steps))]


def read_tests(tests: str | Sequence[str]) -> tuple[list[dict[str, str]], list[str]]:
    """The tests, each with what comes before it, and the names that the program must define.
    Raises ValueError for what holds no test.
    """
    text = tests if isinstance(tests, str) else "\n".join(tests)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"the tests are no Python ({error}): {text[:200]!r}; give assert statements."
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
    if not steps:
        raise ValueError(f"the tests hold none: {text[:200]!r}; give assert statements.")
    return steps, _asked(tree, steps)


def _is_test(statement: ast.stmt, own: Collection[str]) -> bool:
    """`own`: functions that the tests define."""
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
    """Those within, but for what functions and classes hold that are defined there."""
    for inner in ast.iter_child_nodes(block):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(inner, ast.stmt):
            yield inner
        yield from _statements(inner)


def _asked(tree: ast.Module, steps: list[dict[str, str]]) -> list[str]:
    """Names that are read and neither built in nor modules. Modules of the standard library are
    imported for the tests that do not do so themselves.
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
