"""Pages that must name all that the code has."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from rlsys import RunConfig, metrics
from rlsys.config.fields import is_table, leaves
from rlsys.runs.observe.console import COLUMNS
from scripts import document_configuration, document_foreign_names

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
        metrics.actor_cpu_s("ACTOR"),
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
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    check_links(path, path.read_text())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    check_links(path, "\n".join("".join(one["source"]) for one in cells))


def check_links(path: Path, text: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
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
    for path in [*pages()[1:], *NOTEBOOKS]:
        assert path.relative_to(ROOT).as_posix() in readme, path.name


@dataclass(frozen=True)
class Block:
    """A block of code in a page."""

    page: Path
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:\n{self.code}"


def blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages in one of the languages."""
    return [
        Block(path, language, code)
        for path in [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "recipes" / "README.md"]
        for language, code in re.findall(
            r"^```(\w*)\n([\s\S]*?)^```", path.read_text(), re.MULTILINE
        )
        if language in languages
    ]


def test_every_block_of_code_names_a_language_that_is_checked() -> None:
    """Blocks without a language and `text` are drawings, output and formulas."""
    checked = {
        "",
        "text",
        "mermaid",
        "python",
        "bash",
        "json",
        "toml",
        "yaml",
        "dockerfile",
        "latex",
        "math",
    }
    for path in pages():
        named = re.findall(r"^```(\w+)$", path.read_text(), re.MULTILINE)
        assert set(named) <= checked, path.name


def test_python_blocks_are_python() -> None:
    found = blocks("python")
    assert len(found) > 20
    for block in found:
        compile(block.code, str(block.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_json_toml_and_yaml_blocks_are_read() -> None:
    for block in blocks("json"):
        try:
            json.loads(block.code)
        except ValueError:
            for line in block.code.splitlines():  # rows of a file
                json.loads(line)
    for block in blocks("toml"):
        tomllib.loads(block.code)
    for block in blocks("yaml"):
        yaml.safe_load(block.code)


def test_bash_blocks_are_bash(tmp_path: Path) -> None:
    found = blocks("bash")
    assert len(found) > 50
    script = tmp_path / "blocks.sh"
    script.write_text("".join(f"function f{i} {{\n{b.code}\n}}\n" for i, b in enumerate(found)))
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield (page, words) of each command in bash blocks and in backticks."""
    texts = [(block.page.name, block.code) for block in blocks("bash")]
    for path in pages():
        text = re.sub(r"^```[\s\S]*?^```", "", path.read_text(), flags=re.MULTILINE)
        texts += [
            (path.name, line) for line in re.findall(r"`((?:python|bash|pytest) [^`]+)`", text)
        ]
    for page, text in texts:
        for line in text.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|\||[|;]| -- ", line):
                try:
                    words = shlex.split(part, comments=True)
                except ValueError:  # a quoted text with one of the separators
                    continue
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]
                if words:
                    yield page, words


@functools.cache
def with_imports(path: Path, depth: int = 2) -> str:
    """Return the text of a script and of the project's modules that it imports."""
    texts = [path.read_text()]
    if depth:
        imported = r"^\s*(?:from|import) ((?:rlsys|actors|scripts)[\w.]*)"
        for name in set(re.findall(imported, texts[0], re.MULTILINE)):
            place = ROOT / name.replace(".", "/")
            for module in (place.with_suffix(".py"), place / "__init__.py"):
                if module.exists():
                    texts.append(with_imports(module, depth - 1))
    return "\n".join(texts)


COMMANDS = list(commands())
TABLES = tuple(
    f"--{leaf.name.replace('_', '-')}." for leaf in leaves(RunConfig) if is_table(leaf.type)
)
ALL_OPTIONS = {f"--{leaf.name.replace('_', '-')}" for leaf in leaves(RunConfig)}


def test_scripts_that_pages_name_exist_and_have_their_options() -> None:
    """An option is one of the script's own, or of a run's configuration, which many pass on."""
    named = [
        (page, words[1], words[2:])
        for page, words in COMMANDS
        if len(words) > 1
        and words[0] in ("python", "bash")
        and words[1].startswith(("scripts/", "deploy/"))
    ]
    assert len(named) > 60
    for page, script, arguments in named:
        assert (ROOT / script).is_file(), f"{page}: {script}"
        if script.endswith(".py"):
            text = with_imports(ROOT / script)
            for option in arguments:
                name = option.partition("=")[0]
                if name.startswith(TABLES):
                    continue
                if name.startswith("--") and name not in ALL_OPTIONS:
                    field = name.removeprefix("--").replace("-", "_")
                    known = f'"{name}"' in text or re.search(rf"^    {field}: ", text, re.MULTILINE)
                    assert known, f"{page}: {script} {name}"


def test_tests_that_pages_name_exist() -> None:
    named = [
        (page, word)
        for page, words in COMMANDS
        if "pytest" in words[:3]
        for word in words
        if word.startswith("tests/") and "PACKAGE" not in word
    ]
    assert len(named) > 15
    for page, name in named:
        file, _, function = name.partition("::")
        assert (ROOT / file).exists(), f"{page}: {name}"
        if function:
            assert re.search(
                rf"^(async )?def {function}\(", (ROOT / file).read_text(), re.MULTILINE
            ), name


def test_each_complaint_has_a_report_and_a_command() -> None:
    page = (ROOT / "docs" / "complaints.md").read_text()
    table = [row for row in rows(page) if row[0].isdigit()]
    assert [row[0] for row in table] == [str(number) for number in range(1, 21)]
    for _, complaint, rule, command in table:
        assert re.search(r"\([\w.-]+/[\w.-]+#\d+", complaint), complaint
        assert rule
        assert re.fullmatch(r"`(pytest|python|rlsys) .+`", command), command


@pytest.mark.parametrize("library", ["trl", "verl"])
def test_options_of_another_library_are_those_of_the_hints(library: str) -> None:
    page = (ROOT / "docs" / f"from_{library}.md").read_text()
    assert page == document_foreign_names.with_table(page, library), (
        "run python scripts/document_foreign_names.py"
    )


def test_options_of_trl_exist_in_trl() -> None:
    """The classes are read without importing them, which takes seconds."""
    options: set[str] = set()
    for package, file in (
        ("trl", "trainer/grpo_config.py"),
        ("trl", "trainer/base_config.py"),
        ("trl", "trainer/model_config.py"),
        ("trl", "scripts/utils.py"),
        ("transformers", "training_args.py"),
    ):
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            pytest.skip(f"needs {package}")
        path = Path(found.origin).parent / file
        if path.exists():
            options |= set(re.findall(r"^    (\w+): ", path.read_text(), re.MULTILINE))
    names = set(document_foreign_names.OPTIONS["trl"].split())
    assert names - {"reward_funcs"} <= options  # an argument of the trainer
