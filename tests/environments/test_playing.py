"""Playing an environment with a model in a directory, with the torch engine itself."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlsys
from rlsys import RolloutConfig, SamplingConfig
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.environments.workers.loop_watchdog import watched
from rlsys.evaluation import playing
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.types import Generation, GenerationRequest
from tests.errors import error_about, invalid

PATIENCE_S = 60.0
SHORT = SamplingConfig(max_tokens=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("playing") / "model"
    build_tiny_model(directory, characters="0123456789?<>", width=16, num_layers=1, max_context=64)
    return directory


def play(model: Path, environment: Any, tasks: Sequence[Any], **options: Any) -> list[Any]:
    rollout = options.pop("rollout", None) or RolloutConfig(max_running=4, kv_cache_gib=0.01)
    options = {"sampling": SHORT, "max_prompt_tokens": 8, **options}
    return rlsys.play(model, environment, tasks, rollout=rollout, **options)


@rlsys.environment(turn_tokens=2, plain_text=True)
async def asks_thrice(chat: Any, task: Any) -> dict[str, float]:
    first = await chat(str(task["number"]))
    chat.reward(0.5 * task["number"], "turns")
    await chat("<")
    await chat(">")
    return {"length": float(len(first))}


def said(one: Any) -> list[str]:
    return [line["text"] for line in one.transcript if line["sampled"]]


def test_episodes_of_several_turns_come_in_the_order_of_their_tasks(model: Path) -> None:
    tasks = [{"number": number} for number in (7, 1, 4)]
    episodes = play(model, asks_thrice, tasks, num_episodes=3)
    assert [one.components["turns"] for one in episodes] == [3.5] * 3 + [0.5] * 3 + [2.0] * 3
    for one in episodes:
        assert len(said(one)) == 3
        assert one.total == one.components["turns"] + one.components["length"]
        heard = [line["text"] for line in one.transcript if not line["sampled"]]
        assert heard[1:] == ["<", ">"]
    assert len({str(said(one)) for one in episodes[:3]}) > 1, "each has a seed of its own"


def test_a_seed_gives_the_same_episodes_and_greedy_the_likeliest_tokens(model: Path) -> None:
    tasks = [{"number": number} for number in range(4)]

    def texts(**options: Any) -> list[list[str]]:
        return [said(one) for one in play(model, asks_thrice, tasks, **options)]

    assert texts(seed=3) == texts(seed=3) != texts(seed=4)
    likeliest = play(model, asks_thrice, tasks, greedy=True)
    assert [said(one) for one in likeliest] == texts(greedy=True, seed=5)
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model)
    for number, one in enumerate(likeliest):
        assert one.trajectory.prompt_token_ids.tolist() == tokenizer.encode(str(number))
        logits = network(torch.tensor([tokenizer.encode(str(number))])).logits[0, -1]
        assert int(one.trajectory.token_ids[0]) == int(logits.argmax())


@rlsys.environment(seats=("first", "second"), turn_tokens=1, plain_text=True)
async def passes_on(chat: Any, task: Any) -> float:
    second = chat.seat("second")
    await chat(str(task["number"]))
    await second(str(task["number"]), parse=lambda said: said)
    second.reward(1.0, "second")
    return 0.25


def test_other_models_play_seats(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    build_tiny_model(
        other, characters="0123456789?<>", width=16, num_layers=1, max_context=64, seed=5
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    likeliest = {}
    for path in (model, other):
        network = AutoModelForCausalLM.from_pretrained(path)
        likeliest[path] = [
            tokenizer.decode(
                network(torch.tensor([tokenizer.encode(str(n))])).logits[0, -1].argmax()
            )
            for n in range(10)
        ]
    assert likeliest[model] != likeliest[other]
    frozen = rlsys.RoleConfig(model=rlsys.FrozenModelConfig(path=str(other)))
    tasks = [{"number": number} for number in range(10)]
    for second, whose in ((None, model), (other, other), (frozen, other)):
        seats = None if second is None else {"second": second}
        episodes = play(model, passes_on, tasks, greedy=True, seats=seats)
        replies = [
            [line["text"] for line in one.transcript if line["role"] == "assistant"]
            for one in episodes
        ]
        assert replies == [
            list(pair) for pair in zip(likeliest[model], likeliest[whose], strict=True)
        ]
        is_frozen = second is frozen  # and so is no part of the rollout, nor of its reward
        assert {one.total for one in episodes} == {0.25 if is_frozen else 1.25}
        assert {int((one.trajectory.policy_versions >= 0).sum()) for one in episodes} == {
            1 if is_frozen else 2
        }


def test_other_policies_of_the_run_are_logged(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf, rival = tmp_path / "hf", tmp_path / "hf-rival"
    hf.symlink_to(model)
    rival.symlink_to(model)
    told = "first, second.*hf-rival"
    for seats, is_told in ((None, True), ({"second": rival}, False)):
        caplog.clear()
        play(hf, passes_on, [{"number": 1}], seats=seats)
        assert bool(re.search(told, caplog.text)) == is_told


def test_a_frozen_model_has_tokens_of_its_own(model: Path, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    build_tiny_model(stranger, characters="<>?9876543210!", width=16, num_layers=1, max_context=64)
    frozen = rlsys.RoleConfig(model=rlsys.FrozenModelConfig(path=str(stranger)))
    assert len(play(model, passes_on, [{"number": 1}], seats={"second": frozen})) == 1
    with invalid("seats['second'].model.path", str(stranger)) as found:
        play(model, passes_on, [{"number": 1}], seats={"second": stranger})
    assert "vocabulary" in found.value.rule


@rlsys.environment(turn_tokens=1, plain_text=True)
def blocks(chat: Any, task: Any) -> dict[str, float]:
    chat("?")
    time.sleep(0.01)
    chat("<")
    return {"pid": float(os.getpid())}


def test_a_synchronous_function_has_a_process_that_ends(model: Path) -> None:
    pids = {int(one.total) for one in play(model, blocks, [{}] * 6)}
    assert len(pids) == 1
    assert os.getpid() not in pids
    until = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until, f"{pids} are left"
        time.sleep(0.01)


@rlsys.environment(turn_tokens=1, plain_text=True, num_retries=1)
async def raises(chat: Any, task: Any) -> float:
    await chat("?")
    if task["number"] == 2:
        raise OSError("no server")
    return 1.0


def test_an_environment_that_raises_fails_the_run(model: Path) -> None:
    with error_about(rlsys.RunFailed, "no server"):
        play(model, raises, [{"number": number} for number in range(4)])


def test_a_group_is_played_whole_with_one_running_episode(model: Path) -> None:
    @rlsys.environment(
        turn_tokens=1, plain_text=True, group_reward=lambda rollouts: range(len(rollouts))
    )
    async def ranked(chat: Any, task: Any) -> float:
        await chat("?")
        return 0.5

    one_at_a_time = RolloutConfig(max_running=1, kv_cache_gib=0.01)
    episodes = play(model, ranked, [{}, {}], num_episodes=5, rollout=one_at_a_time)
    assert [one.total for one in episodes] == [0.5, 1.5, 2.5, 3.5, 4.5] * 2


class Dies:
    """An engine that takes a request, and then no more."""

    async def start(self) -> None: ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None: ...

    async def collect(self) -> list[Generation]:
        await asyncio.sleep(0.01)
        raise EngineError("its device is gone")

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def close(self) -> None: ...


def test_an_engine_that_dies_fails_the_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "build_engine", lambda *args, **options: Dies())
    with error_about(rlsys.RunFailed, "its device is gone"):
        play(model, asks_thrice, [{"number": 1}])


def test_it_works_inside_of_a_running_loop(model: Path) -> None:
    async def cell() -> list[Any]:
        return play(model, asks_thrice, [{"number": 1}])

    assert len(asyncio.run(cell())) == 1


def test_it_plays_in_the_given_precision(model: Path) -> None:
    def first(dtype: Any) -> float:
        (episode,) = play(model, passes_on, [{"number": 1}], greedy=True, dtype=dtype)
        return float(episode.trajectory.sampler_logprobs[-1])

    exact, rounded = first("float32"), first("bfloat16")
    assert rounded != exact
    assert rounded == pytest.approx(exact, abs=0.05)


QUANTIZED = RolloutConfig(engine="vllm", quantization="fp8_per_channel")


@pytest.mark.parametrize(
    ("given", "field", "value", "name"),
    [
        ({"tasks": []}, "tasks", [], ""),
        ({"num_episodes": 0}, "num_episodes", 0, ""),
        ({"greedy": True, "num_episodes": 2}, "num_episodes", 2, ""),
        ({"max_prompt_tokens": 40}, "max_prompt_tokens", 40, "sampling.max_tokens=32"),
        ({"model": "nowhere/at-all"}, "model.path", "nowhere/at-all", ""),
        ({"dtype": "float64"}, "model.dtype", "float64", ""),
        (
            {"rollout": QUANTIZED},
            "rollout.quantization",
            "fp8_per_channel",
            "model.dtype=float32",
        ),
        ({"seats": {"secnd": "x"}}, "seats", "secnd", "['policy']"),
        ({"seats": {"policy": "x"}}, "seats", ["policy"], "'asks_thrice'"),
        ({"seats": "policy"}, "seats", "policy", ""),
        ({"seats": {"policy": 3}}, "seats['policy']", 3, ""),
        ({"seats": {"policy": rlsys.RoleConfig()}}, "seats['policy'].model.path", "", ""),
    ],
)
def test_invalid_arguments(
    model: Path, given: dict[str, Any], field: str, value: Any, name: str
) -> None:
    arguments = {"model": model, "environment": asks_thrice, "tasks": [{"number": 1}], **given}
    with invalid(field, value) as found:
        play(**arguments)
    assert name in found.value.rule


def test_a_seat_that_is_not_quantized_is_invalid(model: Path) -> None:
    exact = rlsys.RoleConfig(model=rlsys.FrozenModelConfig(path=str(model)))
    given = {"dtype": "bfloat16", "rollout": QUANTIZED, "seats": {"second": exact}}
    with invalid("rollout.quantization") as refused:
        play(model, passes_on, [{"number": 1}], **given)
    assert "seats['second'].model.dtype=float32" in refused.value.rule


def test_a_blocked_event_loop_is_logged_with_the_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_told = tmp_path / "told"
    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            is_told.touch()

    listener = Listener()
    monkeypatch.setattr(playing, "watched", partial(watched, limit_s=1.0))

    def waits(file: Path) -> float:
        end = time.monotonic() + PATIENCE_S
        while not file.exists() and time.monotonic() < end:
            time.sleep(0.01)  # as an environment does that must not
        return float(file.exists())

    @rlsys.environment(turn_tokens=2, plain_text=True)
    async def blocks(chat: Any, task: Any) -> float:
        await chat("?")
        return waits(Path(task["told"]))

    playing.log.addHandler(listener)
    try:
        (episode,) = play(model, blocks, [{"told": str(is_told)}])
    finally:
        playing.log.removeHandler(listener)
    assert episode.total == 1.0
    (message,) = told
    assert message.startswith("an episode has blocked the event loop for ")
    assert "test_playing.py:" in message
    assert ", in waits (" in message
