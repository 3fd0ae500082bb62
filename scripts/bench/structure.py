"""Count what makes the code hard to join, and print the counts as one line of JSON.

    python scripts/bench/structure.py            the counts
    python scripts/bench/structure.py --show     where each of them comes from, on stderr

The counts:

    loose_files       modules directly in rlsys/ and actors/, without __init__.py
    packages          folders directly in rlsys/
    arrows_up         imports of a package that is above or beside the importing one (ORDER)
    circles           circular imports between packages of rlsys, between packages of actors, and
                      between files
    repeated_names    module names that occur more than once
    fragments         docstrings that begin with a word of FRAGMENTS
    dialect_words     words of DIALECT in code and documentation
    match_assertions  pytest.raises(match=...)
    private_accesses  uses of a private member of another object in tests
    code_lines        lines of rlsys/ and actors/
    test_lines        lines of tests/
    config_leaves     configuration fields of the default recipe
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Packages and loose files of rlsys/, from the ground up. Those of one line are independent.
ORDER = (
    "types errors metrics",
    "common",
    "config",
    "text reallocation algorithms",
    "rewards",
    "data",
    "environments",
    "dataflow",
    "engines controller",
    "planner runs tinker_server",
    "evaluation",
    "report",
    "launcher",
    "__init__",
    "commands",
    "__main__",
)
FLOORS = {name: floor for floor, names in enumerate(ORDER) for name in names.split()}

FRAGMENTS = re.compile(
    r"(Of|What|Who|Whoever|Where|When|Whether|Which|It|With|By|For|As|To"
    r"|He|She|They|We|You|I|This|That|These|Those|Its|Their|His|One)\b"
)
DIALECT = re.compile(r"\b(told|tells|stands|lies)\b", re.IGNORECASE)


# `x._name` of another object, also in programs that tests start. Not counted: methods of named
# tuples, and modules whose own names begin with an underscore.
PRIVATE = re.compile(
    r"(?<=[\w\])])(?<!\bself)(?<!\bcls)(?<!\bos)(?<!\bsys)(?<!\bray)(?<!\btorch)(?<!\bC)"
    r"\._(?!replace\b|asdict\b)[a-z]\w*"
)


def modules(*folders: str) -> Iterator[Path]:
    """Yield the Python files below folders of the repository, in a fixed order."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the dotted name of a file of the repository."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports() -> dict[str, set[str]]:
    """Return the modules of rlsys and actors that each of their modules imports.

    Imports for types and inside functions count.
    """
    names = {module_name(path): path for path in modules("rlsys", "actors")}
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        targets: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*parents, *filter(None, [node.module])])
                for alias in node.names:
                    full = f"{base}.{alias.name}"
                    targets.add(full if full in names else base)
        found[name] = {target for target in targets if target in names and target != name}
    return found


def part(module: str) -> str:
    """Return the package or loose file of rlsys that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def arrows(found: Mapping[str, set[str]]) -> Iterator[tuple[str, str, str]]:
    """Yield imports between the parts of rlsys: importing module, its part, imported part."""
    for module, targets in found.items():
        if module.split(".")[0] == "rlsys":
            for target in sorted(targets):
                if target.split(".")[0] == "rlsys" and part(target) != part(module):
                    yield module, part(module), part(target)


def arrows_up(found: Mapping[str, set[str]]) -> list[str]:
    """Return the imports that break ORDER, as `module -> part`."""
    return [
        f"{module} -> {target}"
        for module, source, target in arrows(found)
        if FLOORS[target] >= FLOORS[source]
    ]


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the strongly connected components with more than one node (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    result: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(edges.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            members = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(members) > 1:
                result.append(sorted(members))

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    for node in sorted(edges):
        if node not in index:
            visit(node)
    sys.setrecursionlimit(limit)
    return result


def package_edges(found: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports between the packages directly in rlsys/ and in actors/."""
    edges: dict[str, set[str]] = defaultdict(set)
    for module, targets in found.items():
        for target in targets:
            ends = [".".join(name.split(".")[:2]) for name in (module, target)]
            if ends[0] != ends[1] and all("." in end for end in ends):
                edges[ends[0]].add(ends[1])
    return edges


def docstrings(paths: Iterable[Path]) -> Iterator[tuple[Path, int, str]]:
    """Yield file, line and text of each docstring of a module, class or function."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield path, getattr(node, "lineno", 1), text


def occurrences(pattern: re.Pattern[str], paths: Iterable[Path]) -> list[str]:
    """Return `file:line: text` of each line in which a pattern occurs, once an occurrence."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for _ in pattern.findall(line)
    ]


def match_assertions() -> list[str]:
    """Return `file:line` of each pytest.raises(match=...) and pytest.warns(match=...)."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules("tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("raises", "warns")
        and any(keyword.arg == "match" for keyword in node.keywords)
    ]


def repeated_names() -> list[str]:
    """Return the module names that occur more than once."""
    names = Counter(path.stem for path in modules("rlsys", "actors") if path.stem != "__init__")
    return [name for name, count in names.items() if count > 1]


def num_lines(*folders: str) -> int:
    """Return the number of lines of the Python files below folders."""
    return sum(len(path.read_text().splitlines()) for path in modules(*folders))


def config_leaves() -> int:
    """Return the number of configuration fields of the default recipe."""
    from recipes.grpo import GRPOConfig
    from rlsys.config.fields import num_leaf_fields

    return num_leaf_fields(GRPOConfig)


def evidence() -> dict[str, Sequence[object]]:
    """Return what each count but those of lines and fields counts."""
    found = imports()
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    documents += [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md")]
    code = [*modules("rlsys", "actors", "recipes"), *filter(Path.exists, documents)]
    return {
        "loose_files": [
            path.name
            for folder in ("rlsys", "actors")
            for path in sorted((ROOT / folder).glob("*.py"))
            if path.name != "__init__.py"
        ],
        "packages": [path.parent.name for path in sorted((ROOT / "rlsys").glob("*/__init__.py"))],
        "arrows_up": arrows_up(found),
        "circles": [*circles(package_edges(found)), *circles(found)],
        "repeated_names": repeated_names(),
        "fragments": [
            f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
            for path, line, text in docstrings(modules("rlsys", "actors", "recipes"))
            if FRAGMENTS.match(text)
        ],
        "dialect_words": occurrences(DIALECT, code),
        "match_assertions": match_assertions(),
        "private_accesses": occurrences(PRIVATE, modules("tests")),
    }


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", action="store_true", help="print what is counted, on stderr")
    show = parser.parse_args().show
    found = evidence()
    if show:
        for name, items in found.items():
            for item in items:
                print(f"{name}: {item}", file=sys.stderr)
    print(
        json.dumps(
            {
                **{name: len(items) for name, items in found.items()},
                "code_lines": num_lines("rlsys", "actors"),
                "test_lines": num_lines("tests"),
                "config_leaves": config_leaves(),
            }
        )
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
