"""Prompts in a resumable order.

In: dataset rows and a tokenizer. Out: `Prompt`s by their index over the whole run.

    index ──► epoch, position ──► row, by the epoch's own shuffle ──► text ──► token ids

Everything that can be wrong with a row is looked for at the start, over all rows. Only then is a
prompt tokenized, when it is asked for. The n-th prompt never depends on the ones before it.
"""

from __future__ import annotations

import functools
import logging
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlsys.config import DataConfig, require
from rlsys.data.alphabet import Alphabet
from rlsys.data.chats import ChatColumn
from rlsys.data.completions import CompletionColumn
from rlsys.data.hub import check_no_run, in_short, unreadable
from rlsys.data.render import PromptRenderer
from rlsys.data.rows import load_rows
from rlsys.rewards.reward import Reward, check_columns, is_missing, is_of, not_of
from rlsys.types import Int32Array, Prompt

logger = logging.getLogger(__name__)


def load_tokenizer(path: str, *, setting: str = "model.path") -> Any:
    """The tokenizer of a model. Raises ValueError where `path`, which `setting` gives, holds
    none."""
    from transformers import AutoTokenizer

    check_no_run(path, setting=setting)
    fix = "save one beside the model (AutoTokenizer...save_pretrained), or give a hub name."
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except unreadable() as error:
        raise ValueError(
            f"{setting}={path!r} holds no tokenizer ({in_short(error)}); {fix}"
        ) from error
    # Without files, transformers makes a tokenizer of the model's kind that knows no word.
    require(
        bool(tokenizer("a 1", add_special_tokens=False)["input_ids"])
        or len(tokenizer) > len(tokenizer.all_special_ids),
        f"{setting}={path!r} holds no tokenizer, or an empty one; {fix}",
    )
    return tokenizer


@functools.lru_cache(maxsize=2)  # where one epoch ends, two are in use
def epoch_order(seed: int, epoch: int, num_rows: int) -> Int32Array:
    """The order of one epoch [num_rows]. Each has its own; none needs the ones before it."""
    return np.random.default_rng((seed, epoch)).permutation(num_rows).astype(np.int32)


