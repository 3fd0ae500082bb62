"""The parts of a Hugging Face tokenizer around its model, with changed rules for blanks.

In: a `tokenizers.Tokenizer`. Out: its normalizer, pre-tokenizer and decoder as changed data. A
tokenizer of the SentencePiece kind puts a blank before a text and removes it in decoding. Both are
right for a whole text and wrong for a text that follows other tokens.

    part                               whole text            after a special token    within a text
    normalizer Prepend, Metaspace      blank                 blank                    none
      "always", ByteLevel with prefix
    Metaspace "first"                  blank                 none                     none
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlsys.common.safe_json import dump_json, parse_json

Part = dict[str, Any]

# Names of the lists in which a Sequence holds its members.
MEMBERS = ("normalizers", "pretokenizers", "decoders")
BLANK = " "

# Pre-tokenizers that split a text and keep all of it.
SPLITTERS = ("ByteLevel", "Split", "Digits", "Punctuation", "UnicodeScripts")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Steps of a tokenizer before and after its model; None: no step."""

    normalizer: Part | None
    pre_tokenizer: Part | None
    decoder: Part | None


def parts_of(backend: Any) -> Parts:
    """Return the parts of a tokenizer."""
    return Parts(
        normalizer=_as_data(backend.normalizer),
        pre_tokenizer=_as_data(backend.pre_tokenizer),
        decoder=_as_data(backend.decoder),
    )


def _as_data(part: Any) -> Part | None:
    """Return the data of a part, from the JSON of its pickle."""
    if part is None:
        return None
    data: Part = parse_json(part.__getstate__())
    return data


def with_parts(parts: Parts) -> Any:
    """Return a tokenizer of these parts around an empty model."""
    from tokenizers import Tokenizer, models

    written = parse_json(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(dump_json({**written, **vars(parts)}))


def members(part: Part | None) -> Iterator[Part]:
    """Yield a part, or the members of a Sequence."""
    if part is None:
        return
    own = next((part[name] for name in MEMBERS if name in part), None)
    if own is None:
        yield part
    else:
        for one in own:
            yield from members(one)


def kept(part: Part | None, keeps: Callable[[Part], bool]) -> Part | None:
    """Return a part without the members that `keeps` rejects, or None if nothing is left."""
    if part is None:
        return None
    for name in MEMBERS:
        if name in part:
            left = [one for one in (kept(own, keeps) for own in part[name]) if one is not None]
            return {**part, name: left} if left else None
    return part if keeps(part) else None


def behind_special_token(parts: Parts) -> Parts:
    """Return the parts for a text that follows a special token."""
    made = copy.deepcopy(parts)
    for one in members(made.pre_tokenizer):
        if one.get("prepend_scheme") == "first":
            one["prepend_scheme"] = "never"
    return made


def within_text(parts: Parts) -> Parts:
    """Return the parts for a text that follows another text."""
    made = copy.deepcopy(parts)
    for one in members(made.pre_tokenizer):
        _without_prefix(one)
    for one in members(made.decoder):
        _without_prefix(one)
        if one["type"] == "Strip" and one["content"] == BLANK:
            one["start"] = 0
    return replace(made, normalizer=kept(made.normalizer, lambda one: one["type"] != "Prepend"))


def exact(parts: Parts) -> Parts:
    """Return the parts of `within_text` without normalizers, except the replacement of blanks.

    Decoding reverses this replacement.
    """
    made = within_text(parts)
    return replace(made, normalizer=kept(made.normalizer, _replaces_blanks))


def drops_nothing(parts: Parts) -> bool:
    """Return whether the parts of `exact` keep every byte of a text for a model of bytes."""
    splits = list(members(parts.pre_tokenizer))
    return (
        exact(parts).normalizer is None
        and [one["type"] for one in members(parts.decoder)] == ["ByteLevel"]
        and any(one["type"] == "ByteLevel" for one in splits)
        and all(one["type"] in SPLITTERS and one.get("behavior") != "Removed" for one in splits)
    )


@functools.cache
def bytes_of_text() -> frozenset[str]:
    """Return the characters that a ByteLevel vocabulary uses for the bytes of UTF-8."""
    from tokenizers import pre_tokenizers

    writes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # The last bytes of longer characters also occur in characters below 0x800.
    longer = [*range(0x800, 0xD800, 64), *range(0xE000, 0x110000, 64)]
    text = "".join(map(chr, [*range(0x800), *longer]))
    (piece, _), *_ = writes.pre_tokenize_str(text)
    return frozenset(piece)


def _replaces_blanks(one: Part) -> bool:
    return bool(one["type"] == "Replace" and one["pattern"] == {"String": BLANK})


def _without_prefix(one: Part) -> None:
    if "prepend_scheme" in one:
        one["prepend_scheme"] = "never"
    if one["type"] == "ByteLevel" and "add_prefix_space" in one:
        one["add_prefix_space"] = False
