"""Collect the pages of the documentation site: the first half of scripts/docs.sh.

    python scripts/site_pages.py

In: README.md, docs/, recipes/README.md and other pages, whose links lead to files of the checkout.
Out: build/site-pages/ and build/mkdocs.yml, whose links lead to pages of the site. A file of the
checkout that a page links to, such as a recipe, becomes a page with its text. A notebook becomes a
page with its cells. The API pages name modules and classes; mkdocstrings writes their docstrings.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "build" / "site-pages"
CONFIGURATION = ROOT / "build" / "mkdocs.yml"

# Pages outside of docs/: file of the checkout, page of the site.
OTHER_PAGES = {
    "README.md": "index.md",
    "recipes/README.md": "recipes/README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "AGENTS.md": "AGENTS.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
IMAGES = {".svg", ".png"}
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".toml": "toml", ".yaml": "yaml"}

# A link or an image outside of code.
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
CODE = re.compile(r"^```[\s\S]*?^```|`[^`\n]+`", re.MULTILINE)

# API pages: title, introduction, and what is documented.
API = {
    "index": (
        "Python API",
        "All names are in `rlsys`: `import rlsys`.",
        (
            "rlsys.launcher.launching.launch",
            "rlsys.launcher.launching.main",
            "rlsys.launcher.launching.RunResult",
            "rlsys.launcher.launching.WarmStart",
            "rlsys.launcher.tiny_models.OwnModel",
            "rlsys.config.command_line.parse",
            "rlsys.dataflow.graph.graph.Dataflow",
            "rlsys.dataflow.graph.stages.Prompts",
            "rlsys.evaluation.held_out_data.HeldOut",
            "rlsys.evaluation.playing.play",
            "rlsys.types.Rollout",
            "rlsys.errors.InvalidValue",
            "rlsys.errors.RunFailed",
        ),
    ),
    "algorithms": (
        "Algorithms",
        "Losses and advantages, from `rlsys.algorithms`. [algorithms.md](../algorithms.md) has "
        "their formulas and their names on the command line.",
        ("rlsys.algorithms.losses", "rlsys.algorithms.advantages"),
    ),
    "configuration": (
        "Configuration classes",
        "[configuration.md](../configuration.md) lists the options as on the command line.",
        (
            "rlsys.config.run_config",
            "rlsys.config.data_config",
            "rlsys.config.scoring_config",
            "rlsys.config.rollout_config",
            "rlsys.config.training_config",
        ),
    ),
    "environments": (
        "Environments and tools",
        "[environments.md](../environments.md) explains them with examples.",
        (
            "rlsys.environments.environment",
            "rlsys.environments.tools.tools",
            "rlsys.environments.tools.mcp",
        ),
    ),
    "rewards": (
        "Rewards",
        "From `rlsys` and `rlsys.rewards`. [README](../index.md#your-own-reward) explains them.",
        ("rlsys.rewards",),
    ),
}


def pages(root: Path = ROOT) -> dict[str, str]:
    """Return {file of the checkout: page of the site} of all pages."""
    found = {file: page for file, page in OTHER_PAGES.items() if (root / file).exists()}
    for path in sorted((root / "docs").rglob("*")):
        if path.suffix in (".md", ".ipynb"):
            file = path.relative_to(root).as_posix()
            found[file] = posixpath.splitext(file.removeprefix("docs/"))[0] + ".md"
    return found


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Apply `change` to the parts of a page that are not code."""
    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])


