"""Decisions on when and how much to draft, so that speculation costs a few percent at most.

    running requests ──► DraftPolicy.propose ──► Drafts ──► one pass ──► observe(accepted, seconds)

Two rules, both from measurements of the running engine:

- A pass has drafts while passes with them are faster than plain ones (draft_pace.py).
- A request whose drafts are accepted gets longer ones, up to num_tokens. One whose drafts are
  rejected gets none for a while.

What is sampled does not depend on any of this.

Shape legend: N running requests, M drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlsys.config.speculation import Speculation
from rlsys.engines.generation.draft_pace import Pace, Pacing
from rlsys.engines.generation.ngram_draft import repeated
from rlsys.types import Int32Array

if TYPE_CHECKING:  # importing it takes as long as importing torch
    from rlsys.engines.generation.torch.slots import Slots

# Passes without drafts for a request after its second, third, ... rejected draft, at most.
LONGEST_REST = 32


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """Drafted tokens, in order of `offsets`: those of one offset for all requests, then the next.

    `offsets` count from the token that the pass samples anyway: the first drafted one has 1.
    """

    slots: npt.NDArray[np.int64]  # [M]
    offsets: npt.NDArray[np.int64]  # [M]
    tokens: Int32Array  # [M]


class DraftPolicy:
    """Drafts for the running requests of a batch.

    `pace` decides between passes with and without drafts. `clock` returns seconds.
    """

    def __init__(
        self,
        speculation: Speculation,
        *,
        clock: Callable[[], float],
        pace: Pacing | None = None,
    ) -> None:
        self.num_drafted = 0
        self.num_accepted = 0
        self._speculation = speculation
        self._pace: Pacing = Pace() if pace is None else pace
        self._clock = clock
        self._began = 0.0
        self._is_drafting = False

    @property
    def speedup(self) -> float | None:
        """See `Pacing.speedup`."""
        return self._pace.speedup

    def propose(self, slots: Slots) -> Drafts | None:
        """Return drafts for the next pass over all running requests, None for a plain pass.

        `observe` must follow once the pass has been recorded.
        """
        self._began = self._clock()
        self._is_drafting = self._pace.drafts(slots.num_running)
        if not self._is_drafting:
            return None
        wanted = self._num_wanted(slots)
        chosen = np.flatnonzero(wanted > 0)
        if not len(chosen):
            return None
        tokens, found = repeated(
            slots.all_tokens(chosen),
            slots.running("length")[chosen],
            min_match=self._speculation.min_match,
            max_match=self._speculation.max_match,
            num_tokens=int(wanted.max()),
        )
        counts = np.where(found, wanted[chosen], 0)
        if not counts.any():
            return None
        offsets, rows = np.nonzero(np.arange(counts.max())[:, None] < counts)
        return Drafts(slots=chosen[rows], offsets=offsets + 1, tokens=tokens[rows, offsets])

    def _num_wanted(self, slots: Slots) -> npt.NDArray[Any]:
        """Return the tokens to draft for each running request, [N]."""
        rest, reach = slots.running("rest"), slots.running("reach")
        room = slots.running("limit") - slots.running("length") - 1
        wanted = np.minimum(np.minimum(reach, self._speculation.num_tokens), room)
        may_draft = (rest == 0) & ~slots.running("is_constrained")
        rest -= rest > 0
        return np.where(may_draft, wanted, 0)

    def observe(self, slots: Slots, drafts: Drafts | None, accepted: npt.NDArray[Any]) -> None:
        """Take into account how many drafted tokens each running request [N] has accepted.

        Call it before requests that have ended are removed.
        """
        num_running = slots.num_running
        if drafts is not None:
            drafted = np.bincount(drafts.slots, minlength=num_running)
            self.num_drafted += len(drafts.slots)
            self.num_accepted += int(accepted.sum())
            self._adapt(slots, drafted, accepted)
        self._pace.observe(
            num_running,
            drafted=self._is_drafting,
            num_tokens=num_running + int(accepted.sum()),
            seconds=self._clock() - self._began,
        )

    def _adapt(self, slots: Slots, drafted: npt.NDArray[Any], accepted: npt.NDArray[Any]) -> None:
        """Set the length of each request's next drafts, and its pause."""
        reach, rest, misses = (slots.running(name) for name in ("reach", "rest", "misses"))
        had = drafted > 0
        whole, none = had & (accepted == drafted), had & (accepted == 0)
        reach[whole] = np.minimum(2 * reach[whole], self._speculation.num_tokens)
        partly = had & ~whole
        reach[partly] = np.maximum(accepted[partly], 1)
        misses[had & ~none] = 0
        misses[none] = np.minimum(misses[none] + 1, 6)
        rest[none] = np.minimum(2 ** misses[none], LONGEST_REST) - 2
