"""The groups of rollouts that a page shows, chosen the same way each time.

    rollouts.jsonl ── every record ──► RolloutIndex (place, step, reward) ── choose ──► full records

Groups are spread evenly over the run: first the last and the first one, then the middle, the
quarters, and so on until a budget of bytes is used. So a larger budget adds groups and removes
none. The index has some 100 bytes per rollout, whatever its text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from rlsys.common.number_text import counted
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.report.curve_sampling import rounded
from rlsys.report.page import LARGEST, size_in_page

MAX_GROUPS = 400
MAX_TEXT = 6000  # characters of a prompt, a completion or a turn
MAX_TURNS = 60
MAX_TOKENS = 2000  # of a token strip
MAX_ROW = 2000  # characters of a dataset row
MAX_NAME = 200  # characters of a role, a reward or a run
MAX_REWARDS = 100  # of a rollout


@dataclass
class IndexedGroup:
    """Place of a group's rollouts in the file."""

    step: int
    group: int
    offsets: list[int] = field(default_factory=list)


class RolloutIndex:
    """Index of a rollouts.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.restart()

    def restart(self) -> None:
        """Forget all records."""
        self._groups: dict[tuple[int, int], IndexedGroup] = {}
        self.num_rollouts = 0

    def accept(self, record: Any, offset: int) -> None:
        """Add a record.

        Raises:
            ValueError: It is not a record of a rollout.
        """
        if not isinstance(record, dict):
            raise ValueError("it is not an object")
        step, group = record.get("step"), record.get("group_id")
        if type(step) is not int or type(group) is not int:
            raise ValueError("it has no step or group_id")
        key = (step, group)
        self._groups.setdefault(key, IndexedGroup(step=step, group=group)).offsets.append(offset)
        self.num_rollouts += 1

    @property
    def num_groups(self) -> int:
        """Number of groups in the file."""
        return len(self._groups)

    def choose(self, tokens: Mapping[int, str], *, max_bytes: int) -> list[dict[str, Any]]:
        """Return the groups to show, by step, within `max_bytes` of JSON.

        Args:
            tokens: Text of each token id, if it is known.
            max_bytes: Budget.
        """
        groups = list(self._groups.values())
        chosen: list[tuple[int, dict[str, Any]]] = []
        left = max_bytes
        if not groups:
            return []
        with self._path.open("rb") as file:
            for place in itertools.islice(spread(len(groups)), MAX_GROUPS):
                group = groups[place]
                rollouts, size = _read(file, group.offsets, tokens, max_bytes=left)
                if len(rollouts) < len(group.offsets) and chosen:
                    break
                left -= size
                entry: dict[str, Any] = {"step": group.step, "group": group.group}
                if hidden := len(group.offsets) - len(rollouts):
                    entry["num_hidden"] = hidden
                chosen.append((place, {**entry, "rollouts": rollouts}))
        return [entry for _, entry in sorted(chosen, key=lambda one: one[0])]


def _read(
    file: BinaryIO, offsets: Sequence[int], tokens: Mapping[int, str], *, max_bytes: int
) -> tuple[list[dict[str, Any]], int]:
    """Return the first rollouts of a group, with at most `max_bytes` of JSON, and their bytes.

    The first one is returned whatever its size.
    """
    rollouts: list[dict[str, Any]] = []
    num_bytes = 0
    for offset in offsets:
        file.seek(offset)
        shown = _shown(parse_json(file.readline()), tokens)
        size = size_in_page(shown)
        if rollouts and num_bytes + size > max_bytes:
            break
        num_bytes += size
        rollouts.append(shown)
    return rollouts, num_bytes


def spread(count: int) -> Iterator[int]:
    """Yield the numbers below `count`: the last, the first, then those halfway between others."""
    seen: set[int] = set()

    def new(place: int) -> Iterator[int]:
        if 0 <= place < count and place not in seen:
            seen.add(place)
            yield place

    yield from new(count - 1)
    yield from new(0)
    parts = 2
    while len(seen) < count:
        for i in range(1, parts, 2):
            yield from new(count * i // parts)
        parts *= 2


def _shown(record: Mapping[str, Any], tokens: Mapping[int, str]) -> dict[str, Any]:
    """Return the part of a record that the page shows. Missing and odd values are left out."""
    ids = _integers(record.get("token_ids"))
    versions = _integers(record.get("policy_versions"))
    shown: dict[str, Any] = {
        "index": _number(record.get("index")),
        "prompt": cut(str(record.get("prompt", ""))),
        "completion": cut(str(record.get("completion", ""))),
        "num_tokens": len(ids),
        "tokens": [tokens.get(i, f"#{i}") for i in ids[:MAX_TOKENS]],
        "versions": versions[:MAX_TOKENS],
        "gaps": _gaps(record.get("logprob_gaps")),
        "staleness": _number(record.get("staleness")),
        "reward": _number(record.get("reward")),
        "rewards": _numbers(record.get("rewards")) | _numbers(record.get("columns")),
        "advantage": _number(record.get("advantage")),
        "finish": cut(str(record.get("finish_reason", "")), MAX_NAME),
        "turns": _turns(record.get("turns")),
    }
    if record.get("row"):
        shown["row"] = cut(dump_json(record["row"], ensure_ascii=False), MAX_ROW)
    if record.get("shared_by"):
        shown["shared_by"] = cut(str(record["shared_by"]), MAX_NAME)
    if record.get("is_greedy"):
        shown["is_greedy"] = True
    return shown


def cut(text: str, length: int = MAX_TEXT) -> str:
    """Return a text, cut in the middle if it is longer than `length`."""
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def _turns(turns: object) -> list[dict[str, Any]]:
    if not isinstance(turns, list):
        return []
    found = [one for one in turns if isinstance(one, dict)]
    shown = [
        {
            "branch": _number(one.get("branch", 0)),
            "role": cut(str(one.get("role", "")), MAX_NAME),
            "text": cut(str(one.get("text", ""))),
            "sampled": bool(one.get("sampled")),
            **({"seat": cut(str(one["seat"]), MAX_NAME)} if "seat" in one else {}),
        }
        for one in found
    ]
    if len(shown) <= MAX_TURNS:
        return shown
    half = MAX_TURNS // 2
    note = {
        "branch": 0,
        "role": "left out",
        "text": counted(len(shown) - 2 * half, "turn"),
        "sampled": False,
    }
    return [*shown[:half], note, *shown[-half:]]


def _gaps(value: object) -> list[float | int | None]:
    """Return the log-probability gaps, with the decimals that a page shows."""
    gaps = value[:MAX_TOKENS] if isinstance(value, list) else []
    return [round(x, 4) if isinstance(x := _number(gap), float) else x for gap in gaps]


def _integers(value: object) -> Sequence[int]:
    return [i for i in value if type(i) is int] if isinstance(value, list) else []


def _number(value: object) -> float | int | None:
    if not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
        return None
    return rounded(value)


def _numbers(value: object) -> dict[str, float | int | None]:
    if not isinstance(value, dict):
        return {}
    first = itertools.islice(value.items(), MAX_REWARDS)
    return {cut(str(name), MAX_NAME): _number(number) for name, number in first}
