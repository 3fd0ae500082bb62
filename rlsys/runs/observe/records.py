"""rollouts.jsonl: prompts, completions and their rewards.

Input: rollouts with rewards and advantages, of a few groups per step. Output: one JSON object per
rollout, with the fields of RolloutRecord as keys. Values of the dataset row that JSON cannot
express are written as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlsys import metrics
from rlsys.common.append_only_file import Tally
from rlsys.common.safe_json import dump_json
from rlsys.runs.observe.step_log import StepLog, damage_of_line, read_lines

MAX_BYTES = 64  # that are written of an image or a sound


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """A rollout in readable form. T is the number of completion tokens."""

    step: int  # optimizer step that trained it
    group_id: int
    index: int  # within the group
    prompt: str
    completion: str
    token_ids: Sequence[int]  # [T]
    policy_versions: Sequence[int]  # [T]
    staleness: int  # optimizer steps between its oldest token and the step that trained it
    reward: float | None  # None: no stage scored it
    rewards: Mapping[str, float]  # by reward function, before their weights
    advantage: float | None  # None: each token has its own
    finish_reason: str
    logprob_gaps: Sequence[float | None] = field(default_factory=list)
    """[T] log-probability of each token at the sampler minus that at the trainer before the step,
    in nats. None: the token was not trained. Empty: the loss has no such metric."""
    columns: Mapping[str, float] = field(default_factory=dict)
    """Values of other stages of the dataflow, such as a reward model's score."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """Columns of the dataset row, as the reward functions got them."""
    asked: Any = None
    """The row's prompt, a text or messages, if `prompt` is a chat template's rendering of it."""
    shared_by: str = ""
    """The run that sampled it, if that was another one."""
    is_greedy: bool = False
    """Whether it is the baseline of its group (flow.generate(greedy_baseline=True)), untrained."""
    turns: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """Turns of an episode, with role and text, branch by branch."""
    run_id: str = ""
    """The run that wrote the record (RunDirectory.run_id)."""


class RolloutWriter:
    """Writer of rollouts.jsonl.

    Args:
        path: The file.
        run_id: Identifier of the run.
        after_step: Step from which a resumed run continues. Later records are removed.
        kept: Tally of the records up to that step, if it is known.
    """

    def __init__(
        self, path: Path, *, run_id: str = "", after_step: int = 0, kept: Tally | None = None
    ) -> None:
        self._run_id = run_id
        self._log = StepLog(path, after_step=after_step, kept=kept)

    @property
    def tally(self) -> Tally:
        """Tally of the whole file."""
        return self._log.tally

    def write(self, records: Iterable[RolloutRecord]) -> None:
        """Append records.

        Raises:
            ValueError: A number is NaN or infinite.
        """
        for record in records:
            written = replace(
                record, row=plain(record.row), asked=plain(record.asked), run_id=self._run_id
            )
            self._log.append(asdict(written))

    def go_back(self, step: int) -> None:
        """Remove the records of steps after `step`, to which training went back."""
        self._log.go_back(step)

    def close(self) -> None:
        """Close the file."""
        self._log.close()


def plain(value: Any) -> Any:
    """Return a value that JSON can express.

    Numbers that are not finite, dates and the like become text. Long bytes are cut.
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
    """Yield the records in the order of writing.

    Raises:
        InvalidValue: A line is damaged.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if fault := record_fault(line):
            raise damage_of_line(path, number, f"it {fault}")
        try:
            yield RolloutRecord(**line)
        except TypeError:
            raise damage_of_line(path, number, "it has other fields than a rollout") from None


# Fields that every reader needs.
KINDS = {
    metrics.STEP: int,
    "group_id": int,
    "index": int,
    "prompt": str,
    "token_ids": list,
    "policy_versions": list,
    "staleness": int,
}


def record_fault(line: Mapping[str, Any]) -> str | None:
    """Return why a line is not a rollout: the first field of another type."""
    for name, kind in KINDS.items():
        value = line.get(name)
        is_valid = type(value) is kind
        if is_valid and kind is list:
            is_valid = all(type(item) is int for item in line[name])
        if not is_valid:
            what = "a list of integers" if kind is list else f"of type {kind.__name__}"
            return f"has {name}={dump_json(value)[:40]}, which is not {what}"
    return None
