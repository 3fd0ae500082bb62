"""`rlsys report` and `rlsys watch`: which runs they take. tests/report has the page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlsys.commands import report_command, watch_command
from rlsys.errors import NOT_GIVEN
from tests.errors import invalid


class Page(ModuleType):
    """Stands in for rlsys.report and records its calls."""

    def __init__(self) -> None:
        super().__init__("rlsys.report")
        self.calls: list[tuple[Any, ...]] = []

    def write_report(self, runs: Sequence[Path], output: Path | None = None) -> Path:
        self.calls.append((list(runs), output))
        return output or runs[0] / "report.html"

    def serve_report(self, run: Path, *, host: str, port: int) -> None:
        self.calls.append((run, host, port))


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    """A project with one run, runs/first, and the recorded calls."""
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "metrics.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    fake = Page()
    monkeypatch.setitem(sys.modules, "rlsys.report", fake)
    return fake


FIRST = Path("runs/first")


def test_report(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    report_command.main([])
    report_command.main(["runs/first", "runs/first", "--output", "both.html"])
    assert page.calls == [([FIRST], None), ([FIRST, FIRST], Path("both.html"))]
    assert capsys.readouterr().out.splitlines() == ["runs/first/report.html", "both.html"]


def test_watch(page: Page) -> None:
    watch_command.main([])
    watch_command.main(["runs/first", "--host", "::1", "--port", "8000"])
    assert page.calls == [(FIRST, "127.0.0.1", 0), (FIRST, "::1", 8000)]


def test_what_is_no_run_is_refused(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    for main in (report_command.main, watch_command.main):
        with invalid("RUN", "runs/frist") as error:
            main(["runs/frist"])
        assert "runs/first" in error.value.fix
    monkeypatch.chdir("runs")
    for main in (report_command.main, watch_command.main):
        with invalid("RUN", NOT_GIVEN):
            main([])
    assert page.calls == []


def test_the_real_page_has_these_functions() -> None:
    report = pytest.importorskip("rlsys.report")
    assert callable(report.write_report)
    assert callable(report.serve_report)
