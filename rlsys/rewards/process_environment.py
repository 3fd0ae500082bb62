"""The environment variables of reward functions: the run's own, without its secrets.

This is not a security boundary: a function runs as the same user and can read what that user can.
It keeps keys out of what functions and their child processes print, log and send by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

# Ray's variables, so that a function cannot join the run's cluster, and names of secrets.
SECRET_NAME = re.compile(
    r"""
    ^(RAY|WANDB|AWS|AZURE)_
    | (^|_) (TOKEN|SECRET|PASSWORD|PASSWD|PASS|CREDENTIAL|AUTH|KEY|APIKEY|PAT)S? (_|$)
    | _PWD$
    """,
    re.VERBOSE | re.IGNORECASE,
)

# https://user:password@host
SECRET_VALUE = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


def without_secrets(
    environment: Mapping[str, str], *, keep: Collection[str] = ()
) -> dict[str, str]:
    """Return all variables except those that look like secrets. `keep` names exceptions."""
    return {
        name: value
        for name, value in environment.items()
        if name in keep or not (SECRET_NAME.search(name) or SECRET_VALUE.search(value))
    }
