"""Calls of tools: concurrent, in order; errors go to the model or are raised."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlsys
from rlsys.common import pickling
from rlsys.environments.tools import tools as module
from rlsys.environments.tools.tool_call import ToolCall
from rlsys.environments.tools.tools import MAX_CALLS, MIN_OUTPUT_CHARS, ToolSet, cut, tool
from tests.errors import error_about, invalid


@tool
def add(a: int, b: int = 1) -> int:
    """Adds.

    Args:
        a: one
        b: the other
    """
    return a + b


@tool(timeout_s=0.05)
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "waited"


def call(name: str, place: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(f"call{place:05d}", name, arguments)


def contents(tools: ToolSet, *calls: ToolCall | dict[str, Any]) -> list[str]:
    return [one["content"] for one in asyncio.run(tools.call_all(calls))]


def test_a_tool_is_still_the_function() -> None:
    assert add(2) == 3
    assert add.name == "add"
    assert add.__doc__ is not None
    assert asyncio.run(wait(0)) == "waited"


def test_a_call_is_answered_by_a_tool_message() -> None:
    tools = ToolSet([add])
    assert asyncio.run(tools.call_all([call("add", 7, a="2", b=3)])) == [
        {"role": "tool", "tool_call_id": "call00007", "name": "add", "content": "5"}
    ]
    assert tools.schemas[0]["function"]["parameters"]["required"] == ["a"]
    openai = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert contents(tools, openai) == ["2"]


def test_it_is_found_at_the_top() -> None:
    assert rlsys.tool is tool
    assert rlsys.ToolError is module.ToolError


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (call("subtract", a=1), "'subtract'"),
        (call("add", b=1), "a: "),
        (ToolCall("i", "add", {}, "malformed call"), "malformed call"),
        ({"id": "i", "function": {"name": "add", "arguments": "{"}}, "JSON"),
        ({"id": "i", "function": {"name": "add", "arguments": "[1]"}}, "JSON object"),
        ({"id": "i", "function": {"name": "add", "arguments": "[" * 9999}}, "too deeply"),
    ],
)
def test_mistakes_of_the_model_are_answered(one: ToolCall | dict[str, Any], reason: str) -> None:
    [text] = contents(ToolSet([add]), one)
    assert text.startswith("Error: ")
    assert reason in text


def test_a_tool_error_is_answered_and_any_other_is_raised() -> None:
    @tool
    def fail(how: Literal["tell", "raise"]) -> None:
        raise rlsys.ToolError("no such file") if how == "tell" else KeyError("bug")

    assert contents(ToolSet([fail]), call("fail", how="tell")) == ["no such file"]
    with error_about(KeyError, "bug"):  # no group of exceptions
        contents(ToolSet([fail]), call("fail", how="raise"))


def test_only_texts_of_the_system_are_checked_as_errors() -> None:
    @tool
    def fail() -> None:
        raise rlsys.ToolError("7")

    checked: list[str] = []
    asked = [call("add", a=1), call("fail"), call("add"), call("none")]
    answers = asyncio.run(ToolSet([add, fail]).call_all(asked, check_error=checked.append))
    texts = [one["content"] for one in answers]
    assert texts[:2] == ["2", "7"]
    assert texts[2:] == checked


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()])
def test_a_base_exception_is_raised_as_a_runtime_error(error: BaseException) -> None:
    @tool
    async def leaves() -> str:
        raise error

    with error_about(RuntimeError, type(error).__name__):
        asyncio.run(ToolSet([leaves]).call_all([ToolCall("call_0", "leaves", {})]))


def test_an_exception_ends_the_other_calls() -> None:
    ended: list[str] = []

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("long")

    async def fail() -> None:
        await asyncio.sleep(0)
        raise OSError("disk")

    with error_about(OSError, "disk"):
        contents(ToolSet([long, fail]), call("long"), call("fail"))
    assert ended == ["long"]


def test_calls_run_concurrently_and_are_answered_in_order() -> None:
    both = asyncio.Barrier(3)

    async def meet(n: int) -> int:
        await both.wait()  # would wait for ever alone
        await asyncio.sleep((3 - n) / 1000)
        return n

    got = contents(ToolSet([meet]), *(call("meet", n=n) for n in range(3)))
    assert got == ["0", "1", "2"]


def test_a_synchronous_function_does_not_run_on_the_loop() -> None:
    @tool
    def where() -> bool:
        return threading.current_thread() is threading.main_thread()

    assert contents(ToolSet([where]), call("where")) == ["false"]


def test_synchronous_functions_are_passed_to_execute() -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    async def execute(function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        calls.append((function.__name__, named))
        return function(*args, **named)

    assert contents(ToolSet([add, wait], execute=execute), call("add", a=1)) == ["2"]
    assert calls == [("add", {"a": 1})]


def test_a_call_that_takes_too_long_is_cancelled_and_answered() -> None:
    ended = asyncio.Event()

    @tool(timeout_s=0.05)
    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    begin = time.monotonic()
    [text] = contents(ToolSet([long]), call("long"))
    assert text.startswith("Error: long ")
    assert "0.05 s" in text
    assert ended.is_set()
    assert time.monotonic() - begin < 5


def test_a_timeout_fails_with_on_timeout_fail() -> None:
    @tool(timeout_s=0.05, on_timeout="fail")
    async def long() -> None:
        await asyncio.sleep(60)

    with error_about(TimeoutError, "0.05 s"):
        contents(ToolSet([long]), call("long"))


def test_a_timeout_error_of_the_tool_is_raised() -> None:
    @tool(timeout_s=60)
    async def ask() -> None:
        raise TimeoutError("the server")

    with error_about(TimeoutError, "the server"):
        contents(ToolSet([ask]), call("ask"))


def test_a_tool_that_swallows_its_cancellation_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CANCEL_S", 0.05)
    release = asyncio.Event()

    @tool(timeout_s=0.05)
    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async def check() -> None:
        with error_about(RuntimeError, "CancelledError"):
            await ToolSet([stubborn]).call_all([call("stubborn")])
        release.set()

    asyncio.run(check())


def test_an_episode_that_is_cancelled_ends_its_calls() -> None:
    as_future, ended = asyncio.Event(), asyncio.Event()

    async def long() -> None:
        as_future.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def check() -> None:
        task = asyncio.create_task(ToolSet([long]).call_all([call("long")]))
        await as_future.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(check())


def returning(value: Any) -> ToolSet:
    def give() -> Any:
        return value

    return ToolSet([give])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is\n", "as it is\n"),
        ({"ä": [1, None, True]}, '{"ä":[1,null,true]}'),
        (None, "null"),
        (float("nan"), "NaN"),
        ("lone \ud800 half", "lone ? half"),
    ],
)
def test_an_output_becomes_text(value: Any, text: str) -> None:
    assert contents(returning(value), call("give")) == [text]


def test_an_output_that_json_cannot_represent_is_an_error() -> None:
    with error_about(TypeError, "give"):
        contents(returning(object()), call("give"))
    with error_about(TypeError, "give"):
        contents(returning(["\ud800"]), call("give"))


def test_ten_megabytes_become_a_bounded_text() -> None:
    begin = time.monotonic()
    [text] = contents(returning("a" * 5_000_000 + "b" * 5_000_000), call("give"))
    assert len(text) == module.MAX_OUTPUT_CHARS
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert "10000000 characters" in text
    assert time.monotonic() - begin < 5


@given(st.text(max_size=400), st.integers(MIN_OUTPUT_CHARS, 300))
def test_cut_keeps_the_start_and_the_end(text: str, max_chars: int) -> None:
    found = cut(text, max_chars)
    assert len(found) == min(len(text), max_chars)
    if len(text) <= max_chars:
        assert found == text
    else:
        assert found[:10] == text[:10]
        assert found[-10:] == text[-10:]


def test_an_answer_to_endless_names_is_bounded() -> None:
    assert len(contents(ToolSet([add]), call("x" * 100_000))[0]) <= 1000


def test_a_reply_of_nothing_but_calls_is_bounded() -> None:
    got = contents(ToolSet([add]), *(call("add", a=n) for n in range(MAX_CALLS + 2)))
    assert got[MAX_CALLS - 1] == str(MAX_CALLS)
    assert all(text.startswith("Error: ") for text in got[MAX_CALLS:])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("timeout_s", 0),
        ("timeout_s", float("inf")),
        ("on_timeout", "ignore"),
        ("max_output_chars", 10),
        ("name", "a b"),
    ],
)
def test_invalid_options(option: str, value: Any) -> None:
    with invalid(f"tool: {option}", value):
        tool(**{option: value})(lambda: 1)


def test_a_generator_and_two_tools_of_one_name_are_invalid() -> None:
    def several() -> Any:
        yield 1

    with invalid("tool several"):
        tool(several)
    with invalid("tools", "add"):
        ToolSet([add, add])


def test_a_tool_can_be_pickled() -> None:
    factor = 3

    @tool(name="times", timeout_s=2)
    def times_factor(n: int) -> int:
        return n * factor

    there = pickle.loads(pickling.dumps(times_factor))
    assert (there.name, there.timeout_s, there(2)) == ("times", 2, 6)
    assert there.schema == times_factor.schema


SCRIPT = """
from __future__ import annotations
from typing import Literal

def turn(where: Literal["left", "right"], by: int = 1) -> str:
    return where * by
"""


def test_the_types_of_a_scripts_tool_are_pickled() -> None:
    script: dict[str, Any] = {"__name__": "a_script_that_nobody_can_import"}
    exec(SCRIPT, script)  # cloudpickle sends of it what the function's code names
    here = tool(script["turn"])
    there = pickle.loads(pickling.dumps(here))
    assert there.schema == here.schema
    tools = ToolSet([pickle.loads(pickling.dumps(there))])
    right, wrong = contents(tools, call("turn", where="left"), call("turn", where="up"))
    assert right == "left"
    assert "where" in wrong


def test_partials_and_methods_are_tools() -> None:
    class Account:
        def __init__(self) -> None:
            self.balance = 0

        async def pay(self, amount: int) -> int:
            """Pays."""
            self.balance += amount
            return self.balance

    account = Account()
    both: list[Callable[..., Awaitable[int]]] = [account.pay]
    tools = ToolSet([*both, tool(name="pay_two")(partial(account.pay, amount=2))])
    assert contents(tools, call("pay", amount=5), call("pay_two")) == ["5", "7"]
