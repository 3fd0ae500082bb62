"""How messages name an option: as the way in which the run was started writes it.

recipes/quickstart.py --resume auto     option("resume", "auto") == "--resume auto"
RunConfig(resume="auto"), a notebook    option("resume", "auto") == 'resume="auto"'
"""

from __future__ import annotations

import os
import shlex

from rlsys.common.safe_json import dump_json

# In the environment, so that processes which the run starts use the same words.
COMMAND_LINE = "RLSYS_COMMAND_LINE"


def started_from_command_line() -> None:
    """Note that options come from this process's arguments. The parser calls it."""
    os.environ[COMMAND_LINE] = "1"


def on_command_line() -> bool:
    """Return whether the user sets options on a command line, not in Python."""
    return bool(os.environ.get(COMMAND_LINE))


def option(field: str, value: str | float | bool | None = None) -> str:
    """Return the name of a configuration field, with a value where one is given.

    `field` is the dotted name, such as "model.path", or a switch of the command line that `launch`
    has as an argument, such as "dry_run".
    """
    if not on_command_line():
        shown = dump_json(value) if isinstance(value, str) else repr(value)
        return field if value is None else f"{field}={shown}"
    name = "--" + field.replace("_", "-")
    if value is None or value is True:
        return name
    return f"{name} {shlex.quote(str(value))}"
