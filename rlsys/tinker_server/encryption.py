"""Encryption of downloads with age (https://age-encryption.org), by the package pyrage."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlsys.tinker_server.api_errors import ApiError

MAX_RECIPIENTS = 10


def for_recipients(recipients: Sequence[str]) -> Callable[[Path, Path], None]:
    """Return a function that encrypts one file to another.

    Args:
        recipients: Public keys, `age1...` or of SSH.

    Raises:
        Refused: For invalid keys, too many keys, and where pyrage is not installed.
    """
    if len(recipients) > MAX_RECIPIENTS:
        raise ApiError(
            f"age_encryption_recipients has {len(recipients)} keys. Give at most {MAX_RECIPIENTS}."
        )
    try:
        pyrage = importlib.import_module("pyrage")
    except ImportError:
        raise ApiError(
            f"age_encryption_recipients={list(recipients)!r}: the server cannot encrypt. Install "
            "pyrage on the server, or leave the recipients out."
        ) from None
    keys = [_key(pyrage, one) for one in recipients]

    def encrypt(source: Path, target: Path) -> None:
        pyrage.encrypt_file(str(source), str(target), keys)

    return encrypt


def _key(pyrage: Any, recipient: str) -> Any:
    module = pyrage.x25519 if recipient.startswith("age1") else pyrage.ssh
    try:
        return module.Recipient.from_str(recipient)
    except pyrage.RecipientError as error:
        raise ApiError(
            f"age_encryption_recipients: {recipient!r} is no public key of age or SSH ({error})."
        ) from None
