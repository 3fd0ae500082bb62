"""A worker more than play, which has loaded everything by the time that one of them dies."""

from __future__ import annotations

from collections.abc import Callable

from .calls import begun
from .player import Player

# Spare workers in a row that may die unused; then one is hired only when it is needed.
MAX_LOST = 3


class Spare:
    """`create` starts a worker. One that dies unused is replaced, as long as `is_wanted`."""

    def __init__(self, create: Callable[[], Player], *, is_wanted: Callable[[], bool]) -> None:
        self._create = create
        self._is_wanted = is_wanted
        self.player: Player | None = None
        self._num_lost = 0

    def hire(self) -> None:
        self.player = self._create()
        begun(self._keep(self.player))

    def take(self) -> Player:
        """It, if it lives, else a new one; another is hired in its place."""
        spare, self.player = self.player, None
        taken = self._create() if spare is None or spare.worker.is_dead else spare
        self._num_lost = 0
        self.hire()
        return taken

    async def _keep(self, player: Player) -> None:
        await player.gone()
        if self.player is not player or not self._is_wanted():
            return
        self.player = None
        self._num_lost += 1
        if self._num_lost <= MAX_LOST:
            self.hire()
