"""What is refused where an environment is decorated."""

from __future__ import annotations

from typing import Any

import pytest

import rlsys


async def ask(chat: Any, task: Any) -> float:
    return float(await chat("1"))


@rlsys.tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (rlsys.environment(ask), "environment 'ask' is an environment already"),
        (rlsys.agent(ask), "environment 'ask' is an agent already"),
        (rlsys.reward(name="one")(lambda rollout: 1.0), "environment 'one' is a reward already"),
        (add, "environment 'add' is a tool already"),
    ],
)
def test_what_another_decorator_made_is_refused(function: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        rlsys.environment(max_turns=2)(function)


def test_an_agent_is_told_what_it_is_called_with() -> None:
    with pytest.raises(
        ValueError, match=r"agent 'ask' is an environment already; .*endpoint, task"
    ):
        rlsys.agent(rlsys.environment(ask))


async def told_later(rollouts: Any) -> list[float]:
    return [0.0 for _ in rollouts]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tools": add}, r"tools=<tool add> of environment 'ask' is no list of tools"),
        ({"group_reward": lambda: [1.0]}, "group_reward=<lambda> of environment 'ask'"),
        ({"group_reward": 1.0}, "group_reward=1.0 of environment 'ask' is called with a list"),
        ({"group_reward": told_later}, "of environment 'ask' is async, and nobody awaits it"),
        ({"seats": "first"}, r"give a list, seats=\('first',\)"),
        ({"max_turns": 0}, "max_turns=0 of environment 'ask' is no number of them"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        rlsys.environment(**options)(ask)


def test_parameters_in_another_order_are_refused() -> None:
    def swapped(task: Any, chat: Any) -> float:
        return 1.0

    with pytest.raises(
        ValueError, match=r"takes \(task, chat\), and is called with \(chat, task\)"
    ):
        rlsys.environment(swapped)
    with pytest.raises(ValueError, match=r"called with \(endpoint, task\)"):
        rlsys.agent(lambda row, endpoint: 1.0)
    rlsys.environment(lambda conversation, row: 1.0)
    rlsys.environment(lambda *both: 1.0)
