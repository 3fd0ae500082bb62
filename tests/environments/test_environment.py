"""Checks of the arguments of @environment and @agent."""

from __future__ import annotations

from typing import Any

import pytest

import rlsys
from tests.errors import invalid


async def ask(chat: Any, task: Any) -> float:
    return float(await chat("1"))


@rlsys.tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@pytest.mark.parametrize(
    ("function", "name", "kind"),
    [
        (rlsys.environment(ask), "ask", "an environment"),
        (rlsys.agent(ask), "ask", "an agent"),
        (rlsys.reward(name="one")(lambda rollout: 1.0), "one", "a reward"),
        (add, "add", "a tool"),
    ],
)
def test_a_decorated_function_is_invalid(function: Any, name: str, kind: str) -> None:
    with invalid(f"environment {name!r}") as found:
        rlsys.environment(max_turns=2)(function)
    assert kind in found.value.rule


def test_a_decorated_function_is_an_invalid_agent() -> None:
    with invalid("agent 'ask'") as found:
        rlsys.agent(rlsys.environment(ask))
    assert "(endpoint, task)" in found.value.fix


async def async_reward(rollouts: Any) -> list[float]:
    return [0.0 for _ in rollouts]


def without_arguments() -> list[float]:
    return [1.0]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tools", add),
        ("group_reward", without_arguments),
        ("group_reward", 1.0),
        ("group_reward", async_reward),
        ("seats", "first"),
        ("max_turns", 0),
    ],
)
def test_invalid_options(option: str, value: Any) -> None:
    with invalid(f"environment 'ask': {option}", value):
        rlsys.environment(**{option: value})(ask)


def test_swapped_parameters_are_invalid() -> None:
    def swapped(task: Any, chat: Any) -> float:
        return 1.0

    with invalid("environment 'swapped'") as found:
        rlsys.environment(swapped)
    assert "(chat, task)" in found.value.rule
    assert "(task, chat)" in found.value.rule
    with invalid("agent '<lambda>'"):
        rlsys.agent(lambda row, endpoint: 1.0)
    rlsys.environment(lambda conversation, row: 1.0)
    rlsys.environment(lambda *both: 1.0)