class PromptSource:
    """Endless prompts, epoch after epoch.

    `rows`, a list of dictionaries or a `datasets.Dataset`, stand in place of data.source;
    `completions` (a column's name and how many it has a row) are read with the prompts; where it is
    the prompt column itself, they are the replies of its chats. `held_out`: what `config` says
    comes from evaluation.source, and errors say so. Raises ValueError for rows that are
    missing, no prompts, too long for data.max_prompt_tokens or for the model's context, or of
    characters that the tokenizer leaves out; and for completions that are none. Whether there are
    enough for a step, `check_size` says.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        *,
        seed: int,
        max_tokens: int,
        max_context: int,
        rows: Sequence[Mapping[str, Any]] | None = None,
        completions: tuple[str, int] | None = None,
        held_out: bool = False,
    ) -> None:
        self._config = config
        self._renderer = PromptRenderer(config, tokenizer)
        self._seed = seed
        setting = "evaluation.source" if held_out else "data.source"
        self._rows: Any = load_rows(config, setting) if rows is None else rows
        self.where = f"the recipe's {'held-out ' if held_out else ''}data"
        if rows is None:
            self.where = f"{setting}={config.source!r}"
        self._columns = self._check_columns(config.prompt_column, "data.prompt_column")
        self._completions = self._completion_column(completions, max_tokens)
        room = max_context - max_tokens
        require(
            room > 0,
            f"sampling.max_tokens={max_tokens} leaves no room for a prompt in the model's context "
            f"of {max_context} tokens; use less.",
        )
        # Longest prompt admitted, in tokens, and the rule that says so.
        self._limit, self._rule = min(
            (config.max_prompt_tokens, "data.max_prompt_tokens"),
            (room, f"the model's context of {max_context} less sampling.max_tokens={max_tokens}"),
        )
        self._admitted = self._admit()

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._admitted)

    @property
    def metadata_columns(self) -> tuple[str, ...]:
        """The columns that prompts carry as metadata."""
        return tuple(name for name in self._columns if name != self._config.prompt_column)

    def check_size(self, prompts_per_step: int) -> None:
        """Raise ValueError where there are too few for one step."""
        require(
            len(self) >= prompts_per_step,
            f"prompts_per_step={prompts_per_step}, but {self.where} has only {len(self)} prompts "
            f"that can be used; use {f'at most {len(self)} a step, or ' if len(self) else ''}more "
            "data.",
        )

    def check_rewards(self, rewards: Sequence[Reward]) -> None:
        """Raise ValueError for a column that a reward requires and the rows do not have; for a row
        without a value in it; and for a value of a type that the reward cannot use."""
        if rewards:
            check_columns(rewards, self.metadata_columns, self.where)
        for column in dict.fromkeys(name for one in rewards for name in one.required_columns):
            missing = [n for n, value in enumerate(self._values(column)) if is_missing(value)]
            require(
                not missing,
                f"column {column!r}, which a reward reads, has no value in {len(missing)} of "
                f"{len(self._rows)} rows of {self.where}, first in row {(missing or [0])[0]} "
                "(from 0); fill it, or leave the rows out.",
            )
        for one in (reward for reward in rewards if reward.column_types):
            for column in one.required_columns:
                for number, value in enumerate(self._values(column)):
                    require(
                        is_of(value, one.column_types),
                        f"reward {one.name!r}, {self._name(number, column)}: "
                        f"{reprlib.repr(value)} {not_of(value, one.column_types)}",
                    )

    def row(self, index: int) -> int:
        """Which row of the data the prompt with this index is."""
        epoch, position = divmod(index, len(self))
        if self._config.shuffle:
            position = int(epoch_order(self._seed, epoch, len(self))[position])
        return int(self._admitted[position])

    def at(self, index: int) -> Prompt:
        """The prompt with this index over the run."""
        number = self.row(index)
        row = dict(self._rows[number])
        column = self._completions
        held = row[column.name] if column is not None else None
        asked = self._asked(row.pop(self._config.prompt_column), number)
        text, token_ids = self.rendered(asked, self._name(number))
        return Prompt(
            index=index,
            row=number,
            token_ids=token_ids,
            text=text,
            asked=None if asked == text else asked,
            metadata=row,
            completions=column.read(held, self._name(number, column.name))
            if column is not None
            else (),
        )

    def rendered(self, asked: object, where: str) -> tuple[str, tuple[int, ...]]:
        """Text and tokens of a prompt column's value. Raises ValueError, beginning with `where`,
        for what is no prompt, or is too long."""
        text = self._renderer.text(asked, where)
        (token_ids,) = self._renderer.tokenize([text])
        require(
            0 < len(token_ids) <= self._limit,
            f"{where}: {reprlib.repr(text)} makes {len(token_ids)} tokens; it must make 1 to "
            f"{self._limit} ({self._rule}). Change the row or leave it out.",
        )
        return text, tuple(token_ids)

    @property
    def order(self) -> dict[str, int]:
        """What decides which prompt has which index; a checkpoint keeps it for `check_order`."""
        return {"seed": self._seed, "num_prompts": len(self)}

    def check_order(self, order: Mapping[str, int]) -> None:
        """Raises ValueError if the order was another: other data, or another seed."""
        for key, value in self.order.items():
            require(
                order[key] == value,
                f"the checkpoint's order of prompts has {key}={order[key]}, but {self.where} has "
                f"{key}={value}; resume with the same data and seed.",
            )

    def _asked(self, value: object, number: int) -> object:
        """What is the prompt of a row's value in the prompt column: of a chat with replies, what
        stands before them."""
        if isinstance(self._completions, ChatColumn):
            return self._completions.opening(value, self._name(number))
        return value

    def _completion_column(
        self, completions: tuple[str, int] | None, max_tokens: int
    ) -> CompletionColumn | ChatColumn | None:
        if completions is None:
            return None
        name, size = completions
        self._check_columns(name, "flow.dataset's completions")
        column: CompletionColumn | ChatColumn
        if name == self._config.prompt_column:
            require(
                size == 1,
                f"flow.dataset takes the completions from the prompts' own column {name!r}, whose "
                f"chats have one continuation each, and group_size={size}; use group_size=1, or "
                "name a column with lists of texts.",
            )
            column = ChatColumn(name=name, max_tokens=max_tokens, renderer=self._renderer)
        else:
            column = CompletionColumn(
                name=name,
                group_size=size,
                max_tokens=max_tokens,
                tokenizer=self._renderer.tokenizer,
            )
        return column

    def _name(self, number: int, column: str | None = None) -> str:
        column = column or self._config.prompt_column
        return f"{column!r} in row {number} (from 0) of {self.where}"

    def _check_columns(self, column: str, option: str) -> list[str]:
        """All that the rows have; raises ValueError unless `column`, which `option` names, is one
        of them."""
        require(len(self._rows) > 0, f"{self.where} has no rows; give data with prompts.")
        columns = list(getattr(self._rows, "column_names", None) or self._rows[0])
        require(
            column in columns,
            f"{option}={column!r} is no column of {self.where}, which has {columns}; "
            "name one of them.",
        )
        return columns

    def _values(self, column: str) -> Iterable[Any]:
        if hasattr(self._rows, "column_names"):
            values: Iterable[Any] = self._rows[column]
            return values
        return (row.get(column) for row in self._rows)

    def _admit(self) -> Int32Array:
        """The numbers of the rows that are short enough [len(self)], after a look at every row."""
        long = self._long_completions() | self._long_prompts()
        return np.array([n for n in range(len(self._rows)) if n not in long], dtype=np.int32)

    def _long_completions(self) -> set[int]:
        column = self._completions
        if column is None:
            return set()
        found = column.too_long(
            self._values(column.name), lambda number: self._name(number, column.name)
        )
        return self._left_out(
            "completions",
            found,
            f"{column.max_tokens} tokens, end of sequence included (sampling.max_tokens)",
        )

    def _long_prompts(self) -> set[int]:
        num_added = self._renderer.num_added_tokens
        suspects: dict[int, str] = {}
        alphabet = Alphabet(self._renderer.tokenizer)
        for number, value in enumerate(self._values(self._config.prompt_column)):
            text = self._renderer.text(self._asked(value, number), self._name(number))
            alphabet.check(text, self._name(number))
            # A token covers at least a byte, but for those that the tokenizer adds. So only a text
            # with more bytes than the limit has to be tokenized to know.
            if len(text.encode()) + num_added > self._limit:
                suspects[number] = text
        lengths = map(len, self._renderer.tokenize(list(suspects.values())))
        found = {n: one for n, one in zip(suspects, lengths, strict=True) if one > self._limit}
        return self._left_out("prompts", found, f"{self._limit} tokens ({self._rule})")

    def _left_out(self, what: str, lengths: Mapping[int, int], limit: str) -> set[int]:
        """Rows that are too long, as their lengths by number say. Raises ValueError for them unless
        they are to be skipped."""
        if lengths:
            first, length = next(iter(lengths.items()))
            message = (
                f"{what} in {len(lengths)} of {len(self._rows)} rows of {self.where} are longer "
                f"than {limit}, first that of row {first} (from 0) with {length}"
            )
            require(
                self._config.skip_long_prompts,
                f"{message}; raise that limit, or set data.skip_long_prompts=true.",
            )
            logger.warning("%s; they are left out.", message)
        return set(lengths)
