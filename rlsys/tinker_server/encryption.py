"""Encryption of downloads with age (https://age-encryption.org), by the package pyrage."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlsys.tinker_server.api_errors import ApiError

FIELD = "age_encryption_recipients"
MAX_RECIPIENTS = 10


def for_recipients(recipients: Sequence[str]) -> Callable[[Path, Path], None]:
    """Return a function that encrypts one file to another.

    Args:
        recipients: Public keys, `age1...` or of SSH.

    Raises:
        ApiError: A key is invalid, there are too many keys, or pyrage is not installed.
    """
    if len(recipients) > MAX_RECIPIENTS:
        raise ApiError(
            FIELD,
            rule=f"there are {len(recipients)} keys, and the server takes at most {MAX_RECIPIENTS}",
            fix="Give fewer keys.",
        )
    try:
        pyrage = importlib.import_module("pyrage")
    except ImportError:
        raise ApiError(
            FIELD,
            list(recipients),
            rule="the server cannot encrypt without the package pyrage",
            fix="Install pyrage on the server, or leave the recipients out.",
        ) from None
    keys = [_key(pyrage, recipient) for recipient in recipients]

    def encrypt(source: Path, target: Path) -> None:
        pyrage.encrypt_file(str(source), str(target), keys)

    return encrypt


def _key(pyrage: Any, recipient: str) -> Any:
    module = pyrage.x25519 if recipient.startswith("age1") else pyrage.ssh
    try:
        return module.Recipient.from_str(recipient)
    except pyrage.RecipientError as error:
        raise ApiError(
            FIELD,
            recipient,
            rule=f"must be a public key of age or SSH ({error})",
            fix="Give a key such as age1...",
        ) from None
