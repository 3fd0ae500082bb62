"""Completions that a dataset holds: demonstrations, pairs.

In: a row's text, or list of texts. Out: `Completion`s, each with the tokenizer's end of sequence
behind it. Their tokens decode to exactly their texts. Completions in the messages of a chat:
chats.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rlsys.config import require
from rlsys.text.tokenizer_boundary import TokenizerBoundary
from rlsys.types import Completion


@dataclass(frozen=True, kw_only=True)
class CompletionColumn:
    """The column of a dataset with `group_size` texts in each row, of at most `max_tokens` tokens;
    where it is one, the text may stand there without a list. Raises ValueError at once for a
    tokenizer without an end of sequence.
    """

    name: str
    group_size: int
    max_tokens: int
    boundary: TokenizerBoundary

    def __post_init__(self) -> None:
        require(
            self.boundary.tokenizer.eos_token_id is not None,
            "the tokenizer has no end of sequence (eos_token), which every completion of a dataset "
            "ends with; set one.",
        )

    def read(self, value: object, where: str) -> tuple[Completion, ...]:
        """Of one row. Raises ValueError, beginning with `where`, for anything else than so many
        texts that are short enough.
        """
        texts = self._texts(value, where)
        token_ids = self._tokens(texts, where)
        check_length(max(map(len, token_ids)), self.max_tokens, where)
        return tuple(
            Completion(text=text, token_ids=tuple(ids))
            for text, ids in zip(texts, token_ids, strict=True)
        )

    def too_long(self, values: Iterable[object], name: Callable[[int], str]) -> dict[int, int]:
        """Look at all rows, and return the tokens of the longest completion by the numbers of rows
        where it has too many. Raises as `read` does for any other fault.
        """
        found = {}
        for number, value in enumerate(values):
            where = name(number)
            texts = self._texts(value, where)
            # A token covers at least a byte, except for the end of sequence.
            if any(self.boundary.must_encode(text, self.max_tokens - 1, where) for text in texts):
                found[number] = max(map(len, self._tokens(texts, where)))
        return {number: length for number, length in found.items() if length > self.max_tokens}

    def _texts(self, value: object, where: str) -> Sequence[str]:
        if self.group_size == 1 and isinstance(value, str):
            return [value]
        require(
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and len(value) == self.group_size
            and all(isinstance(text, str) for text in value),
            f"{where}: {value!r} is no list of {self.group_size} texts; flow.dataset has groups of "
            f"group_size={self.group_size}.",
        )
        assert isinstance(value, Sequence)
        return value

    def _tokens(self, texts: Sequence[str], where: str) -> list[list[int]]:
        return [
            self.boundary.ended(token_ids)
            for token_ids in self.boundary.encode_written(texts, where)
        ]


def encode_examples(
    boundary: TokenizerBoundary, examples: Sequence[tuple[str, str]], *, step: int
) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of a warm start's examples, each a prompt, its completion and the end of
    sequence, and the lengths of the prompts. Raises ValueError for a text without exact tokens.
    """
    where = f"a text of WarmStart.batches for step {step}"
    prompts = [prompt for prompt, _ in examples]
    for prompt in prompts:
        boundary.alphabet.check(prompt, where)
    starts = boundary.encode_prompts(prompts, with_opening=True)
    written = boundary.encode_written([text for _, text in examples], where)
    return (
        [[*start, *boundary.ended(text)] for start, text in zip(starts, written, strict=True)],
        [len(start) for start in starts],
    )


def check_length(num_tokens: int, max_tokens: int, where: str) -> None:
    """Raise ValueError, beginning with `where`, for a completion that is too long."""
    require(
        num_tokens <= max_tokens,
        f"{where} has a completion of {num_tokens} tokens, end of sequence included; raise "
        f"sampling.max_tokens={max_tokens}, or leave the row out.",
    )
