"""Games of TextArena (https://github.com/LeonGuertler/TextArena), of one player or of several.

In: the id of a game. Each turn, a player is told what is new to him and says his move. Where there
are several, either the policy plays all sides, each in a seat of its own, or one, against a given
opponent. What the game gives a player at its end is the reward of his last turn.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rlsys.environments.adapters import Foreign, required
from rlsys.environments.environment import Environment
from rlsys.environments.workers.sync_worker_chat import SyncChat

# TextArena draws from Python's one generator, which many games of a process share.
DRAWING = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class TextArena(Foreign):
    """game: an id, such as "TicTacToe-v0".
    num_players: those that sit at it.
    opponent: `(what is new) -> move`, plays all sides but the policy's, which is a task's "player";
        None: the policy plays all. A move of it that the game refuses, and ends for, is an error:
        the policy has won nothing.
    brackets: put moves into [ ], as most games ask, where a reply has none.
    options: of `textarena.make`.
    """

    game: str
    num_players: int = 1
    opponent: Callable[[str], str] | None = None
    brackets: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.game

    @property
    def seats(self) -> tuple[str, ...]:
        """Of the environment: one a player, where the policy plays several."""
        if self.num_players == 1 or self.opponent is not None:
            return ("policy",)
        return tuple(f"player_{number}" for number in range(self.num_players))

    def environment(self, **options: Any) -> Environment:
        return super().environment(**{"seats": self.seats, **options})

    def tasks(self, num: int, *, seed: int = 0) -> list[dict[str, Any]]:
        """Seeds of the game, and who the policy is: each player in turn."""
        return [{"seed": seed + n, "player": n % self.num_players} for n in range(num)]

    def __call__(self, chat: SyncChat, task: Mapping[str, Any]) -> float | None:
        generator = _Generator(int(task["seed"]))
        with generator.drawing():
            env = required("textarena", "textarena").make(f"{self.game}-raw", **self.options)
            env.reset(num_players=self.num_players, seed=int(task["seed"]))
        chats = self._chats(chat, int(task["player"]))
        moved = set()
        is_over = False
        while not is_over:
            with generator.drawing():
                player, observation = env.get_observation()
            text = _told(observation, player, env)
            if player in chats:
                moved.add(player)
                move = chats[player](text)
            else:
                assert self.opponent is not None
                move = self.opponent(text)
            with generator.drawing():
                is_over, _ = env.step(self._move(move))
            if is_over and player not in chats:
                self._check_opponent(env, player, move)
            if not is_over and any(one.done for one in chats.values()):
                break  # its limits came before its end: nobody has won
        rewards = (env.close()[0] if is_over else None) or {}
        if len(chats) == 1:
            return float(rewards.get(next(iter(chats)), 0.0))
        for player in moved:
            chats[player].reward(float(rewards.get(player, 0.0)), name=f"player_{player}")
        return None

    def _check_opponent(self, env: Any, player: int, move: str) -> None:
        """Raise ValueError if the game has ended because it refused the opponent's move."""
        told = (env.state.game_info or {}).get(player) or {}
        if told.get("invalid_move"):
            raise ValueError(
                f"opponent of {self.game}: its move {move!r} as player {player} ended the game: "
                f"{told.get('reason')!s} Let the function return a legal move."
            )

    def _chats(self, chat: SyncChat, player: int) -> dict[int, SyncChat]:
        if len(self.seats) == 1:
            return {player if self.num_players > 1 else 0: chat}
        return {number: chat.seat(seat) for number, seat in enumerate(self.seats)}

    def _move(self, reply: str) -> str:
        has_brackets = "[" in reply or "]" in reply
        return reply if has_brackets or not self.brackets else f"[{reply.strip()}]"


def _told(observation: Any, player: int, env: Any) -> str:
    """What is new to a player; his own moves, he knows."""
    names = env.state.role_mapping
    lines = []
    for sender, message, _ in observation:
        if sender == player:
            continue
        lines.append(str(message) if sender < 0 else f"[{names.get(sender, sender)}] {message}")
    return "\n".join(lines)


class _Generator:
    """A state of Python's generator that is one game's own."""

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        with DRAWING:
            others = random.getstate()
            random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(others)
