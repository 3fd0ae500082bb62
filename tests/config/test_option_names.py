from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlsys.common.option_names import COMMAND_LINE, option
from rlsys.config import command_line
from rlsys.runs.run_directory import RunDirectory
from tests.errors import invalid

ROOT = Path(__file__).resolve().parents[2]

# Files that are only used on command lines.
OF_COMMANDS = {
    "rlsys/config/command_line.py",
    "rlsys/config/fields.py",
    "rlsys/tinker_server/tinker_service.py",
}
OF_COMMANDS |= {"rlsys/tinker_server/http_app.py", "actors/tinker_server/serving.py"}


@dataclass(frozen=True, kw_only=True)
class Small:
    num_steps: int = 1


@pytest.mark.parametrize(
    ("field", "value", "python", "command"),
    [
        ("resume", "auto", 'resume="auto"', "--resume auto"),
        ("resume", True, "resume=True", "--resume"),
        ("name", None, "name", "--name"),
        ("num_steps", 3, "num_steps=3", "--num-steps 3"),
        ("model.path", "a b", 'model.path="a b"', "--model.path 'a b'"),
    ],
)
def test_an_option_is_named_as_the_user_sets_it(
    field: str,
    value: str | int | None,
    python: str,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(COMMAND_LINE, raising=False)
    command_line.parse(Small, [])
    assert option(field, value) == python
    monkeypatch.setenv(COMMAND_LINE, "")  # so that it is as before afterwards
    monkeypatch.setattr("sys.argv", ["recipe.py", "--num-steps", "2"])
    command_line.parse(Small)
    assert option(field, value) == command


def test_a_run_that_exists_names_the_option_of_the_way_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "notes.txt").touch()
    for started in ("", "1"):
        monkeypatch.setenv(COMMAND_LINE, started)
        with invalid("name", "demo") as refused:
            RunDirectory.open(tmp_path, "demo", {}, resume=False)
        assert ("--name" in str(refused.value)) == bool(started)


def test_messages_leave_the_spelling_of_options_to_one_function() -> None:
    """Only on a command line is it right to name an option "--resume"."""
    option_of_recipes = re.compile(
        r"--(?:resume|name|dry-run|num-steps|runs-dir|model\.|data\.|trainer\.|rollout\.|seed)"
    )
    found = []
    for package in ("rlsys", "actors"):
        for file in sorted((ROOT / package).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            if name in OF_COMMANDS or name.startswith("rlsys/commands/"):
                continue
            code = re.sub(r'"""[\s\S]*?"""', "", file.read_text())
            found += [
                f"{name}: {line.strip()}"
                for line in code.splitlines()
                if option_of_recipes.search(line.partition("  # ")[0])
                and not line.strip().startswith("#")
            ]
    assert not found
