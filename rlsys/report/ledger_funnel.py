"""The ledger as a funnel: how many groups reached each stage, and why the others did not.

    issued ─► sampled ─► scored ─► trained
                │           │         └─ refused, surplus
                │           └─ reward ...
                └─ stale, replica died

Input: events of ledger.jsonl, one at a time. Output: counts that add up, and the staleness of every
trained group. Unlike rlsys.dataflow.scheduling.ledger, contradictions are counted and not refused:
the page shows damaged runs too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlsys.dataflow.scheduling.ledger import LedgerError, check_fields

OPEN = "open"
MAX_DROPPED = 200  # dropped groups that are listed, the newest ones

# The last stage that a group has reached when it is dropped, by the first word of the reason.
STAGES = ("issued", "sampled", "scored", "trained")
LOST_AFTER = {"stale": "issued", "replica": "issued", "environment": "issued", "reward": "sampled"}
OTHERS_LOST_AFTER = "scored"


@dataclass(frozen=True, kw_only=True)
class DroppedGroup:
    """A group that was not trained."""

    group: int
    prompt: int
    reason: str
    step: int  # optimizer steps at that time


class LedgerReader:
    """State of all groups after the events so far."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all events."""
        self._prompts: dict[int, int] = {}
        self._ended: dict[int, int | str] = {}  # step or reason of each ended group
        self._staleness: dict[int, list[int]] = {}  # of the groups of each step
        self._groups: dict[int, list[int]] = {}  # of each step
        self._dropped: dict[int, DroppedGroup] = {}
        self.num_reissued = 0
        self.num_skipped = 0
        self.resumes: list[int] = []  # steps from which training continued
        self.step = 0

    def accept(self, event: Any, offset: int) -> None:
        """Apply an event.

        Raises:
            ValueError: It is not an event of a ledger.
        """
        try:
            check_fields(event)
        except LedgerError as error:
            raise ValueError(str(error)) from None
        _APPLY[event["event"]](self, event)

    def _issued(self, event: Mapping[str, Any]) -> None:
        self._prompts[event["group"]] = event["prompt"]

    def _reissued(self, event: Mapping[str, Any]) -> None:
        self.num_reissued += 1

    def _skipped(self, event: Mapping[str, Any]) -> None:
        self.num_skipped += 1

    def _trained(self, event: Mapping[str, Any]) -> None:
        self.step = step = event["step"]
        self._groups[step] = event["groups"]
        self._staleness[step] = [step - 1 - oldest for oldest in event["oldest_versions"]]
        self._ended.update(dict.fromkeys(event["groups"], step))

    def _apply_drop(self, event: Mapping[str, Any]) -> None:
        group, reason = event["group"], event["reason"]
        self._ended[group] = reason
        self._dropped[group] = DroppedGroup(
            group=group, prompt=self._prompts.get(group, -1), reason=reason, step=self.step
        )

    def _resumed(self, event: Mapping[str, Any]) -> None:
        self.resumes.append(event["step"])
        for step in [one for one in self._groups if one > event["step"]]:
            for group in self._groups.pop(step):
                self._ended.pop(group, None)
            del self._staleness[step]
        self.step = event["step"]

    @property
    def dropped(self) -> list[DroppedGroup]:
        """Newest dropped groups, at most MAX_DROPPED."""
        return list(self._dropped.values())[-MAX_DROPPED:]

    @property
    def num_dropped(self) -> int:
        """Number of all dropped groups."""
        return len(self._dropped)

    def staleness(self) -> dict[int, int]:
        """Return the number of trained groups by staleness, in optimizer steps."""
        return dict(sorted(Counter(s for of in self._staleness.values() for s in of).items()))

    def funnel(self) -> dict[str, Any]:
        """Return the numbers of groups at each stage. Those that leave a stage add up.

        Groups that have not ended are counted as issued only: the ledger does not say how far
        they are.
        """
        ends = Counter("trained" if isinstance(end, int) else end for end in self._ended.values())
        num_trained = ends.pop("trained", 0)
        num_issued = len(self._prompts.keys() | self._ended.keys())
        num_open = num_issued - len(self._ended)
        after: dict[str, dict[str, int]] = {stage: {} for stage in STAGES[:-1]}
        for reason, count in sorted(ends.items(), key=lambda item: (-item[1], str(item[0]))):
            stage = LOST_AFTER.get(str(reason).partition(" ")[0], OTHERS_LOST_AFTER)
            after[stage][str(reason)] = count
        num_scored = num_trained + sum(after["scored"].values())
        num_sampled = num_scored + sum(after["sampled"].values())
        counts = (num_issued, num_sampled, num_scored, num_trained)
        return {
            "stages": [
                {"name": name, "groups": count, "lost": after.get(name, {})}
                for name, count in zip(STAGES, counts, strict=True)
            ],
            "open": num_open,
            "reissued": self.num_reissued,
            "skipped": self.num_skipped,
        }


_APPLY = {
    "issued": LedgerReader._issued,
    "reissued": LedgerReader._reissued,
    "skipped": LedgerReader._skipped,
    "trained": LedgerReader._trained,
    "dropped": LedgerReader._apply_drop,
    "resumed": LedgerReader._resumed,
}
