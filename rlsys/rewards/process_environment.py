"""The environment variables of reward functions: the run's own, without its secrets.

Not a wall: a function runs as the same user, and can read what that user can. It keeps keys out of
what functions and the programs that they start print, log and send by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

# Ray's own, so that a function cannot join the run's cluster, and whatever is named like a secret.
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
    """All variables but those named or written like a secret; `keep` passes in any case."""
    return {
        name: value
        for name, value in environment.items()
        if name in keep or not (SECRET_NAME.search(name) or SECRET_VALUE.search(value))
    }
