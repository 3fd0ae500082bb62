"""external.jsonl: whose group stands at which prompt index of a run.

    {"prompt": 3, "group": {"peer": "swarm-1", "group_id": 12, "asked": ..., "completions": [...]}}
    {"prompt": 7, "group": null}

A line for each index at which a group of another run may stand: what it got, whole, so that it can
be trained on again when the peer's files are gone; null where the run sampled itself.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import GrowingFile, Tally, regular_file
from rlsys.common.option_names import option
from rlsys.common.safe_json import dump_json, is_flat, parse_json
from rlsys.config import require
from rlsys.data.swarm.shared_pool import Shared, SharedCompletion, SharedGroup, is_place


class ExternalLog:
    """Goes on where the file ends. A line reaches the operating system before `decide` returns.
    Raises ValueError for a damaged file.
    """

    def __init__(self, path: Path) -> None:
        self._places: dict[int, int] = {}  # of a prompt's line in the file
        self.keys: list[str] = []
        """Of the groups that were taken."""
        kept = Tally()
        if path.exists():
            for index, group, line in _decisions(path):
                self._places[index] = kept.num_bytes
                kept = kept.plus(line)
                if group is not None:
                    self.keys.append(group.key)
        self._file = GrowingFile(path, kept=kept)
        self._reader = path.open("rb")

    def __contains__(self, index: int) -> bool:
        return index in self._places

    @property
    def tally(self) -> Tally:
        """What stands there."""
        return self._file.tally

    def group(self, index: int) -> SharedGroup | None:
        """What `decide` was given for this prompt."""
        self._reader.seek(self._places[index])
        _, group = _decision(self._reader.readline())
        return group

    def decide(self, index: int, group: SharedGroup | None) -> None:
        """None: the prompt is the run's own."""
        line = dump_json({"prompt": index, "group": None if group is None else asdict(group)})
        place = self._file.tally.num_bytes
        self._file.append(line.encode() + b"\n")
        self._places[index] = place

    def close(self) -> None:
        self._file.close()
        self._reader.close()


def read_external(path: Path) -> dict[int, SharedGroup | None]:
    """All that was decided, by prompt index; nothing where there is no file. Raises ValueError for
    a damaged one.
    """
    return {index: group for index, group, _ in _decisions(path)} if path.exists() else {}


def check_issued(path: Path, shared: Shared, prompts_per_step: int, issued: Iterable[int]) -> None:
    """Raises ValueError unless the file is whole, and has what became of each place for an external
    group among the prompts that were issued. Nothing is changed.
    """
    decided = read_external(path)
    for index in issued:
        require(
            index in decided
            or not is_place(
                index,
                groups_per_step=shared.groups_per_step,
                prompts_per_step=prompts_per_step,
            ),
            f"{path} does not say whose group prompt {index} got, which was issued; restore the "
            f"file from a copy, or start a new run under another {option('name')}.",
        )


def _decisions(path: Path) -> Iterator[tuple[int, SharedGroup | None, bytes]]:
    """Prompt index, its group and their line: all that are whole. Raises ValueError for a damaged
    file.
    """
    seen: set[int] = set()
    num_bytes = 0
    with regular_file(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):  # a crash came in the middle of writing it
                return
            try:
                index, group = _decision(line)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path} line {number} is damaged ({type(error).__name__}: {error}); "
                    "restore the file from a copy, or start a new run under another "
                    f"{option('name')}."
                ) from error
            if index in seen:
                raise ValueError(
                    f"{path} line {number} is of prompt {index}, as one before it is: lines were "
                    "doubled. Restore the file from a copy; without one, cut it there: "
                    f"truncate -s {num_bytes} {path}"
                )
            seen.add(index)
            num_bytes += len(line)
            yield index, group, line


def _decision(line: bytes) -> tuple[int, SharedGroup | None]:
    """Raises ValueError, KeyError or TypeError for a line that is none."""
    decided = parse_json(line)
    index, group = decided["prompt"], decided["group"]
    if type(index) is not int:
        raise TypeError(f"prompt {reprlib.repr(index)} is no number")
    return index, None if group is None else _group(group)


# Of a group's fields in a line; those of its completions.
FIELDS = {"peer": str, "group_id": int, "row": dict, "completions": list, "rewards": list}
COMPLETION = {"text": str, "truncated": bool}


def _group(found: Any) -> SharedGroup:
    """Raises TypeError or KeyError for what is none."""
    _check(found, FIELDS)
    if not (is_flat(found["asked"]) and is_flat(found["row"])):
        raise TypeError("its prompt or row is nested too deeply")
    for completion in found["completions"]:
        _check(completion, COMPLETION)
    for reward in found["rewards"]:
        if type(reward) not in (int, float):
            raise TypeError(f"the reward {reprlib.repr(reward)} is no number")
    completions = [SharedCompletion(**completion) for completion in found.pop("completions")]
    return SharedGroup(**found, completions=completions)


def _check(found: Any, fields: Mapping[str, type]) -> None:
    if not isinstance(found, dict):
        raise TypeError(f"{reprlib.repr(found)} is no object")
    for name, kind in fields.items():
        if type(found[name]) is not kind:
            raise TypeError(f"{name}={reprlib.repr(found[name])} is not of type {kind.__name__}")
