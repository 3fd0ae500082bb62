"""Contracts of the architecture that no single module can keep by itself."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from recipes.agent import AgentConfig
from recipes.calculator import CalculatorConfig
from recipes.grpo_gsm8k import GSM8KConfig
from recipes.guess import GuessConfig
from recipes.kuhn import KuhnConfig
from recipes.programs import ProgramsConfig
from recipes.quickstart import QuickstartConfig
from recipes.sums_in_words import Config as SumsInWordsConfig
from rlsys.config.command_line import parse
from rlsys.config.fields import num_leaf_fields, to_toml
from rlsys.runs.observe.trackers.tracker_kinds import TRACKERS
from scripts.bench import structure
from tests.small_recipes import SMALL_RECIPES, config_of

ROOT = Path(__file__).parents[1]
CONFIGS: dict[str, type] = {
    "quickstart.py": QuickstartConfig,
    "grpo_gsm8k.py": GSM8KConfig,
    "programs.py": ProgramsConfig,
    "agent.py": AgentConfig,
    "guess.py": GuessConfig,
    "calculator.py": CalculatorConfig,
    "kuhn.py": KuhnConfig,
    "sums_in_words.py": SumsInWordsConfig,
    **{
        f"{name}.py": config_of(name)
        for name in (*SMALL_RECIPES, "dpo", "ppo", "reward_model", "sft")
    },
}


TRACKER_LIBRARIES = {kind.extra for kind in TRACKERS.values()}


@cache
def import_statements(package: str) -> list[tuple[Path, ast.Import | ast.ImportFrom]]:
    """(file, statement) of every import, inside functions too."""
    return [
        (path, node)
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def imports(package: str) -> Iterator[tuple[Path, str]]:
    """(file, top-level package that it imports), inside functions too."""
    for path, node in import_statements(package):
        match node:
            case ast.Import(names=names):
                yield from ((path, alias.name.partition(".")[0]) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield path, module.partition(".")[0]


def test_imports_go_one_way() -> None:
    assert not [path for path, name in imports("rlsys") if name in ("ray", "actors", "recipes")]
    assert not [path for path, name in imports("actors") if name == "recipes"]


def test_packages_import_only_packages_below_them() -> None:
    names = {path.stem for path in (ROOT / "rlsys").iterdir() if path.suffix in (".py", "")}
    assert names - {"__pycache__"} == set(structure.FLOORS), "add a new package to ORDER"
    assert structure.arrows_up(structure.imports()) == []


def test_no_import_is_circular() -> None:
    found = structure.imports()
    assert structure.circles(structure.package_edges(found)) == []
    assert structure.circles(found) == []


def test_rlsys_imports_by_whole_names() -> None:
    for path, node in import_statements("rlsys"):
        assert not (isinstance(node, ast.ImportFrom) and node.level), path


def test_a_module_name_occurs_once() -> None:
    assert structure.repeated_names() == []


def test_tests_use_few_private_members() -> None:
    for owner, count in [("engine", 1), ("f(x)", 1), ("held[0]", 1), ("self", 0), ("torch", 0)]:
        assert len(structure.PRIVATE.findall(f"{owner}._name")) == count
    assert not structure.PRIVATE.findall(f"row.{'_replace'}(a=1)")
    assert len(structure.occurrences(structure.PRIVATE, structure.modules("tests"))) <= 40


def test_the_circles_of_a_graph_are_found() -> None:
    edges = {"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": ["e"], "e": ["d"], "f": ["a"]}
    assert structure.circles(edges) == [["d", "e"], ["a", "b", "c"]]
    assert structure.circles({"a": ["b"], "b": ["c"], "c": []}) == []


def test_the_actors_import_each_other_relatively() -> None:
    """A wheel ships their folder under another name."""
    assert not [path for path, name in imports("actors") if name == "actors"]


def test_what_rlsys_offers_is_there_and_importing_it_is_cheap() -> None:
    program = (
        "import sys, rlsys\n"
        "assert not {'torch', 'ray', 'transformers', 'datasets'} & set(sys.modules)\n"
        "assert all(getattr(rlsys, name) is not None for name in rlsys.__all__)\n"
        "assert rlsys.__version__ and 'ray' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=300)


@pytest.mark.parametrize(
    "module", ["rlsys", "rlsys.algorithms", "rlsys.rewards", "rlsys.rewards.sandbox"]
)
def test_an_editor_proposes_the_api_alone(module: str) -> None:
    imported = importlib.import_module(module)
    assert set(dir(imported)) - {"__version__"} == set(imported.__all__)


def test_who_has_no_model_starts_without_its_packages() -> None:
    program = (
        "import sys\n"
        "import actors.environment.environment_actor, actors.run.fleet\n"
        "import actors.trainer.trainer_proxy\n"
        "assert not {'transformers', 'torch.distributed.tensor'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=300)


@pytest.mark.parametrize(
    "module",
    ["store.store_actor", "trainer.memory_checkpoints", "workers.reward_actor", "cluster.calls"],
)
def test_processes_without_tensors_start_without_torch(module: str) -> None:
    program = f"import sys, actors.{module}\nassert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=300)


def test_optional_packages_stand_in_one_place_each() -> None:
    found = {
        (path.name, name)
        for path, name in imports("rlsys")
        if name in ("vllm", "peft", "mcp", "IPython", "xgrammar", *TRACKER_LIBRARIES)
    }
    assert {file for file, name in found if name == "IPython"} == {"notebook.py"}
    for library in TRACKER_LIBRARIES:
        assert {file for file, name in found if name == library} == {f"{library}_tracker.py"}
    assert {file for file, name in found if name == "peft"} == {"adapters.py"}
    assert {file for file, name in found if name == "mcp"} == {"mcp.py"}
    assert {file for file, name in found if name == "xgrammar"} == {"structural_tags.py"}
    assert all(file.startswith("vllm_") for file, name in found if name == "vllm")


@pytest.mark.parametrize("config", CONFIGS.values())
def test_a_recipe_has_few_options(config: type) -> None:
    assert num_leaf_fields(config) <= 140  # of PPO: four models, each with settings of its own


def documented_commands() -> list[tuple[str, list[str]]]:
    """(recipe, arguments) of every `python recipes/...` in the documentation."""
    found = []
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").glob("*.md")]
    for page in pages:
        text = page.read_text().replace("\\\n", " ")
        for recipe, rest in re.findall(r"python recipes/(\w+\.py)([^`\n]*)", text):
            words = shlex.shlex(rest, posix=True, punctuation_chars="|>&;")
            words.whitespace_split = True
            arguments = itertools.takewhile(lambda word: word[0] not in "|>&;", words)
            found.append((recipe, list(arguments)))
    return found


def test_every_documented_command_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(to_toml(QuickstartConfig()))  # as a documented --dry-run prints it
    commands = documented_commands()
    assert len(commands) >= 5
    for recipe, arguments in commands:
        parse(CONFIGS[recipe], arguments)
