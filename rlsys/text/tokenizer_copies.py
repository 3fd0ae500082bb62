"""Copies of a Hugging Face tokenizer whose rules for the beginning of a text are changed.

In: the serialised form of a `tokenizers.Tokenizer`. Out: the same, changed. A tokenizer of the
SentencePiece kind puts a blank before a text, and takes it away when it decodes one. Both are right
for a whole text and wrong for a text that follows other tokens.

    component                          whole text            behind a special token   within a text
    normalizer Prepend, Metaspace      blank                 blank                    none
      "always", ByteLevel with prefix
    Metaspace "first"                  blank                 none                     none
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Component = dict[str, Any]

# Names of the lists in which a Sequence holds its components.
MEMBERS = ("normalizers", "pretokenizers", "decoders")
BLANK = " "

# Pre-tokenizers that cut a text and keep all of it.
SPLITTERS = ("ByteLevel", "Split", "Digits", "Punctuation", "UnicodeScripts")


def components(part: Component | None) -> Iterator[Component]:
    """Yield a component, or the components of a Sequence."""
    if part is None:
        return
    members = next((part[name] for name in MEMBERS if name in part), None)
    if members is None:
        yield part
    else:
        for one in members:
            yield from components(one)


def kept(part: Component | None, keeps: Callable[[Component], bool]) -> Component | None:
    """Return a component without those of its members that `keeps` rejects."""
    if part is None:
        return None
    for name in MEMBERS:
        if name in part:
            members = [kept(one, keeps) for one in part[name]]
            return {**part, name: [one for one in members if one is not None]}
    return part if keeps(part) else None


def behind_special_token(written: str) -> str:
    """Return the tokenizer that encodes a text which follows a special token."""
    made = json.loads(written)
    for one in components(made["pre_tokenizer"]):
        if one.get("prepend_scheme") == "first":
            one["prepend_scheme"] = "never"
    return _written(made, written)


def within_text(written: str) -> str:
    """Return the tokenizer that encodes and decodes a text which follows another text."""
    made = json.loads(written)
    made["normalizer"] = kept(made["normalizer"], lambda one: one["type"] != "Prepend")
    for one in components(made["pre_tokenizer"]):
        _without_prefix(one)
    for one in components(made["decoder"]):
        _without_prefix(one)
        if one["type"] == "Strip" and one["content"] == BLANK:
            one["start"] = 0
    return _written(made, written)


def exact(written: str) -> str:
    """Return a tokenizer as of `within_text` that rewrites nothing.

    It has no normalizer except the replacement of blanks, which decoding reverses. Its added tokens
    take no white space beside them.
    """
    made = json.loads(within_text(written))
    made["normalizer"] = kept(made["normalizer"], _replaces_blanks)
    for one in made["added_tokens"]:
        one["lstrip"] = one["rstrip"] = one["normalized"] = False
    return _written(made, written)


def encodes_all_bytes(written: str) -> bool:
    """Return whether the tokenizer of `exact` has tokens for exactly any text: it works on bytes,
    knows each one, and drops none."""
    made = json.loads(exact(written))
    decoders = [one["type"] for one in components(made["decoder"])]
    splits = list(components(made["pre_tokenizer"]))
    return bool(
        made["model"]["type"] == "BPE"
        and made["normalizer"] is None
        and decoders == ["ByteLevel"]
        and any(one["type"] == "ByteLevel" for one in splits)
        and all(one["type"] in SPLITTERS and one.get("behavior") != "Removed" for one in splits)
        and _bytes_of_text() <= made["model"]["vocab"].keys()
    )


def _bytes_of_text() -> set[str]:
    """Return the characters by which a ByteLevel vocabulary writes the bytes of UTF-8."""
    from tokenizers import pre_tokenizers

    writes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # The last byte of a longer character is one that characters below 0x800 have too.
    longer = [*range(0x800, 0xD800, 64), *range(0xE000, 0x110000, 64)]
    text = "".join(map(chr, [*range(0x800), *longer]))
    (piece, _), *_ = writes.pre_tokenize_str(text)
    return set(piece)


def _replaces_blanks(one: Component) -> bool:
    return bool(one["type"] == "Replace" and one["pattern"] == {"String": BLANK})


def _without_prefix(one: Component) -> None:
    if "prepend_scheme" in one:
        one["prepend_scheme"] = "never"
    if one["type"] == "ByteLevel" and "add_prefix_space" in one:
        one["add_prefix_space"] = False


def _written(made: Mapping[str, Any], before: str) -> str:
    """Return the serialised form; `before` itself where nothing has changed."""
    return before if made == json.loads(before) else json.dumps(made)
