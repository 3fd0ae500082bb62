"""rollouts.jsonl: what the policy was asked, what it answered, and what that was worth.

In: rollouts with their rewards and advantages, a few groups each step. Out: one plain JSON object a
rollout, keyed as RolloutRecord's fields. The dataset row may hold anything; what JSON has no word
for is written as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import Tally
from rlsys.runs.observe.step_log import StepLog, read_lines

MAX_BYTES = 64  # of an image or a sound, which nobody reads in rollouts.jsonl


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """One rollout as people read it. T completion tokens."""

    step: int  # optimizer step that trained it
    group_id: int
    index: int  # within the group
    prompt: str
    completion: str
    token_ids: Sequence[int]  # [T]
    policy_versions: Sequence[int]  # [T]
    staleness: int  # optimizer steps between its oldest token and the step that trained it
    reward: float | None  # None: nothing scored it
    rewards: Mapping[str, float]  # by reward function, before their weights
    advantage: float | None  # None: its tokens have one each
    finish_reason: str
    columns: Mapping[str, float] = field(default_factory=dict)
    """What other stages of the dataflow say of it, such as a reward model's score."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The dataset row's columns beside the prompt, as the rewards saw them."""
    asked: Any = None
    """The row's prompt, a text or messages, where a chat template made `prompt` of it."""
    shared_by: str = ""
    """The run that sampled it, where that was another."""
    is_greedy: bool = False
    """The baseline of its group (flow.generate(greedy_baseline=True)), which is not trained on."""
    turns: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """Of an episode: who said what, branch by branch."""
    run_id: str = ""
    """Of the run that wrote it (RunDirectory.run_id), by which it knows its own in a copy."""


class RolloutWriter:
    """Appends to rollouts.jsonl of the run `run_id`; on resume, records of steps beyond
    `after_step` are removed, which leaves `kept`.
    """

    def __init__(
        self, path: Path, *, run_id: str = "", after_step: int = 0, kept: Tally | None = None
    ) -> None:
        self._run_id = run_id
        self._log = StepLog(path, after_step=after_step, kept=kept)

    @property
    def tally(self) -> Tally:
        return self._log.tally

    def write(self, records: Iterable[RolloutRecord]) -> None:
        """Raises ValueError for NaN and infinities."""
        for record in records:
            written = replace(
                record, row=plain(record.row), asked=plain(record.asked), run_id=self._run_id
            )
            self._log.append(asdict(written))

    def go_back(self, step: int) -> None:
        """Training went back to `step`: records of later steps are removed."""
        self._log.go_back(step)

    def close(self) -> None:
        self._log.close()


def plain(value: Any) -> Any:
    """As JSON writes it: numbers that are not finite, dates and the like as text, long bytes and
    arrays by their first ones.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case bytes() | bytearray():
            return repr(bytes(value[:MAX_BYTES])) + ("..." if len(value) > MAX_BYTES else "")
        case list() | tuple():
            return [plain(item) for item in value]
        case _ if hasattr(value, "tolist"):  # numpy's scalars and arrays
            return plain(value.tolist())
        case _:
            return str(value)


def read_rollouts(path: Path) -> Iterator[RolloutRecord]:
    """In the order of writing. Raises ValueError for a damaged line."""
    return (RolloutRecord(**line) for line in read_lines(path))
