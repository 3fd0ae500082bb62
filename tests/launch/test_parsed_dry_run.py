"""The --dry-run that `parse` reads reaches `launch`, whatever the recipe passes on."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rlsys
from rlsys.config.plan_session import keep_dry_run, plan_session, requested_dry_run
from rlsys.launcher import launching
from rlsys.runs.run_files import RunFiles
from tests.errors import invalid
from tests.launch.small_run import ROWS, small_flow

ROOT = Path(__file__).parents[2]

# Recipes that the pages show, each a block of Python with a call of `launch`.
PAGES = [
    (page, block)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    if "rlsys.parse(" in block and "rlsys.launch(" in block
]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[bool | str]:
    """The dry runs of the calls that would have started a run."""
    found: list[bool | str] = []

    def start(config: rlsys.RunConfig, flow: rlsys.Dataflow, **options: Any) -> rlsys.RunResult:
        found.append(options["dry_run"])
        files = RunFiles(Path(config.runs_dir))
        return rlsys.RunResult(outcome="dry run", files=files, metrics=())

    monkeypatch.setattr(launching, "actors_module", lambda name: SimpleNamespace(launch=start))
    return found


def recipe(function: Callable[[], object], *, decorated: bool) -> None:
    """Call the function of a recipe, as a program does."""
    (rlsys.main(function) if decorated else function)()


def launched(config: rlsys.RunConfig, **options: Any) -> None:
    rlsys.launch(config, small_flow(config, ROWS), **options)


@pytest.mark.parametrize(("page", "block"), PAGES, ids=[page.stem for page, _ in PAGES])
@pytest.mark.parametrize("option", ["--dry-run", "--dry-run=8xH100"])
def test_the_recipe_of_a_page_has_a_dry_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: list[bool | str],
    page: Path,
    block: str,
    option: str,
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(block)
    monkeypatch.setattr(sys, "argv", [str(path), option])
    runpy.run_path(str(path), run_name="__main__")
    assert started == ["8xH100" if "=" in option else True]


def test_there_are_pages_with_recipes() -> None:
    assert {"README", "from_trl", "data"} <= {page.stem for page, _ in PAGES}


@pytest.mark.parametrize("decorated", [True, False])
def test_a_recipe_need_not_pass_the_dry_run_on(
    monkeypatch: pytest.MonkeyPatch, started: list[bool | str], decorated: bool
) -> None:
    def run() -> None:
        cfg = rlsys.parse(rlsys.RunConfig).config
        launched(cfg)
        launched(replace(cfg, num_steps=3))
        launched(rlsys.RunConfig(name="another"), dry_run=True)

    monkeypatch.setattr(sys, "argv", ["mine.py", "--dry-run", "4xL40S"])
    recipe(run, decorated=decorated)
    assert started == ["4xL40S", "4xL40S", "4xL40S"]
    started.clear()
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    recipe(run, decorated=decorated)
    assert started == [False, False, True]


def test_options_that_are_read_before_the_main_function_count(
    monkeypatch: pytest.MonkeyPatch, started: list[bool | str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", "--dry-run"])
    cfg = rlsys.parse(rlsys.RunConfig).config
    recipe(lambda: launched(cfg), decorated=True)
    assert started == [True]


def test_a_plan_that_is_requested_before_the_main_function_is_refused(
    monkeypatch: pytest.MonkeyPatch, started: list[bool | str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", "--plan", "auto"])
    cfg = rlsys.parse(rlsys.RunConfig).config
    with plan_session(), invalid("--plan", "auto"):
        launched(cfg)
    rlsys.parse(rlsys.RunConfig, [])
    assert started == []


def test_a_recipe_cannot_start_a_run_against_its_command_line(started: list[bool | str]) -> None:
    cfg = rlsys.parse(rlsys.RunConfig, ["--dry-run"]).config
    with invalid("launch: dry_run", False):
        launched(cfg, dry_run=False)
    rlsys.parse(rlsys.RunConfig, [])
    launched(cfg, dry_run=False)
    assert started == [False]


def test_a_dry_run_remains_one_if_defaults_are_parsed_too() -> None:
    with plan_session():
        keep_dry_run(True)
        keep_dry_run(False)
        assert requested_dry_run(None) is True
    assert requested_dry_run(None) is False  # the next start of a recipe
