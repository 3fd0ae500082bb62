"""Adapter for Gymnasium, with the real package."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from rlsys.environments.adapters.gymnasium import Gymnasium
from rlsys.environments.chat import RefusedTurn
from rlsys.environments.episode_host import EpisodeHost
from rlsys.environments.tokens.codec import Codec
from rlsys.environments.workers.sync_worker import SyncWorkerFunctions
from rlsys.launcher.tiny_models import build_tokenizer
from tests.environments.adapters.scripted import Script
from tests.environments.playing import CHARACTERS, LIMITS, Scripted, played
from tests.environments.playing import request as request_of
from tests.errors import error_about

pytest.importorskip("gymnasium", reason="the extra rlsys[gymnasium]")

import gymnasium

# FrozenLake's own map of 4 x 4, without slipping: down, down, right, right, down, right.
TO_THE_GOAL = ["1", "1", "2", "2", "1", "2"]


class Echo(gymnasium.Env[str, str]):
    """Texts in, texts out: 1 for the word that was shown, and two rounds."""

    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Text(5, charset="abc")
    closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word = "abc"[int(self.np_random.integers(3))]
        self.left = 2
        return self.word, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return f"again {self.word}", float(action == self.word), self.left == 0, False, {}

    def close(self) -> None:
        Echo.closed += 1


def lake(**options: Any) -> Gymnasium:
    return Gymnasium(make="FrozenLake-v1", options={"is_slippery": False}, **options)


def test_an_episode_of_numbered_actions() -> None:
    script = Script(TO_THE_GOAL)
    game = lake(prompt="Position: ")
    game(script.plain(), game.tasks(1)[0])
    assert script.received() == ["Position: 0", "4", "8", "9", "10", "14"]
    assert [value for _, _, value in script.rewards] == [0, 0, 0, 0, 0, 1]


def test_an_episode_of_texts_from_a_seed() -> None:
    game = Gymnasium(make=Echo, prompt="Say: ")
    before = Echo.closed
    words = []
    for task in game.tasks(8, seed=3):
        script = Script(lambda text: text[-1])
        game(script.plain(), task)
        assert [value for _, _, value in script.rewards] == [1, 1]
        again = Script(lambda text: text[-1])
        game(again.plain(), task)
        assert again.received() == script.received()
        words.append(script.received()[0])
    assert len(set(words)) > 1
    assert Echo.closed == before + 16


@pytest.mark.parametrize("reply", ["north", "7", "-1", ""])
def test_an_invalid_action_is_a_mistake_of_the_policy(reply: str) -> None:
    with pytest.raises(RefusedTurn):
        lake()(Script([reply]).plain(), {"seed": 0})


def test_actions_may_have_names() -> None:
    names = {"left": 0, "down": 1, "right": 2, "up": 3}
    game = lake(read=lambda reply: names[reply.strip()], show=lambda n: f"row {n // 4}")
    script = Script([" down", "down"], max_turns=2)
    game(script.plain(), {"seed": 0})
    assert script.received() == ["row 0", "row 1"]
    with pytest.raises(RefusedTurn):
        game(Script(["sideways"]).plain(), {"seed": 0})


def test_it_ends_where_the_turns_do() -> None:
    script = Script(["0"] * 9, max_turns=3)
    lake()(script.plain(), {"seed": 0})
    assert len(script.rewards) == 3


def test_unsupported_action_spaces_are_an_error() -> None:
    with error_about(RuntimeError, "Gymnasium(read"):
        Gymnasium(make="Pendulum-v1")(Script(["1.0"]).plain(), {"seed": 0})


def test_it_is_a_synchronous_environment() -> None:
    made = lake().environment(max_turns=6)
    assert (made.name, made.is_async, made.max_turns) == ("FrozenLake-v1", False, 6)
    assert pickle.loads(pickle.dumps(lake())) == lake()
    assert Gymnasium(make=Echo).environment().name == "Echo"


def test_it_is_played_in_the_process_of_synchronous_functions() -> None:
    environment = lake().environment(max_turns=20)
    replies = dict(zip(["0", "4", "8", "9", "10", "14"], TO_THE_GOAL, strict=True))

    async def run() -> None:
        codec = Codec(build_tokenizer(CHARACTERS), chat_template="")
        host = EpisodeHost(
            environment,
            codec,
            # The last message of the environment follows the policy's last reply, a digit.
            Scripted(codec, lambda text: replies[text.rpartition("<eos>")[2].strip() or text]),
            limits=LIMITS,
            executor=SyncWorkerFunctions(environment, memory_gib=4.0, start_timeout_s=120.0),
        )
        await host.start()
        try:
            (ended,) = await played(host, [request_of(task={"seed": 0})])
        finally:
            await host.close()
        assert ended.played is not None, ended.failure
        assert ended.played.components == {"turns": 1.0}
        assert len(ended.played.transcript) == 12

    asyncio.run(run())
