"""Prompts in a resumable order.

In: dataset rows (row_source.py) and a tokenizer. Out: `Prompt`s by their index over the whole run.

    index ──► row ──► text ──► token ids

Everything that can be wrong with a row is looked for at the start, over all rows. Only then is a
prompt tokenized, when it is asked for. The n-th prompt never depends on the ones before it.
"""

from __future__ import annotations

import itertools
import logging
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlsys.config import DataConfig, require
from rlsys.data.chats import ChatColumn
from rlsys.data.completions import CompletionColumn
from rlsys.data.continuations import ContinuationColumn, has_continuations
from rlsys.data.hub import check_no_run, in_short, unreadable
from rlsys.data.preference_pairs import PairRows, comparable, has_pairs
from rlsys.data.prompt_rendering import TOOLS_COLUMN, PromptRenderer
from rlsys.data.row_source import RowSource
from rlsys.rewards.column_paths import value_at
from rlsys.text.chat_template import set_template_options
from rlsys.types import Completion, Int32Array, Prompt

logger = logging.getLogger(__name__)

AnyColumn = CompletionColumn | ChatColumn | ContinuationColumn


def load_tokenizer(path: str, *, setting: str = "model.path") -> Any:
    """The tokenizer of a model. Raises ValueError where `path`, which `setting` gives, holds
    none.
    """
    from transformers import AutoTokenizer

    check_no_run(path, setting=setting)
    fix = "save one beside the model (AutoTokenizer...save_pretrained), or give a hub name."
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except unreadable() as error:
        raise ValueError(
            f"{setting}={path!r} holds no tokenizer ({in_short(error)}); {fix}"
        ) from error
    require(
        hasattr(tokenizer, "get_added_vocab"),
        f"{setting}={path!r} holds a tokenizer of mistral-common alone (tekken.json), which does "
        "not name its special tokens; put the model's tokenizer.json beside it.",
    )
    # Without files, transformers makes a tokenizer of the model's kind that knows no word.
    require(
        bool(tokenizer("a 1", add_special_tokens=False)["input_ids"])
        or len(tokenizer) > len(tokenizer.all_special_ids),
        f"{setting}={path!r} holds no tokenizer, or an empty one; {fix}",
    )
    return tokenizer


def load_policy_tokenizer(path: str, options: Sequence[str]) -> Any:
    """Return the tokenizer of the policy at `path`, with the `options` of data.template_options.
    Raises ValueError where there is none, and for an option that its template does not use.
    """
    tokenizer = load_tokenizer(path)
    set_template_options(tokenizer, options, "data.template_options")
    return tokenizer


