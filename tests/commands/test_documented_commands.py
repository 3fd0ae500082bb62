"""Every command line with `rlsys` in the documentation."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rlsys.commands.command_table import COMMANDS
from rlsys.commands.completion_command import words_of
from rlsys.commands.new_command import write_project
from tests.commands.rlsys_process import ROOT, rlsys
from tests.test_documentation import pages

Line = tuple[str, list[str]]

TEMPLATE = ROOT / "rlsys" / "commands" / "project" / "README.md.template"


def command_lines(page: Path) -> list[Line]:
    """Return (command, arguments) of each call of rlsys in a page's blocks of shell commands."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for call in re.findall(r"(?:^|&& |<\()rlsys ([^)&>]*)", line):
                name, *arguments = shlex.split(call, comments=True)
                found.append((name, arguments))
    return found


def test_every_command_has_a_section_with_examples() -> None:
    page = ROOT / "docs" / "commands.md"
    titles = re.findall(r"^## `(\w+)`$", page.read_text(), re.MULTILINE)
    assert titles == list(COMMANDS)
    assert {name for name, _ in command_lines(page)} == {*COMMANDS, "--help", "--version"}


@pytest.mark.parametrize("page", [*pages(), TEMPLATE], ids=lambda path: path.stem)
def test_every_documented_command_and_option_exists(page: Path) -> None:
    for name, arguments in command_lines(page):
        if name in ("--help", "--version"):
            continue
        assert name in COMMANDS, name
        if name in ("run", "submit", "plan") and "recipes/" in arguments[0]:
            continue  # its options may be those of the recipe
        options = {one.partition("=")[0] for one in arguments if one.startswith("--")}
        assert options <= {*words_of(name)}, (name, options - {*words_of(name)})


@pytest.mark.slow
@pytest.mark.parametrize("page", ["commands", "planner"])
def test_the_examples_of_plans_work(page: str, tmp_path: Path) -> None:
    """In a project of `rlsys new`, and without simulations, which take most of the time.

    Examples that need a running Ray or a file of an earlier calibration are left out.
    """
    write_project(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    examples = [
        arguments
        for name, arguments in command_lines(ROOT / "docs" / f"{page}.md")
        if name == "plan"
        and arguments[0].endswith(".py")
        and not {*arguments} & {"ray", "--profile"}
    ]
    assert len(examples) >= 2
    for arguments in examples:
        ended = rlsys("plan", *arguments, "--simulate", "0", directory=tmp_path)
        assert ended.returncode == 0, (arguments, ended.stderr)


@pytest.mark.slow
def test_the_commands_without_a_run_work(tmp_path: Path) -> None:
    commands = [
        (name, arguments)
        for name, arguments in command_lines(ROOT / "docs" / "commands.md")
        if name in ("--help", "--version", "new", "completion")
    ]
    assert len(commands) == 6
    for name, arguments in commands:
        ended = rlsys(name, *arguments, directory=tmp_path)
        assert (ended.returncode, ended.stderr) == (0, ""), name
        assert ended.stdout
    assert (tmp_path / "demo" / "recipe.py").is_file()
