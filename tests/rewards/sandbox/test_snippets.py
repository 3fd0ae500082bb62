"""Execution of snippets in a subset of Python."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import psutil
import pytest

from rlsys.rewards import sandbox
from rlsys.rewards.sandbox import snippets

pytest.importorskip("pydantic_monty")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("2 + 3", "5"),
        ("'abc'", "abc"),
        ("x = 6\ny = 7\nx * y", "42"),
        ("print('a')\nprint('b')", "a\nb"),
        ("print('a')\n[1, (2,)]", "a\n[1, (2,)]"),
        ("x = 1", ""),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("print('a')\n1 / 0", "a\nZeroDivisionError: division by zero"),
        ("(", "SyntaxError: unexpected EOF while parsing"),
        ("import time\ntime.sleep(1000)\n5", "5"),
        ("def f(): return f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_the_result_of_a_snippet_is_a_text(code: str, text: str) -> None:
    assert sandbox.python_sync(code) == text
    assert asyncio.run(sandbox.python(code)) == text


def test_nothing_is_left_of_the_previous_snippet() -> None:
    sandbox.python_sync("secret = 5")
    assert sandbox.python_sync("secret") == "NameError: name 'secret' is not defined"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("while True: pass", "TimeoutError"),
        ("sum(range(10**12))", "TimeoutError"),
        ("'a' * 10**10", "MemoryError"),
        ("x = []\nwhile True: x.append('a' * 1000 + str(len(x)))", "MemoryError"),
        ("2 ** 10**10", "MemoryError"),
        ("open('/etc/passwd').read()", "PermissionError"),
        ("open('new', 'w')", "PermissionError"),
        ("import os\nos.listdir('/')", "PermissionError"),
        ("import os\nos.system('true')", "AttributeError"),
        ("import subprocess", "ModuleNotFoundError"),
        ("import socket", "ModuleNotFoundError"),
        ("import ctypes", "ModuleNotFoundError"),
        ("while True: print('x' * 1000)", "MemoryError"),
        ("\ud800", "SyntaxError"),
        ("().__class__.__base__.__subclasses__()", "AttributeError"),
    ],
)
def test_forbidden_operations_give_an_error_text(code: str, error: str) -> None:
    began_s = time.monotonic()
    text = sandbox.python_sync(code, timeout_s=0.5, memory_mib=32)
    assert text.rpartition("\n")[2].startswith(error), text[:200]
    assert time.monotonic() - began_s < 10
    assert sandbox.python_sync("1 + 1") == "2"


def test_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret-value")
    text = sandbox.python_sync("import os\nprint(os.getenv('MY_TOKEN'), os.environ)")
    assert "secret-value" not in text


def test_long_output_is_cut_with_a_note() -> None:
    text = sandbox.python_sync("'x' * 2_000_000")
    assert text == "x" * 2**20 + "\n[cut: 2000000 characters in all]"


def test_a_killed_worker_fails_one_snippet_only() -> None:
    sandbox.python_sync("1")
    for child in psutil.Process().children():
        if child.name() == "monty":
            child.kill()
    texts = [sandbox.python_sync("1 + 1") for _ in range(4 * len(os.sched_getaffinity(0)))]
    assert texts[-1] == "2"
    assert {text for text in texts if text != "2"} <= {
        one for one in texts if "RuntimeError" in one
    }


def test_many_at_once() -> None:
    async def many() -> list[str]:
        return await asyncio.gather(*(sandbox.python(f"{i} * 2") for i in range(200)))

    assert asyncio.run(many()) == [str(2 * i) for i in range(200)]


def test_without_the_interpreter_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snippets, "_of_this_process", None)
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    with pytest.raises(sandbox.SandboxUnavailable) as found:
        sandbox.python_sync("1")
    assert "pip install 'rlsys[sandbox]'" in str(found.value)
