"""Prompts in a resumable order.

In: dataset rows (row_source.py) and a tokenizer. Out: `Prompt`s by their index over the whole run.

    index ──► row ──► text ──► token ids

Every row is checked at the start. A prompt is tokenized on access. The n-th prompt never depends on
the ones before it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlsys.config import DataConfig
from rlsys.data.chats import ChatColumn
from rlsys.data.completions import CompletionColumn
from rlsys.data.continuations import ContinuationColumn, has_continuations
from rlsys.data.hub import check_no_run, in_short, unreadable
from rlsys.data.preference_pairs import CHOSEN, REJECTED, PairRows, comparable, has_pairs
from rlsys.data.prompt_rendering import TOOLS_COLUMN, PromptRenderer
from rlsys.data.row_source import RowSource
from rlsys.errors import InvalidValue, require
from rlsys.rewards.column_paths import split_path, value_at
from rlsys.text.chat_template import set_template_options
from rlsys.text.messages import without_none
from rlsys.types import Completion, Int32Array, Prompt

logger = logging.getLogger(__name__)

COMPLETIONS_FIELD = "flow.dataset: completions"

# Columns that change the prompt in other trainers and would be ignored here.
UNREAD_COLUMNS = {
    "chat_template_kwargs": (
        "has options of the chat template for single rows, which are not supported",
        "Set data.template_options for all rows, and remove or rename the column.",
    ),
    **dict.fromkeys(
        ("images", "image"),
        (
            "belongs to prompts with images, and models read text only",
            "Remove these rows, or remove or rename the column.",
        ),
    ),
}

AnyColumn = CompletionColumn | ChatColumn | ContinuationColumn


def load_tokenizer(path: str, *, setting: str = "model.path") -> Any:
    """Return the tokenizer of a model, or raise InvalidValue about `setting` if there is none."""
    from transformers import AutoTokenizer

    check_no_run(path, setting=setting)
    fix = "Save one to this directory (AutoTokenizer...save_pretrained), or give a hub name."
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except unreadable() as error:
        rule = f"contains no tokenizer ({in_short(error)})"
        raise InvalidValue(setting, path, rule=rule, fix=fix) from error
    require(
        hasattr(tokenizer, "get_added_vocab"),
        setting,
        path,
        rule="contains only a tokenizer of mistral-common (tekken.json), which does not name its "
        "special tokens",
        fix="Add the model's tokenizer.json.",
    )
    # Without files, transformers makes an empty tokenizer of the model's type.
    require(
        bool(tokenizer("a 1", add_special_tokens=False)["input_ids"])
        or len(tokenizer) > len(tokenizer.all_special_ids),
        setting,
        path,
        rule="contains no tokenizer, or an empty one",
        fix=fix,
    )
    return tokenizer


def load_policy_tokenizer(path: str, options: Sequence[str]) -> Any:
    """Return the tokenizer of the policy at `path`.

    Args:
        path: The model directory or hub name.
        options: The value of data.template_options.

    Raises:
        InvalidValue: There is no tokenizer, or its template does not use one of the options.
    """
    tokenizer = load_tokenizer(path)
    set_template_options(tokenizer, options, "data.template_options")
    return tokenizer


class PromptSource(RowSource):
    """Endless prompts of a dataset, epoch after epoch.

    Args:
        config: Names the dataset and its columns.
        tokenizer: The policy's tokenizer.
        seed: Decides the order.
        max_tokens: Limit of a completion, in tokens.
        max_context: Limit of a prompt and its completion, in tokens.
        rows: Replaces data.source.
        completions: Name of a column and number of completions per row, read with the prompts.
            They are texts, or messages that continue the prompt. If the column is the prompt
            column, they are the replies of its chats. Two completions may also be in the columns
            "chosen" and "rejected" (preference_pairs.py).
        preferences: The first completion of a row is preferred. Rows whose first completion equals
            another one are skipped, with a warning.
        held_out: Errors name evaluation.source.
        evaluated: The rows are not a mixture: each counts once.

    Raises:
        InvalidValue: A row has no prompt or no completions; one of them is too long, or has
            characters that the tokenizer does not encode.
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
        preferences: bool = False,
        held_out: bool = False,
        evaluated: bool = False,
    ) -> None:
        super().__init__(config, seed=seed, rows=rows, held_out=held_out, evaluated=evaluated)
        self._preferences = preferences
        if completions is not None:
            self._check_pair(*completions)
            if has_pairs(self._columns, *completions):
                self._use_pairs(completions[0])
        self._renderer = PromptRenderer(config, tokenizer)
        self._check_column(config.prompt_column, "data.prompt_column")
        self._check_unread()
        self._completions = self._completion_column(completions, max_tokens)
        require(
            max_tokens < max_context,
            "sampling.max_tokens",
            max_tokens,
            rule=f"leaves no room for a prompt in the model's context of {max_context} tokens",
            fix=f"Use less than {max_context}.",
        )
        self._max_tokens = max_tokens
        self._max_context = max_context
        # The longest prompt, in tokens.
        self._limit = min(config.max_prompt_tokens, max_context - max_tokens)
        self._admitted = self._epoch(self._admit())

    @property
    def metadata_columns(self) -> tuple[str, ...]:
        """The columns that prompts carry as metadata."""
        return tuple(name for name in self._columns if name != self._config.prompt_column)

    def at(self, index: int) -> Prompt:
        """Return the prompt with this index over the run."""
        number = self.row(index)
        row = dict(self._rows[number])
        column = self._completions
        value: Any = value_at(row, column.name) if column is not None else None
        asked = self._prompt_value(value_at(row, self._config.prompt_column), number)
        tools = row.get(TOOLS_COLUMN)
        if isinstance(column, ContinuationColumn):
            value = asked, value, tools
        row.pop(self._config.prompt_column, None)
        text, token_ids = self.rendered(asked, self._name(number), tools=tools)
        return Prompt(
            index=index,
            row=number,
            token_ids=token_ids,
            text=text,
            asked=None if asked == text else asked,
            metadata=row,
            completions=self._read(column, number, value, tools) if column is not None else (),
        )

    def _read(
        self, column: AnyColumn, number: int, value: Any, tools: object
    ) -> tuple[Completion, ...]:
        where = self._name(number, column.name)
        if isinstance(column, ChatColumn):
            return column.read(value, where, tools=tools)
        return column.read(value, where)

    def rendered(
        self, asked: object, where: str, *, tools: object = None
    ) -> tuple[str, tuple[int, ...]]:
        """Return the text and tokens of a value of the prompt column.

        Raises:
            InvalidValue: The value is not a prompt, or is too long. The field is `where`.
        """
        text = self._text(asked, where, tools)
        (token_ids,) = self._renderer.tokenize([text])
        require(
            0 < len(token_ids) <= self._limit,
            where,
            text,
            rule=f"has {len(token_ids)} tokens, not 1 to {self._limit} ({self._limit_reason})",
            fix="Change the row, or leave it out.",
        )
        return text, tuple(token_ids)

    def _text(self, asked: object, where: str, tools: object) -> str:
        renderer = self._renderer
        if not isinstance(self._completions, ChatColumn | ContinuationColumn):
            return renderer.text(asked, where, tools=tools)
        # The dataset's reply follows in its own message, also after a prompt that ends with one.
        return renderer.chat_text(
            renderer.messages(asked, where), where, tools=renderer.tools(tools, where)
        )

    def _prompt_value(self, value: object, number: int) -> object:
        """Return the prompt in a row's value: of a chat with replies, the messages before them."""
        if isinstance(self._completions, ChatColumn):
            return self._completions.opening(value, self._name(number))
        return value

    def _use_pairs(self, completions: str) -> None:
        """Replace the rows by rows of a prompt and a list of two completions."""
        prompt = self._config.prompt_column
        if prompt != DataConfig().prompt_column:  # the user names it, so it must exist
            self._check_column(prompt, "data.prompt_column")
        self._rows = PairRows(
            self._rows, prompt=prompt, completions=completions, name=self._row_name
        )
        self._columns = self._rows.column_names

    def _completion_column(
        self, completions: tuple[str, int] | None, max_tokens: int
    ) -> AnyColumn | None:
        if completions is None:
            return None
        name, size = completions
        self._check_column(name, COMPLETIONS_FIELD)
        column: AnyColumn
        if name == self._config.prompt_column:
            require(
                size == 1,
                "flow.dataset: group_size",
                size,
                rule=f"the completions come from the prompt column {name!r}, whose chats have one "
                "continuation each",
                fix="Use group_size=1, or name a column with lists of texts.",
            )
            column = ChatColumn(name=name, max_tokens=max_tokens, renderer=self._renderer)
        elif has_continuations(value_at(self._rows[0], name)):
            column = ContinuationColumn(
                name=name, group_size=size, max_tokens=max_tokens, renderer=self._renderer
            )
        else:
            column = CompletionColumn(
                name=name,
                group_size=size,
                max_tokens=max_tokens,
                boundary=self._renderer.boundary,
            )
        return column

    def _check_unread(self) -> None:
        """Raise InvalidValue for columns that other trainers add to the prompt."""
        for column, (reason, fix) in UNREAD_COLUMNS.items():
            if column not in self._columns or column == self._config.prompt_column:
                continue
            features = getattr(self._rows, "features", None) or {}
            filled = hasattr(features.get(column), "decode_example") or any(
                without_none(value) not in (None, "", {}, []) for value in self._values(column)
            )
            require(
                not filled,
                self.where,
                rule=f"the column {column!r} {reason}",
                fix=fix,
            )

    def _check_pair(self, name: str, size: int) -> None:
        """Raise InvalidValue if the rows have neither two completions nor a whole pair."""
        missing = [one for one in (CHOSEN, REJECTED) if one not in self._columns]
        require(
            size != 2 or not missing or split_path(name, self._columns) is not None,
            COMPLETIONS_FIELD,
            name,
            rule=f"{self.where} has neither this column nor pairs ({' and '.join(missing)} "
            f"missing); it has {self._columns}",
            fix=f"Add {' and '.join(missing)}, or name a column with lists of two completions.",
        )

    def _name(self, number: int, column: str = "") -> str:
        return super()._name(number, column or self._config.prompt_column)

    def _admit(self) -> Int32Array:
        """Return the numbers of the rows that can be used, after a check of every row."""
        left_out = self._long_completions() | self._long_prompts() | self._equal_completions()
        return np.array([n for n in range(len(self._rows)) if n not in left_out], dtype=np.int32)

    def _equal_completions(self) -> set[int]:
        """Return the rows that prefer a completion to an equal one, and log a warning."""
        if self._completions is None or not self._preferences:
            return set()
        equal = set()
        for number, value in enumerate(self._values(self._completions.name)):
            best, *others = map(comparable, value)
            if best in others:
                equal.add(number)
        if equal:
            logger.warning(
                "%d of %d rows of %s prefer a completion to an equal one (first: row %d, from 0). "
                "These rows are skipped.",
                *(len(equal), len(self._rows), self.where, min(equal)),
            )
        return equal

    def _long_completions(self) -> set[int]:
        column = self._completions
        if column is None:
            return set()
        values = self._values(column.name)

        def name(number: int) -> str:
            return self._name(number, column.name)

        if isinstance(column, ContinuationColumn):
            asked = self._values(self._config.prompt_column)
            found = column.too_long(zip(asked, values, self._tools(), strict=True), name)
        elif isinstance(column, ChatColumn):
            found = column.too_long(zip(values, self._tools(), strict=True), name)
        else:
            found = column.too_long(values, name)
        return self._too_long(
            "completions",
            found,
            limit=column.max_tokens,
            field="sampling.max_tokens",
            value=column.max_tokens,
            fix=f"Use at least {max(found.values(), default=0)}",
        )

    def _long_prompts(self) -> set[int]:
        num_added = self._renderer.num_added_tokens
        candidates: dict[int, str] = {}
        alphabet = self._renderer.boundary.alphabet
        values = zip(self._values(self._config.prompt_column), self._tools(), strict=True)
        for number, (value, tools) in enumerate(values):
            text = self._text(self._prompt_value(value, number), self._name(number), tools)
            alphabet.check(text, self._name(number), change="the row")
            # A token covers at least a byte, except for added tokens. So only a text with more
            # bytes than the limit has to be tokenized.
            if len(text.encode()) + num_added > self._limit:
                candidates[number] = text
        lengths = map(len, self._renderer.tokenize(list(candidates.values())))
        found = {n: one for n, one in zip(candidates, lengths, strict=True) if one > self._limit}
        longest = max(found.values(), default=0)
        if self._limit == self._config.max_prompt_tokens:
            field, value, fix = "data.max_prompt_tokens", self._limit, f"Use at least {longest}"
        else:
            field, value = "sampling.max_tokens", self._max_tokens
            fits = longest < self._max_context
            fix = f"Use at most {self._max_context - longest}" if fits else "Use shorter prompts"
        return self._too_long(
            "prompts", found, limit=self._limit, field=field, value=value, fix=fix
        )

    @property
    def _limit_reason(self) -> str:
        """The options that limit the length of a prompt."""
        if self._limit == self._config.max_prompt_tokens:
            return "data.max_prompt_tokens"
        return f"the model's context of {self._max_context} - sampling.max_tokens"

    def _tools(self) -> Iterable[object]:
        """Yield the tools of each row, in the rows' order."""
        if TOOLS_COLUMN in self._columns:
            return self._values(TOOLS_COLUMN)
        return itertools.repeat(None, len(self._rows))

    def _too_long(
        self,
        what: str,
        lengths: Mapping[int, int],
        *,
        limit: int,
        field: str,
        value: int,
        fix: str,
    ) -> set[int]:
        """Return the numbers of rows that are too long, with a warning.

        Raises:
            InvalidValue: There are such rows, and data.skip_long_prompts is off.
        """
        if lengths:
            first, length = next(iter(lengths.items()))
            rule = (
                f"{what} in {len(lengths)} of {len(self._rows)} rows of {self.where} are longer "
                f"than {limit} tokens (first: row {first}, from 0, with {length})"
            )
            require(
                self._config.skip_long_prompts,
                field,
                value,
                rule=rule,
                fix=f"{fix}, or set data.skip_long_prompts=true.",
            )
            logger.warning("%s. These rows are skipped.", rule)
        return set(lengths)


class TaskSource(RowSource):
    """Endless tasks of a dataset: rows from which an environment makes its own prompt."""

    def __init__(
        self,
        config: DataConfig,
        *,
        seed: int,
        rows: Sequence[Mapping[str, Any]] | None = None,
        held_out: bool = False,
        evaluated: bool = False,
    ) -> None:
        super().__init__(config, seed=seed, rows=rows, held_out=held_out, evaluated=evaluated)
        self._admitted = self._epoch(np.arange(len(self._rows), dtype=np.int32))

    def at(self, index: int) -> Prompt:
        """Return the task with this index over the run."""
        number = self.row(index)
        row = dict(self._rows[number])
        return Prompt(index=index, row=number, token_ids=(), text="", metadata=row)
