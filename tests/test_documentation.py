"""Pages that must name all that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlsys import RunConfig, metrics
from rlsys.config.fields import leaves
from rlsys.runs.observe.console import COLUMNS
from scripts import document_configuration

ROOT = Path(__file__).resolve().parents[1]
METRICS = (ROOT / "docs" / "metrics.md").read_text()


def rows(page: str) -> list[list[str]]:
    """Return the cells of every row of a table but the titles."""
    lines = page.splitlines()
    ruled = {number for number, line in enumerate(lines) if re.fullmatch(r"\|[-|]+\|", line)}
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for number, line in enumerate(lines)
        if line.startswith("|") and number not in ruled and number + 1 not in ruled
    ]


NAMED = {name for row in rows(METRICS) for name in re.findall(r"`([^`]+)`", row[0])}


def test_every_metric_is_explained() -> None:
    """Reasons for a standstill are parts of names, and not names."""
    reasons = {metrics.CHECKPOINT, metrics.EVALUATION, metrics.RESTART, metrics.DEVICES}
    names = {
        value
        for word, value in vars(metrics).items()
        if word.isupper() and not word.startswith("_") and isinstance(value, str)
    } - reasons
    assert len(names) > 30
    assert names <= NAMED
    assert {
        metrics.column_mean("NAME"),
        metrics.reward_component("NAME"),
        metrics.rewards_failed("REASON"),
        metrics.rollouts_dropped("REASON"),
        metrics.queue_depth("STAGE"),
        metrics.waited_s("STAGE", "REASON"),
        metrics.actor_work_s("ACTOR"),
        metrics.actor_wait_s("ACTOR"),
        metrics.of_held_out("METRIC"),
        "eval/pass@K",
        "eval/mean@N",
    } <= NAMED
    assert all(f"`{name}`" in METRICS for name in metrics.STANDSTILLS)


def test_every_metric_of_a_loss_is_explained() -> None:
    found: set[str] = set()
    for path in (ROOT / "rlsys" / "algorithms").glob("*.py"):
        code = re.sub(r'"""[\s\S]*?"""', "", path.read_text())
        families = r'"((?:ratio|kl|correction|offpolicy|value|preference)/\w+)"'
        found |= set(re.findall(families, code))
    assert len(found) > 20
    assert found <= NAMED


def test_every_column_of_the_console_is_explained() -> None:
    titles = {column.title for column in COLUMNS} | {"step", "trend", "left", *metrics.LEADING}
    assert titles <= NAMED


@pytest.mark.parametrize("name", ["metrics", "data", "configuration", "troubleshooting"])
def test_tables_are_whole(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        lines = [line.replace("\\|", "") for line in table.splitlines()]
        assert len({line.count("|") for line in lines}) == 1, lines[0]


SECTIONS = {leaf.name.partition(".")[0] for leaf in leaves(RunConfig) if "." in leaf.name}
OPTIONS = {leaf.name for leaf in leaves(RunConfig)}


@pytest.mark.parametrize("name", ["metrics", "data", "troubleshooting"])
def test_options_that_a_page_names_exist(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    named = set(re.findall(r"`(?:--)?([a-z_]+\.[a-z_-]+)(?:[= ][^`]*)?`", page))
    options = {option.replace("-", "_") for option in named if option.partition(".")[0] in SECTIONS}
    assert len(options) > 5
    assert options <= OPTIONS


def test_the_configuration_page_is_what_the_classes_say() -> None:
    assert document_configuration.PAGE.read_text() == document_configuration.page(), (
        "docs/configuration.md is out of date; run python scripts/document_configuration.py"
    )


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```[\s\S]*?^```", "", page, flags=re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), target
        assert not anchor or anchor in anchors(page.read_text()), target


@pytest.mark.parametrize("path", pages()[1:], ids=lambda path: path.stem)
def test_a_long_page_begins_with_its_contents(path: Path) -> None:
    """Each heading of the second level is linked before the first of them."""
    page = re.sub(r"^```[\s\S]*?^```", "", path.read_text(), flags=re.MULTILINE)
    beginning, *rest = re.split(r"^## ", page, flags=re.MULTILINE)
    titles = [part.splitlines()[0] for part in rest]
    if len(titles) < 3:
        return
    listed = re.findall(r"^- \[([^\]]+)\]\(#", beginning, re.MULTILINE)
    assert listed == titles


def test_the_readme_names_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in pages()[1:]:
        assert f"docs/{path.name}" in readme, path.name
