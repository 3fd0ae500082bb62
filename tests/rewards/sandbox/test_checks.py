"""Tests of programs: right programs pass, and attacks on the tests do not."""
# ruff: noqa: E501 (a program and its tests are a line)

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.rewards import sandbox
from rlsys.rewards.sandbox.inside import value_encoding
from rlsys.rewards.sandbox.program_tests import read_tests
from tests.errors import invalid

ways = pytest.mark.usefixtures("way")

ADD = "def add(a, b):\n    return a + b\n"


def check(program: str, tests: str | Sequence[str], timeout_s: float = 5.0) -> list[bool]:
    return asyncio.run(sandbox.check(program, tests, timeout_s=timeout_s))


@ways
@pytest.mark.parametrize(
    ("program", "tests", "passed"),
    [
        (ADD, "assert add(1, 2) == 3\nassert add(1, 2) == 4\nassert add('a', b='b') == 'ab'", "101"),
        (ADD, ["assert add([1], [2.5]) == [1, 2.5]", "assert add((), (None,)) == (None,)"], "11"),
        (ADD, "def check(f):\n    assert f(1, 2) == 3\n    assert abs(f(.1, .2) - .3) < 1e-9\ncheck(add)", "1"),
        (ADD, "import math\nassert math.isnan(add(math.inf, -math.inf))", "1"),
        (ADD, "assert math.isclose(add(.1, .2), .3)", "1"),
        (ADD, "x = add(2, 3)\ny = 5\nassert x == y", "1"),
        (ADD, "assert missing(1) == 1\nassert add(1, 1) == 2", "01"),
        (ADD, "assert add(10**5000, 1) == 10**5000 + 1", "1"),
        ("K = {'a': {1, 2}, 3: b'x'}", "assert K == {'a': {1, 2}, 3: b'x'}", "1"),
        ("def f():\n    raise ValueError('no')", "try:\n    f()\n    ok = 0\nexcept ValueError as e:\n    ok = str(e) == 'no'\nassert ok", "1"),
        ("class E(KeyError): pass\ndef f():\n    raise E(1)", "def t():\n    try: f()\n    except KeyError: return\n    assert 0\nt()", "1"),
        ("def g(n):\n    yield from range(n)", "assert list(g(3)) == [0, 1, 2]\nassert sum(g(4)) == 6", "11"),
        ("class S:\n    def __init__(self): self.n = 0\n    def up(self, k=1): self.n += k", "s = S()\ns.up()\ns.up(k=4)\nassert s.n == 5", "111"),
        ("def make():\n    return lambda x: x + 1\ndef use(f):\n    return f(1)", "assert make()(1) == 2\nassert use(make()) == 2", "11"),
        ("print('1111')\n" + ADD, "print('1')\nassert add(0, 0) == 0", "11"),
        ("if __name__ == '__main__':\n    exit(input())\n" + ADD, "assert add(0, 0) == 0", "1"),
    ],
)  # fmt: skip
def test_right_programs_pass(program: str, tests: str | Sequence[str], passed: str) -> None:
    assert check(program, tests) == [one == "1" for one in passed]


YES = "class Yes:\n    __eq__ = __bool__ = __gt__ = __lt__ = __contains__ = lambda *_: True\n"
TEST = "assert add(1, 2) == 3"


