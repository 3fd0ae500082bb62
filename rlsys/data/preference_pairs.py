"""Pairs in the columns "chosen" and "rejected", as rows of a prompt and two completions.

In: rows of TRL's preference formats, each of texts or of chats.

    prompt, chosen, rejected    chosen and rejected continue the prompt, or repeat it and go on
    chosen, rejected            both contain the prompt, which is their common beginning

Out: the same rows with the prompt in the prompt column and the list of both completions, without
the prompt, in another column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from rlsys.errors import require
from rlsys.rewards.column_paths import value_at
from rlsys.text.chat_template import REPLY_ROLE

CHOSEN, REJECTED = "chosen", "rejected"

CHANGE_ROW = "Change the row, or leave it out."

Chat = Sequence[Mapping[str, Any]]


def has_pairs(columns: Sequence[str], completions: str, group_size: int) -> bool:
    """Return whether the columns of a pair replace a missing column of completions."""
    return group_size == 2 and completions not in columns and {CHOSEN, REJECTED} <= {*columns}


def is_chat(value: object) -> bool:
    """Return whether a value is a list of messages."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and len(value) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


def comparable(value: Any) -> Any:
    """Return a chat without the keys that Arrow fills with None, and any other value as it is."""
    if not is_chat(value):
        return value
    return [{key: one for key, one in message.items() if one is not None} for message in value]


class PairRows(Sequence[dict[str, Any]]):
    """Rows with pairs, read on access.

    Args:
        rows: The rows of the dataset.
        prompt: The prompt column to write.
        completions: The column of completions to write.
        name: Returns the field of an InvalidValue for a row's number.

    Access to a row that cannot be divided raises InvalidValue.
    """

    def __init__(
        self, rows: Any, *, prompt: str, completions: str, name: Callable[[int], str]
    ) -> None:
        self._rows = rows
        self._prompt = prompt
        self._completions = completions
        self._name = name
        columns = list(getattr(rows, "column_names", None) or rows[0])
        others = [one for one in columns if one not in (prompt, CHOSEN, REJECTED)]
        self.column_names = [prompt, completions, *others]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: Any) -> Any:
        """Return the row with a number, or the values of a column."""
        if isinstance(key, str):
            return [row[key] for row in self]
        return self._read(self._rows[key], key)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, row in enumerate(self._rows):
            yield self._read(row, number)

    def _read(self, row: Mapping[str, Any], number: int) -> dict[str, Any]:
        others = {k: v for k, v in row.items() if k not in (self._prompt, CHOSEN, REJECTED)}
        prompt, *pair = divided(
            value_at(row, self._prompt), row.get(CHOSEN), row.get(REJECTED), self._name(number)
        )
        return {self._prompt: prompt, self._completions: pair, **others}


def divided(prompt: Any, chosen: Any, rejected: Any, where: str) -> tuple[Any, Any, Any]:
    """Return the prompt of a pair and the two texts or chats that follow it.

    Raises:
        InvalidValue: The pair is neither two texts nor two chats, or has no prompt. The field is
            `where` and the column's name.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            return _divided_texts(chosen, rejected, where)
        return prompt, chosen, rejected
    for name, value in ((CHOSEN, chosen), (REJECTED, rejected)):
        require(
            isinstance(value, str) or is_chat(value),
            f"{where}: {name}",
            value,
            rule="is neither a text nor a list of messages",
            fix=CHANGE_ROW,
        )
    require(
        is_chat(chosen) and is_chat(rejected),
        f"{where}: {CHOSEN}, {REJECTED}",
        rule="one is a text and the other a list of messages",
        fix=CHANGE_ROW,
    )
    prompt, chosen, rejected = _divided_chats(prompt, chosen, rejected, where)
    for name, chat in ((CHOSEN, chosen), (REJECTED, rejected)):
        require(
            bool(chat) and chat[0]["role"] == REPLY_ROLE,
            f"{where}: {name}",
            chat,
            rule=f"does not continue the prompt with a message of {REPLY_ROLE!r}",
            fix=CHANGE_ROW,
        )
    return prompt, chosen, rejected


def _num_same(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Return the length of the common beginning."""
    pairs = zip(chosen, rejected, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _divided_texts(chosen: str, rejected: str, where: str) -> tuple[str, str, str]:
    """Divide two texts after their common beginning, between two words if possible.

    A space goes to the completions, as tokenizers write it.
    """
    same = _num_same(chosen, rejected)
    end = same
    if chosen != rejected:
        while end > 0 and not _is_boundary(chosen, rejected, end):
            end -= 1
        end = end or same
        if end > 0 and chosen[end - 1] == " ":
            end -= 1
    require(
        end > 0,
        f"{where}: {CHOSEN}, {REJECTED}",
        rule="the texts have no common beginning, which would be the prompt",
        fix="Add a column with the prompt, or leave the row out.",
    )
    return chosen[:end], chosen[end:], rejected[end:]


def _is_boundary(chosen: str, rejected: str, end: int) -> bool:
    """Return whether no word of either text goes on at `end`."""
    return chosen[end - 1].isspace() or all(
        end >= len(text) or text[end].isspace() for text in (chosen, rejected)
    )


def _divided_chats(prompt: Any, chosen: Chat, rejected: Chat, where: str) -> tuple[Any, Chat, Chat]:
    if is_chat(prompt):
        size = len(prompt)
        if comparable(chosen[:size]) == comparable(rejected[:size]) == comparable(prompt):
            return prompt, chosen[size:], rejected[size:]
        return prompt, chosen, rejected
    if isinstance(prompt, str) and chosen[0]["role"] == rejected[0]["role"] == REPLY_ROLE:
        return prompt, chosen, rejected
    same = _num_same(comparable(chosen), comparable(rejected))
    if same == len(chosen) == len(rejected):  # equal chats: everything before the last reply
        same -= 1
    require(
        same > 0,
        f"{where}: {CHOSEN}, {REJECTED}",
        rule="the chats have no common first message, which would be the prompt",
        fix=CHANGE_ROW,
    )
    require(
        prompt is None
        or any(str(prompt).strip() == str(one.get("content")).strip() for one in chosen[:same]),
        f"{where}: prompt",
        prompt,
        rule=f"no common message of {CHOSEN!r} and {REJECTED!r} has this text",
        fix="Change the row, or name another prompt column.",
    )
    return chosen[:same], chosen[same:], rejected[same:]
