"""Names of options in messages, as the user of this run writes them.

recipes/quickstart.py --resume auto     option("resume", "auto") == "--resume auto"
RunConfig(resume="auto"), a notebook    option("resume", "auto") == 'resume="auto"'
"""

from __future__ import annotations

import os
import shlex

from rlsys.common.safe_json import dump_json

# An environment variable, so that the processes of the run inherit it.
COMMAND_LINE = "RLSYS_COMMAND_LINE"


def started_from_command_line() -> None:
    """Record that options come from the command line. The parser calls this function."""
    os.environ[COMMAND_LINE] = "1"


def on_command_line() -> bool:
    """Return whether the user sets options on a command line, not in Python."""
    return bool(os.environ.get(COMMAND_LINE))


def option(field: str, value: str | float | bool | None = None) -> str:
    """Return the name of a configuration field, followed by `value` unless it is None.

    `field` is a dotted name such as "model.path", or an argument of `launch` that is a switch on
    the command line, such as "dry_run".
    """
    if not on_command_line():
        shown = dump_json(value) if isinstance(value, str) else repr(value)
        return field if value is None else f"{field}={shown}"
    name = "--" + field.replace("_", "-")
    if value is None or value is True:
        return name
    return f"{name} {shlex.quote(str(value))}"
