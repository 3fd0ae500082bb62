"""Adapter for TextArena (https://github.com/LeonGuertler/TextArena): games of one or more players.

In: the id of a game. In each turn a player gets the new messages and replies with a move. With
several players the policy plays either all of them, each in its own seat, or one against a given
opponent. The game's reward for a player is the reward of the player's last turn.
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
from rlsys.errors import require

# TextArena uses Python's global random generator, which all games of a process share.
DRAWING = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class TextArena(Foreign):
    """A game of TextArena.

    Attributes:
        game: Id of the game, such as "TicTacToe-v0".
        num_players: Number of players.
        opponent: Function `(new messages) -> move` that plays all players except the task's
            "player", which the policy plays. None: the policy plays all. If the game ends because
            a move of the opponent is invalid, the episode fails.
        brackets: Whether to put moves without brackets into [ ], which most games require.
        options: Arguments of `textarena.make`.
    """

    game: str
    num_players: int = 1
    opponent: Callable[[str], str] | None = None
    brackets: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the environment in metrics and failures."""
        return self.game

    @property
    def seats(self) -> tuple[str, ...]:
        """Seats of the environment: one for each player that the policy plays."""
        if self.num_players == 1 or self.opponent is not None:
            return ("policy",)
        return tuple(f"player_{number}" for number in range(self.num_players))

    def environment(self, **options: Any) -> Environment:
        """Return the environment, with the seats of the game."""
        return super().environment(**{"seats": self.seats, **options})

    def tasks(self, num: int, *, seed: int = 0) -> list[dict[str, Any]]:
        """Return seeds of the game, and the policy's player: each one in turn."""
        return [{"seed": seed + n, "player": n % self.num_players} for n in range(num)]

    def __call__(self, chat: SyncChat, task: Mapping[str, Any]) -> float | None:
        """Play one rollout of a task."""
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
            text = _new_messages(observation, player, env)
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
                break  # a limit of the episode ended it: no player has won
        rewards = (env.close()[0] if is_over else None) or {}
        if len(chats) == 1:
            return float(rewards.get(next(iter(chats)), 0.0))
        for player in moved:
            chats[player].reward(float(rewards.get(player, 0.0)), name=f"player_{player}")
        return None

    def _check_opponent(self, env: Any, player: int, move: str) -> None:
        """Raise InvalidValue if the game has ended because the opponent's move is invalid."""
        info = (env.state.game_info or {}).get(player) or {}
        require(
            not info.get("invalid_move"),
            f"TextArena({self.game!r}): opponent",
            move,
            rule=f"this move of player {player} ended the game: {info.get('reason')!s}",
            fix="The function must return a valid move.",
        )

    def _chats(self, chat: SyncChat, player: int) -> dict[int, SyncChat]:
        if len(self.seats) == 1:
            return {player if self.num_players > 1 else 0: chat}
        return {number: chat.seat(seat) for number, seat in enumerate(self.seats)}

    def _move(self, reply: str) -> str:
        has_brackets = "[" in reply or "]" in reply
        return reply if has_brackets or not self.brackets else f"[{reply.strip()}]"


def _new_messages(observation: Any, player: int, env: Any) -> str:
    """Return the new messages for a player, without the player's own moves."""
    names = env.state.role_mapping
    lines = []
    for sender, message, _ in observation:
        if sender == player:
            continue
        lines.append(str(message) if sender < 0 else f"[{names.get(sender, sender)}] {message}")
    return "\n".join(lines)


class _Generator:
    """State of Python's random generator for one game."""

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Use the game's state inside of the block."""
        with DRAWING:
            others = random.getstate()
            random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(others)
