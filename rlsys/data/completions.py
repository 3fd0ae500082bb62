"""Completions in a dataset: demonstrations and preference pairs.

In: the text of a row, or its list of texts. Out: `Completion`s, each followed by the tokenizer's
end of sequence. Their tokens decode to exactly their texts. chats.py reads completions that are
messages of a chat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rlsys.errors import InvalidValue, require
from rlsys.text.tokenizer_boundary import TokenizerBoundary
from rlsys.types import Completion


@dataclass(frozen=True, kw_only=True)
class CompletionColumn:
    """Dataset column with `group_size` texts in each row, each of at most `max_tokens` tokens.

    A single text needs no list around it. Raises InvalidValue for a tokenizer without an end of
    sequence.
    """

    name: str
    group_size: int
    max_tokens: int
    boundary: TokenizerBoundary

    def __post_init__(self) -> None:
        require(
            self.boundary.tokenizer.eos_token_id is not None,
            "model.path",
            rule="the tokenizer has no end of sequence (eos_token), which ends every completion of "
            "a dataset",
            fix="Set one.",
        )

    def read(self, value: object, where: str) -> tuple[Completion, ...]:
        """Return the completions of one row.

        Raises:
            InvalidValue: The value is not `group_size` texts, or one is too long. The field is
                `where`.
        """
        texts = self._texts(value, where)
        token_ids = self._tokens(texts, where)
        check_length(max(map(len, token_ids)), self.max_tokens, where)
        return tuple(
            Completion(text=text, token_ids=tuple(ids))
            for text, ids in zip(texts, token_ids, strict=True)
        )

    def too_long(self, values: Iterable[object], name: Callable[[int], str]) -> dict[int, int]:
        """Return the length in tokens of the longest completion of each row that is too long.

        Checks every row, and raises as `read` does for any other fault.
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
        if value is None:
            raise InvalidValue(where, None, rule="is null", fix="Fill it, or leave the row out.")
        require(
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and len(value) == self.group_size
            and all(isinstance(text, str) for text in value),
            where,
            value,
            rule=f"is not a list of {self.group_size} texts, one for each completion of a group "
            f"(group_size={self.group_size})",
            fix="Change the row, or leave it out.",
        )
        assert isinstance(value, Sequence)
        return value

    def _tokens(self, texts: Sequence[str], where: str) -> list[list[int]]:
        return [
            self.boundary.ended(token_ids)
            for token_ids in self.boundary.encode_written(texts, where, change="the row")
        ]


def encode_examples(
    boundary: TokenizerBoundary, examples: Sequence[tuple[str, str]], *, step: int
) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of the examples of a warm start, and the lengths of their prompts.

    Each example is a prompt, its completion and the end of sequence.

    Raises:
        InvalidValue: The tokens of a text do not decode to it.
    """
    where = f"WarmStart.batches, step {step}"
    prompts = [prompt for prompt, _ in examples]
    for prompt in prompts:
        boundary.alphabet.check(prompt, where, change="the example")
    starts = boundary.encode_prompts(prompts, with_opening=True)
    written = boundary.encode_written([text for _, text in examples], where, change="the example")
    return (
        [[*start, *boundary.ended(text)] for start, text in zip(starts, written, strict=True)],
        [len(start) for start in starts],
    )


def check_length(num_tokens: int, max_tokens: int, where: str) -> None:
    """Raise InvalidValue about `where` for a completion that is too long."""
    require(
        num_tokens <= max_tokens,
        where,
        rule=f"the completion has {num_tokens} tokens including the end of sequence, more than "
        f"sampling.max_tokens={max_tokens}",
        fix=f"Use sampling.max_tokens={num_tokens}, or leave the row out.",
    )