class PromptSource(RowSource):
    """Endless prompts, epoch after epoch, of the rows of a RowSource.

    `completions` (a column's name and the number of completions in a row) are read with the
    prompts. They are texts, or messages that continue the prompt; if the column is the prompt
    column itself, they are the replies of its chats. Two completions may be in the columns
    "chosen" and "rejected" (preference_pairs.py). With `preferences` the first completion of a row
    is the best, and a row whose first completion equals another one is left out with a warning.

    Raises ValueError for rows that are missing, no prompts, too long for data.max_prompt_tokens or
    for the model's context, or of characters that the tokenizer leaves out; and for completions
    that are none.
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
        if completions is not None and has_pairs(self._columns, *completions):
            self._use_pairs(completions[0])
        self._renderer = PromptRenderer(config, tokenizer)
        self._check_column(config.prompt_column, "data.prompt_column")
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
        self._admitted = self._epoch(self._admit())

    @property
    def metadata_columns(self) -> tuple[str, ...]:
        """The columns that prompts carry as metadata."""
        return tuple(name for name in self._columns if name != self._config.prompt_column)

    def at(self, index: int) -> Prompt:
        """The prompt with this index over the run."""
        number = self.row(index)
        row = dict(self._rows[number])
        column = self._completions
        held: Any = value_at(row, column.name) if column is not None else None
        asked = self._asked(value_at(row, self._config.prompt_column), number)
        tools = row.get(TOOLS_COLUMN)
        if isinstance(column, ContinuationColumn):
            held = asked, held, tools
        row.pop(self._config.prompt_column, None)
        text, token_ids = self.rendered(asked, self._name(number), tools=tools)
        return Prompt(
            index=index,
            row=number,
            token_ids=token_ids,
            text=text,
            asked=None if asked == text else asked,
            metadata=row,
            completions=self._read(column, number, held, tools) if column is not None else (),
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
        """Return text and tokens of a prompt column's value. Raises ValueError, beginning with
        `where`, for a value that is no prompt, or is too long.
        """
        text = self._text(asked, where, tools)
        (token_ids,) = self._renderer.tokenize([text])
        require(
            0 < len(token_ids) <= self._limit,
            f"{where}: {reprlib.repr(text)} makes {len(token_ids)} tokens; it must make 1 to "
            f"{self._limit} ({self._rule}). Change the row or leave it out.",
        )
        return text, tuple(token_ids)

    def _text(self, asked: object, where: str, tools: object) -> str:
        renderer = self._renderer
        if not isinstance(self._completions, ChatColumn):
            return renderer.text(asked, where, tools=tools)
        # A reply that the dataset has follows, in a message of its own.
        return renderer.chat_text(
            renderer.messages(asked, where), where, tools=renderer.tools(tools, where)
        )

    def _asked(self, value: object, number: int) -> object:
        """What is the prompt of a row's value in the prompt column: of a chat with replies, what
        stands before them.
        """
        if isinstance(self._completions, ChatColumn):
            return self._completions.opening(value, self._name(number))
        return value

    def _use_pairs(self, completions: str) -> None:
        """Replace the rows by those of a prompt and a list of two completions."""
        prompt = self._config.prompt_column
        if prompt != DataConfig().prompt_column:  # named by the user, so it is not left out
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
        self._check_column(name, "flow.dataset's completions")
        column: AnyColumn
        if name == self._config.prompt_column:
            require(
                size == 1,
                f"flow.dataset takes the completions from the prompts' own column {name!r}, whose "
                f"chats have one continuation each, and group_size={size}; use group_size=1, or "
                "name a column with lists of texts.",
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

    def _name(self, number: int, column: str = "") -> str:
        return super()._name(number, column or self._config.prompt_column)

    def _admit(self) -> Int32Array:
        """Return the numbers of the rows that can be used, after a check of every row."""
        left_out = self._long_completions() | self._long_prompts() | self._equal_completions()
        return np.array([n for n in range(len(self._rows)) if n not in left_out], dtype=np.int32)

    def _equal_completions(self) -> set[int]:
        """Return the rows that prefer a completion to an equal one, with a warning."""
        if self._completions is None or not self._preferences:
            return set()
        equal = set()
        for number, value in enumerate(self._values(self._completions.name)):
            best, *others = map(comparable, value)
            if best in others:
                equal.add(number)
        if equal:
            logger.warning(
                "%d of %d rows of %s prefer a completion to an equal one, first row %d (from 0); "
                "they are left out.",
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
        return self._left_out(
            "completions",
            found,
            f"{column.max_tokens} tokens, end of sequence included (sampling.max_tokens)",
        )

    def _long_prompts(self) -> set[int]:
        num_added = self._renderer.num_added_tokens
        suspects: dict[int, str] = {}
        alphabet = self._renderer.boundary.alphabet
        values = zip(self._values(self._config.prompt_column), self._tools(), strict=True)
        for number, (value, tools) in enumerate(values):
            text = self._text(self._asked(value, number), self._name(number), tools)
            alphabet.check(text, self._name(number))
            # A token covers at least a byte, but for those that the tokenizer adds. So only a text
            # with more bytes than the limit has to be tokenized to know.
            if len(text.encode()) + num_added > self._limit:
                suspects[number] = text
        lengths = map(len, self._renderer.tokenize(list(suspects.values())))
        found = {n: one for n, one in zip(suspects, lengths, strict=True) if one > self._limit}
        return self._left_out("prompts", found, f"{self._limit} tokens ({self._rule})")

    def _tools(self) -> Iterable[object]:
        """Yield the tools of each row, in the rows' order."""
        if TOOLS_COLUMN in self._columns:
            return self._values(TOOLS_COLUMN)
        return itertools.repeat(None, len(self._rows))

    def _left_out(self, what: str, lengths: Mapping[int, int], limit: str) -> set[int]:
        """Rows that are too long, as their lengths by number say. Raises ValueError for them unless
        they are to be skipped.
        """
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


class TaskSource(RowSource):
    """Endless tasks: rows of which an environment makes its own prompt."""

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
        number = self.row(index)
        row = dict(self._rows[number])
        return Prompt(index=index, row=number, token_ids=(), text="", metadata=row)
