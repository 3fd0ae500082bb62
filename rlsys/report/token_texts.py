"""Texts of token ids, read from the tokenizer.json of a run's model without loading it.

Byte-level vocabularies write a space as "Ġ", SentencePiece ones as "▁". Both are turned into text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsys.common.safe_json import parse_json

MAX_BYTES = 64 * 2**20


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_alphabet()


def token_texts(directories: list[Path]) -> dict[int, str]:
    """Return the text of each token of the first directory with a readable tokenizer.json."""
    for directory in directories:
        path = directory / "tokenizer.json"
        try:
            if path.stat().st_size > MAX_BYTES:
                continue
            return _texts(parse_json(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return {}


def _texts(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    vocabulary = tokenizer["model"]["vocab"]
    is_byte_level = "ByteLevel" in str(tokenizer.get("decoder"))
    if isinstance(vocabulary, list):  # Unigram: pairs of a piece and its score
        texts = {i: _plain(piece[0], False) for i, piece in enumerate(vocabulary)}
    else:
        texts = {int(i): _plain(piece, is_byte_level) for piece, i in vocabulary.items()}
    for added in tokenizer.get("added_tokens") or ():
        texts[added["id"]] = added["content"]
    return texts


def _plain(piece: str, is_byte_level: bool) -> str:
    if is_byte_level and all(character in BYTES for character in piece):
        return bytes(BYTES[character] for character in piece).decode(errors="replace")
    return piece.replace("▁", " ")