@ways
@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("import os; os._exit(0)", TEST),
        ("raise SystemExit(0)", TEST),
        ("exit()", TEST),
        ("def add(a, b):\n    import os; os._exit(0)", TEST),
        ("def add(a, b):\n    raise SystemExit", TEST),
        (YES + "def add(a, b): return Yes()", TEST),
        (YES + "def add(a, b): return Yes()", "assert 3 == add(1, 2)"),
        (YES + "def add(a, b): return [Yes()]", "assert add(1, 2) == [3]"),
        (YES + "def add(a, b): return Yes()", "assert add(1, 2) > 2"),
        (YES + "class Int(Yes, int): pass\ndef add(a, b): return Int(7)", TEST),
        (YES + "class Str(Yes, str): pass\ndef add(a, b): return Str('x')", "assert add(1, 2) == 'y'"),
        ("import os\nos.write(1, b'1' * 99)\nprint('1' * 99)", TEST),
        ("import os\nfor fd in range(3, 99):\n    try: os.write(fd, b'1' * 99)\n    except OSError: pass", TEST),
        ("import builtins\nbuiltins.AssertionError = builtins.abs = builtins.len = None", TEST),
        ("def abs(x): return 0\nlen = sorted = isinstance = abs\ndef add(a, b): return 9", "assert abs(add(1, 2) - 3) < 1"),
        ("class math:\n    isclose = lambda *_: True\ndef add(a, b): return 9", "assert math.isclose(add(1, 2), 3)"),
        ("def check(f): pass\ndef add(a, b): return 9", "def check(f):\n    assert f(1, 2) == 3\ncheck(add)"),
        ("import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n        for v in list(f.f_locals.values()):\n            if v == 31337: return 31337\n        f = f.f_back\n    return 9", "assert add(1, 2) == 31337"),
        ("import gc\ndef add(a, b):\n    return next((3 for o in gc.get_objects() if isinstance(o, str) and 'assert' in o and '== 3' in o), 9)", TEST),
        ("import sys, os\nos.close(3)\ndef add(a, b): return 3", TEST),
        ("import rlsys.rewards.sandbox.inside.value_encoding as w\nw.encode = lambda *_: {'x': 1}\ndef add(a, b): return 1", TEST),
        ("import rlsys.rewards.sandbox.inside.value_encoding as w\nw.send({'found': {'add': True}, 'failed': None})", TEST),
        ("import os\nos.write(3, b'\\xff' * 4)", TEST),
        ("import os\nwhile True: os.write(3, b'{' * 65536)", TEST),
        ("def add(a, b):\n    import os; os._exit(0)", "def t():\n    try: add(1, 2)\n    except Exception: return\n    assert 0\nt()"),
        ("def add(a, b):\n    import os; os._exit(0)", "def t():\n    try: add(1, 2)\n    except: return\n    assert 0\nt()"),
        ("while True: pass", TEST),
        ("def add(a, b):\n    while True: pass", TEST),
        ("import signal, os\ndef add(a, b):\n    os.kill(os.getppid() or 2, 9)\n    return 9", TEST),
        ("(", TEST),
        ("", TEST),
    ],
)  # fmt: skip
def test_attacks_on_the_tests_do_not_pass(program: str, tests: str) -> None:
    assert check(program, tests, timeout_s=1.0) == [False]


@ways
@pytest.mark.parametrize(
    ("tests", "passed"),
    [
        ("for i in range(3):\n    assert f(i) == i * i\nassert f(2) == 4", "01"),
        ("assert f(2) == 4\nfor i in range(3):\n    assert f(i) == i * i", "10"),
        (["assert f(2) == 4", "if True:\n    with open('/dev/null'):\n        assert f(1) == 1"], "10"),
        ("try:\n    f(None)\nexcept TypeError:\n    pass\nelse:\n    assert False, 'no error'", "0"),
        ("for i in (1, 2):\n    if f(i) != i * i: raise ValueError(i)", "0"),
        ("def check(i):\n    assert f(i) == i * i\nfor i in (2, 1):\n    check(i)\nassert f(2)", "01"),
        ("def check(i):\n    assert f(i) == i * i\nif __name__ == '__main__':\n    check(1)", "0"),
        ("s = []\nfor i in (1, 2):\n    s.append(f(i))\nassert s == [4, 4]", "1"),
        ("if True:\n    def unused():\n        assert f(1) == 1\nassert f(2) == 4", "1"),
    ],
)  # fmt: skip
def test_assertions_within_blocks_count(tests: str | Sequence[str], passed: str) -> None:
    assert check("def f(x):\n    return 4", tests) == [one == "1" for one in passed]


@ways
def test_tests_before_a_hang_count() -> None:
    program = "def f(x):\n    while x > 1: pass\n    return x"
    assert check(program, "assert f(1) == 1\nassert f(0) == 0\nassert f(2) == 2\nassert f(1)", 1.0) == [
        True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("tests", ["assert (", "", "x = 1", []])
def test_texts_without_tests_are_refused(tests: str | list[str]) -> None:
    with invalid("tests", tests or ""):
        check(ADD, tests)


def test_names_that_python_has_are_not_needed() -> None:
    tests = "import re\nok = True\nassert abs(f(len(g))) == ok\nassert math.pi > 3\nassert copy(1)"
    steps, names = read_tests(tests)
    assert [step["test"] for step in steps] == [
        "assert abs(f(len(g))) == ok",
        "assert math.pi > 3",
        "assert copy(1)",
    ]
    assert steps[0]["before"] == "import math\nimport re\nok = True"
    assert names == ["copy", "f", "g", "ok"]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner)
    | st.dictionaries(st.text() | st.integers(), inner)
    | st.sets(st.integers()) | st.frozensets(st.text()),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(PLAIN)
def test_plain_data_is_decoded_unchanged(value: object) -> None:
    def none(*_: object) -> None:
        raise AssertionError

    back = value_encoding.decode(value_encoding.encode(value, none), none)
    assert back == value
    assert repr(back) == repr(value) or isinstance(value, set | frozenset | list | tuple | dict)
    assert type(back) is type(value)
