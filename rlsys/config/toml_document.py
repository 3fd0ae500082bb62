"""Text of a dry run: a configuration file for --config with facts about the run as comments.

configuration, facts ─► document ─► stdout, which parses as TOML whatever the facts contain
work of user code    ─► stdout_to_stderr ─► its prints are not part of the file
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from rlsys.config.fields import to_toml


def document(config: Any, facts: Iterable[str]) -> str:
    """Return the configuration as TOML, followed by the facts as comments."""
    return "\n".join([to_toml(config), *map(comment, facts)])


def comment(text: str) -> str:
    """Return a text of any number of lines as TOML comments."""
    return "\n".join(f"# {printable_line(line)}".rstrip() for line in text.splitlines() or [""])


def printable_line(text: str) -> str:
    """Return a line with control characters escaped, which TOML forbids and terminals execute."""
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what this process and its children print within the block to standard error."""
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # one of them is closed
            kept = os.dup(1)
            stack.callback(os.close, kept)
            os.dup2(2, 1)
            stack.callback(os.dup2, kept, 1)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield
