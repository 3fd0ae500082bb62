"""The documentation site: its pages, their links and their order; built, without any other host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from scripts.site_pages import API, Site, navigation, navigation_pages, notebook_page, pages

ROOT = Path(__file__).resolve().parents[1]
NAVIGATION = navigation_pages((ROOT / "mkdocs.yml").read_text())
CODE = re.compile(r"^`{3,}[\s\S]*?^`{3,}|`[^`\n]+`", re.MULTILINE)
# Pages that other changes add. Remove a name when its page exists.
EXPECTED = {"report.md", "trackers.md", "planner.md"}


def test_each_page_is_in_the_navigation_once() -> None:
    assert len(NAVIGATION) == len(set(NAVIGATION))
    places = {*pages().values(), *(f"api/{name}.md" for name in API)}
    assert set(NAVIGATION) - EXPECTED == places - EXPECTED


def test_sections_are_in_the_order_of_a_newcomer() -> None:
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    sections = re.findall(r"^  - ([^:\n]+):$", text, re.MULTILINE)
    assert sections == [
        "Start",
        "Tutorials",
        "Guides",
        "Reference",
        "How it works",
        "Project",
    ]


def test_links_of_pages_become_links_of_the_site(tmp_path: Path) -> None:
    for name, text in {
        "README.md": "[a](docs/a.md#one) `[code](docs/a.md)` [c](docs/t/n.ipynb) [x](https://x.y)",
        "docs/a.md": "[back](../README.md) [file](../x/y.py) ![p](p.svg) [here](#one)",
        "docs/p.svg": "<svg/>",
        "x/y.py": "print(1)\n",
        "docs/t/n.ipynb": '{"cells": [{"cell_type": "markdown", "source": ["[up](../a.md)"]}]}',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    site = Site(tmp_path)
    site.write(tmp_path / "site")
    read = {
        path.relative_to(tmp_path / "site").as_posix(): path.read_text()
        for path in (tmp_path / "site").rglob("*")
        if path.is_file()
    }
    assert read["index.md"] == "[a](a.md#one) `[code](docs/a.md)` [c](t/n.md) [x](https://x.y)"
    assert read["a.md"] == "[back](index.md) [file](source/x/y.py.md) ![p](p.svg) [here](#one)"
    assert read["t/n.md"] == "[up](../a.md)\n"
    assert read["p.svg"] == "<svg/>"
    assert "print(1)" in read["source/x/y.py.md"]


def test_a_link_to_a_missing_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("[a](missing.md)")
    with pytest.raises(ValueError, match=r"missing\.md"):
        Site(tmp_path).write(tmp_path / "site")


def test_cells_of_a_notebook_become_a_page() -> None:
    stream = {"output_type": "stream", "name": "stdout", "text": ["2\n"]}
    code = {"cell_type": "code", "source": ["print(1 + 1)"], "outputs": [stream]}
    quiet = {"cell_type": "code", "source": ["x = 1"], "outputs": []}
    title = {"cell_type": "markdown", "source": ["# Title\n", "Text."]}
    assert notebook_page({"cells": [title, code, quiet]}).split("\n\n") == [
        "# Title\nText.",
        "```python\nprint(1 + 1)\n```",
        "```text\n2\n```",
        "```python\nx = 1\n```\n",
    ]


def test_the_navigation_leaves_out_pages_that_do_not_exist() -> None:
    text = "a: 1\n\nnav:\n  - One:\n      - x.md\n      - y.md\n"
    assert navigation(text, lambda page: page == "x.md") == text.replace("      - y.md\n", "")


def test_all_pages_of_the_checkout_are_written(tmp_path: Path) -> None:
    """Every link of every page leads to a file that is written."""
    Site().write(tmp_path)
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
    assert set(NAVIGATION) - EXPECTED <= written
    for page in written:
        text = re.sub(CODE, "", (tmp_path / page).read_text())
        for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
            assert "://" in target or (tmp_path / page).parent.joinpath(target).exists(), target


class Page(HTMLParser):
    """Links, anchors and loaded files of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors = {""}  # the page itself
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.anchors |= {named[name] for name in ("id", "name") if name in named}
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        elif tag == "link" and named.get("rel", "") not in ("canonical", "next", "prev"):
            self.loaded.append(named.get("href", ""))
        elif "src" in named:
            self.loaded.append(named["src"])


@pytest.fixture(scope="module")
def site() -> Path:
    """Build the site."""
    if shutil.which("zensical") is None:
        pytest.skip("needs zensical: pip install -e '.[docs]'")
    environment = {**os.environ, "NO_COLOR": "1"}
    built = subprocess.run(
        ["bash", "scripts/docs.sh"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "No issues found" in built.stdout + built.stderr
    return ROOT / "build" / "site"


@pytest.mark.slow
def test_every_link_and_anchor_of_the_site_exists(site: Path) -> None:
    parsed = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    assert len(parsed) > 60
    broken = []
    for path, page in parsed.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            missing = not target.exists()
            if target in parsed and not missing:
                missing = unquote(parts.fragment) not in parsed[target].anchors
            if missing:
                broken.append((path.name, link))
    assert broken == []


@pytest.mark.slow
def test_the_site_loads_nothing_from_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert [url for url in Page(path.read_text()).loaded if urlsplit(url).netloc] == [], path
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//", path.read_text()), path


@pytest.mark.slow
def test_the_api_has_docstrings_and_the_search_finds_them(site: Path) -> None:
    page = (site / "api" / "rewards.html").read_text()
    assert "numeric_answer" in page
    assert "numeric_answer" in (site / "search.json").read_text()
