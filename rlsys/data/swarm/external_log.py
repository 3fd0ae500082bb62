"""external.jsonl: the group of another run at each prompt index of this run.

    {"prompt": 3, "group": {"peer": "swarm-1", "group_id": 12, "asked": ..., "completions": [...]}}
    {"prompt": 7, "group": null}

The file has a line for each index that may get a group of another run. The line contains the whole
group, so that the run can train on it again when the peer's files are gone, or null if the run
sampled the prompt itself.
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
from rlsys.data.swarm.shared_pool import Shared, SharedCompletion, SharedGroup, may_be_shared
from rlsys.errors import InvalidValue, require


class ExternalLog:
    """Append-only file of decisions.

    It continues where the file ends. A line reaches the operating system before `decide` returns.
    Raises InvalidValue for a damaged file.
    """

    def __init__(self, path: Path) -> None:
        self._places: dict[int, int] = {}  # byte offset of the line of a prompt index
        self.keys: list[str] = []
        """Keys of the groups that were taken."""
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
        """Size and checksum of the file."""
        return self._file.tally

    def group(self, index: int) -> SharedGroup | None:
        """Return the group that `decide` recorded for this prompt index."""
        self._reader.seek(self._places[index])
        _, group = _decision(self._reader.readline())
        return group

    def decide(self, index: int, group: SharedGroup | None) -> None:
        """Record the group of a prompt index, or None if the run samples the prompt itself."""
        line = dump_json({"prompt": index, "group": None if group is None else asdict(group)})
        place = self._file.tally.num_bytes
        self._file.append(line.encode() + b"\n")
        self._places[index] = place

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._reader.close()


def read_external(path: Path) -> dict[int, SharedGroup | None]:
    """Return all decisions by prompt index. Without a file there are none.

    Raises:
        InvalidValue: The file is damaged.
    """
    return {index: group for index, group, _ in _decisions(path)} if path.exists() else {}


def check_issued(path: Path, shared: Shared, prompts_per_step: int, issued: Iterable[int]) -> None:
    """Check that the file has a decision for each issued prompt index that may be external.

    Raises:
        InvalidValue: The file is damaged, or a decision is missing.
    """
    decided = read_external(path)
    for index in issued:
        require(
            index in decided
            or not may_be_shared(
                index,
                groups_per_step=shared.groups_per_step,
                prompts_per_step=prompts_per_step,
            ),
            str(path),
            rule=f"has no line for prompt {index}, which was issued",
            fix=_restore("Restore the file from a copy"),
        )


def _restore(action: str) -> str:
    return f"{action}, or start a new run under another {option('name')}."


def _decisions(path: Path) -> Iterator[tuple[int, SharedGroup | None, bytes]]:
    """Yield prompt index, group and line of each complete line.

    Raises:
        InvalidValue: The file is damaged.
    """
    seen: set[int] = set()
    num_bytes = 0
    with regular_file(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):  # a crash interrupted the write
                return
            try:
                index, group = _decision(line)
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidValue(
                    str(path),
                    rule=f"line {number} is damaged ({type(error).__name__}: {error})",
                    fix=_restore("Restore the file from a copy"),
                ) from error
            require(
                index not in seen,
                str(path),
                rule=f"line {number} repeats prompt {index} of an earlier line",
                fix="Restore the file from a copy, or cut the repeated lines off: "
                f"truncate -s {num_bytes} {path}",
            )
            seen.add(index)
            num_bytes += len(line)
            yield index, group, line


def _decision(line: bytes) -> tuple[int, SharedGroup | None]:
    """Parse a line, or raise ValueError, KeyError or TypeError."""
    decided = parse_json(line)
    index, group = decided["prompt"], decided["group"]
    if type(index) is not int:
        raise TypeError(f"prompt {reprlib.repr(index)} is not a number")
    return index, None if group is None else _group(group)


# Types of the fields of a group, and of its completions.
FIELDS = {"peer": str, "group_id": int, "row": dict, "completions": list, "rewards": list}
COMPLETION = {"text": str, "truncated": bool}


def _group(found: Any) -> SharedGroup:
    """Return the group of a parsed line, or raise TypeError or KeyError."""
    _check(found, FIELDS)
    if not (is_flat(found["asked"]) and is_flat(found["row"])):
        raise TypeError("its prompt or row is nested too deeply")
    for completion in found["completions"]:
        _check(completion, COMPLETION)
    for reward in found["rewards"]:
        if type(reward) not in (int, float):
            raise TypeError(f"the reward {reprlib.repr(reward)} is not a number")
    completions = [SharedCompletion(**completion) for completion in found.pop("completions")]
    return SharedGroup(**found, completions=completions)


def _check(found: Any, fields: Mapping[str, type]) -> None:
    if not isinstance(found, dict):
        raise TypeError(f"{reprlib.repr(found)} is not an object")
    for name, kind in fields.items():
        if type(found[name]) is not kind:
            raise TypeError(f"{name}={reprlib.repr(found[name])} is not of type {kind.__name__}")