class Site:
    """The pages of one site, and the files that they link to."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.pages = pages(root)
        self.files: dict[str, str] = {}  # other files of the checkout: file or page of the site

    def place(self, file: str) -> str:
        """Return the place in the site of a file of the checkout.

        Raises:
            ValueError: The file does not exist.
        """
        path = self.root / file
        if path.is_dir():
            file = f"{file}/README.md" if f"{file}/README.md" in self.pages else file
        elif not path.exists():
            raise ValueError(f"{file} does not exist")
        if file in self.pages:
            return self.pages[file]
        if path.suffix in IMAGES:
            return self.files.setdefault(file, file.removeprefix("docs/"))
        return self.files.setdefault(file, f"source/{file}.md")

    def with_links(self, text: str, file: str, page: str) -> str:
        """Return a page's text with links to pages of the site instead of files.

        Args:
            text: Markdown.
            file: The file of the checkout, to which its links are relative.
            page: Its place in the site.

        Raises:
            ValueError: A link leads to no file.
        """

        def replaced(match: re.Match[str]) -> str:
            before, target, after = match.groups()
            name, mark, anchor = target.partition("#")
            if "://" in target or not name or target.startswith("mailto:"):
                return match[0]
            linked = posixpath.normpath(posixpath.join(posixpath.dirname(file), name))
            place = self.place(linked)
            relative = posixpath.relpath(place, posixpath.dirname(page) or ".")
            return f"{before}{relative}{mark}{anchor}{after}"

        return outside_code(text, lambda part: LINK.sub(replaced, part))

    def write(self, output: Path) -> None:
        """Write all pages below `output`."""
        shutil.rmtree(output, ignore_errors=True)
        for file, page in self.pages.items():
            text = (self.root / file).read_text()
            if file.endswith(".ipynb"):
                text = notebook_page(json.loads(text))
            _write(output / page, self.with_links(text, file, page))
        for name, (title, introduction, objects) in API.items():
            named = "".join(f"\n::: {one}\n" for one in objects)
            _write(output / "api" / f"{name}.md", f"# {title}\n\n{introduction}\n{named}")
        for file, place in self.files.items():
            path = self.root / file
            if path.suffix in IMAGES:
                (output / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, output / place)
            else:
                _write(output / place, source_page(path, file))


def source_page(path: Path, file: str) -> str:
    """Return a page with the text of a file, or with the names of a directory's files."""
    if path.is_dir():
        names = "".join(f"- `{one.name}`\n" for one in sorted(path.iterdir()))
        return f"# {file}\n\n{names}"
    return f"# {file}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}````\n"


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return the cells of a notebook as Markdown, with the text that they printed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            printed = "".join(_printed(cell["outputs"])).rstrip()
            if printed:
                parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts) + "\n"


def _printed(outputs: Sequence[dict[str, Any]]) -> Iterator[str]:
    for output in outputs:
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        yield "".join(text)


def navigation(text: str, exists: Callable[[str], bool]) -> str:
    """Return mkdocs.yml without the entries of its navigation whose pages do not exist."""
    before, nav, entries = text.partition("\nnav:\n")
    kept = [
        line
        for line in entries.splitlines(keepends=True)
        if not (entry := re.fullmatch(r"\s*- (\S+\.md)\n", line)) or exists(entry[1])
    ]
    return before + nav + "".join(kept)


def navigation_pages(text: str) -> list[str]:
    """Return the pages that the navigation of mkdocs.yml names."""
    return re.findall(r"^\s+- (\S+\.md)$", text.partition("\nnav:\n")[2], re.MULTILINE)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main() -> int:
    """Write the pages and the configuration; return the exit code."""
    try:
        Site().write(OUTPUT)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    configuration = navigation(
        (ROOT / "mkdocs.yml").read_text(), lambda page: (OUTPUT / page).exists()
    )
    # Its directories are relative to build/.
    for name in ("docs_dir", "site_dir"):
        configuration = re.sub(rf"^{name}: build/", f"{name}: ", configuration, flags=re.MULTILINE)
    configuration = configuration.replace('paths: ["."]', f"paths: [{json.dumps(str(ROOT))}]")
    CONFIGURATION.write_text(configuration)
    print(f"{sum(len(files) for _, _, files in os.walk(OUTPUT))} files in {OUTPUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
