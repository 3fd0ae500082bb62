"""Tasks of Reasoning Gym, the real package."""

from __future__ import annotations

import pytest

from rlsys.environments.adapters import reasoning_gym as module
from rlsys.environments.adapters.reasoning_gym import ReasoningGym
from tests.environments.adapters.scripted import Script
from tests.errors import invalid

gym = pytest.importorskip("reasoning_gym", reason="the extra rlsys[reasoning-gym]")


def oracle(game: ReasoningGym, task: dict[str, object]) -> str:
    """The answer of a dataset that was made apart."""
    settings = {**game.datasets[str(task["dataset"])], "seed": task["seed"]}
    return str(gym.create_dataset(task["dataset"], **settings)[task["place"]]["answer"])


def test_a_right_answer_is_worth_one_and_a_wrong_one_less() -> None:
    game = ReasoningGym(datasets={"chain_sum": {"max_terms": 3}, "leg_counting": {}})
    tasks = game.tasks(6, seed=5)
    assert [task["dataset"] for task in tasks[:3]] == ["chain_sum", "leg_counting", "chain_sum"]
    questions = set()
    for task in tasks:
        right = Script([f"Hm. <answer>7</answer> <answer>{oracle(game, task)}</answer>"])
        assert game(right.plain(), task) == 1.0
        assert right.received()[0] == module.PROMPT
        questions.add(right.received()[1])
        module._made.cache_clear()
        wrong = Script(["<answer>no</answer>"])
        assert game(wrong.plain(), task) < 0.1
        assert wrong.received() == right.received()
        assert game(Script([oracle(game, task)]).plain(), task) == 0.0  # without tags
    assert len(questions) == 6


def test_the_whole_reply_may_be_the_answer() -> None:
    game = ReasoningGym(datasets={"chain_sum": {}}, prompt=None)
    [task] = game.tasks(1)
    script = Script([f" {oracle(game, task)}\n"])
    assert game(script.plain(), task) == 1.0
    assert [message["role"] for message in script.messages[0]] == ["user", "assistant"]


def test_invalid_datasets() -> None:
    with invalid("ReasoningGym: datasets: no_such"):
        ReasoningGym(datasets={"no_such": {}}).tasks(1)
    field = "ReasoningGym: datasets: chain_sum"
    with invalid(field, {"no_such": 1, "seed": 0}):
        ReasoningGym(datasets={"chain_sum": {"no_such": 1}}).tasks(1)
    with invalid(field):
        ReasoningGym(datasets={"chain_sum": {"min_terms": 9, "max_terms": 2}}).tasks(1)
    with invalid(field) as found:
        ReasoningGym(datasets={"chain_sum": {}}).tasks(501)
    assert '"size": 501' in found.value.fix
    assert len(ReasoningGym(datasets={"chain_sum": {"size": 501}}).tasks(501)) == 501
    with invalid("ReasoningGym: datasets", {}):
        ReasoningGym()


def test_it_is_a_synchronous_environment() -> None:
    made = ReasoningGym(datasets={"chain_sum": {}}).environment(timeout_s=5)
    assert (made.is_async, made.timeout_s) == (False, 5)
