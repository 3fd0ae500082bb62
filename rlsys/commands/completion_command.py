"""Print a script that completes `rlsys` in a shell.

    rlsys completion bash > ~/.local/share/bash-completion/completions/rlsys
    rlsys completion zsh > "${fpath[1]}/_rlsys"
    rlsys completion fish > ~/.config/fish/completions/rlsys.fish

It completes commands, their options, files and, after `rlsys run RECIPE.py`, the options of every
recipe. The script does not call rlsys, so that completion is immediate. Write it once, as above,
and start a new shell.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
from collections.abc import Callable, Mapping, Sequence

from rlsys.commands.command_table import COMMANDS

Words = Mapping[str, Sequence[str]]  # options of each command

SHELLS = ("bash", "zsh", "fish")


def main(arguments: Sequence[str]) -> None:
    """Print the script."""
    parser = argparse.ArgumentParser(
        prog="rlsys completion",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    print(script(parser.parse_args(arguments).shell), end="")


def script(shell: str) -> str:
    """Return the script for a shell."""
    writers: Mapping[str, Callable[[Words], str]] = {
        "bash": bash_script,
        "zsh": zsh_script,
        "fish": fish_script,
    }
    return writers[shell]({name: words_of(name) for name in COMMANDS})


def words_of(command: str) -> list[str]:
    """Return the words that may follow a command, besides files: options and fixed arguments."""
    if command == "completion":
        return [*SHELLS, "--help"]
    module = importlib.import_module(COMMANDS[command].module)
    if hasattr(module, "option_names"):
        found: list[str] = module.option_names()
        return found
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        module.main(["--help"])
    return sorted({*re.findall(r"(?<![\w-])--[a-z][\w.-]*\b", shown.getvalue()), "--help"})


def bash_script(words: Words) -> str:
    """Return the completion function of bash."""
    cases = "\n".join(f'        {name}) words="{" ".join(one)}" ;;' for name, one in words.items())
    return f"""\
# Completion of rlsys for bash.
_rlsys() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words
    if [ "$COMP_CWORD" = 1 ]; then
        mapfile -t COMPREPLY < <(compgen -W "{" ".join(words)} --help --version" -- "$current")
        return
    fi
    case ${{COMP_WORDS[1]}} in
{cases}
        *) words="" ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current"; compgen -f -- "$current")
}}
complete -o filenames -F _rlsys rlsys
"""


def zsh_script(words: Words) -> str:
    """Return the completion function of zsh."""
    commands = "\n".join(f'        "{one.name}:{one.summary}"' for one in COMMANDS.values())
    cases = "\n".join(f"        {name}) found=({' '.join(one)}) ;;" for name, one in words.items())
    return f"""\
#compdef rlsys
# Completion of rlsys for zsh.
_rlsys() {{
    local -a subcommands found
    subcommands=(
{commands}
    )
    if (( CURRENT == 2 )); then
        _describe command subcommands
        compadd -- --help --version
        return
    fi
    case ${{words[2]}} in
{cases}
    esac
    compadd -- $found
    _files
}}
if [ "$funcstack[1]" = _rlsys ]; then _rlsys "$@"; else compdef _rlsys rlsys; fi
"""


def fish_script(words: Words) -> str:
    """Return the completions of fish."""
    lines = ["# Completion of rlsys for fish.", "complete -c rlsys -n __fish_use_subcommand -f"]
    for one in COMMANDS.values():
        lines.append(f'complete -c rlsys -n __fish_use_subcommand -a {one.name} -d "{one.summary}"')
    for name, options in words.items():
        seen = f"'__fish_seen_subcommand_from {name}'"
        lines.append(f"complete -c rlsys -n {seen} -a '{' '.join(options)}'")
    return "\n".join(lines) + "\n"
