"""The examples of docs/planner.md run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsys.commands.plan_command import main
from rlsys.planner.cpu_probe import save_probe
from tests.planner.cpu_examples import cpu_probe

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "planner.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def commands() -> Iterator[list[str]]:
    """Yield the arguments of each `rlsys plan` of a recipe on the page."""
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("rlsys plan recipes/") and "--profile" not in line:
                yield shlex.split(line)[2:]


COMMANDS = list(commands())


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLES[number], f"docs/planner.md example {number}", "exec"), {})
    assert "Estimate(" in capsys.readouterr().out


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 2


@pytest.mark.slow
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_plan_is_found(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    save_probe(cpu_probe())
    output = tmp_path / "plan.toml"
    assert main([*arguments, "--simulate", "1", "--output", str(output)]) == 0
    assert output.exists()


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 5
