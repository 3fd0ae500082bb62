"""Write docs/configuration.md from the configuration classes and their docstrings.

    python scripts/document_configuration.py

In: RunConfig, the classes of other models, and the configuration of each recipe. Out: the page,
with a table for each section. A test compares it with the classes.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Any

from rlsys.config import JudgeConfig, RoleConfig, RunConfig, TrainedRoleConfig
from rlsys.config.command_line import CommandOptions, field_docs
from rlsys.config.fields import Leaf, expected, leaves

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

`python scripts/document_configuration.py` writes this page from the configuration classes
(`rlsys/config/`). The option `--help` of each recipe prints the same for that recipe.

An option has one name in three places:

| Place | How it is written |
|---|---|
| command line | `--trainer.learning-rate 1e-5`, with dashes or underscores |
| file, TOML or JSON | `learning_rate = 1e-5` below `[trainer]`, given as `--config run.toml` |
| Python, notebook | `RunConfig(trainer=TrainerConfig(learning_rate=1e-5))` |

The command line wins over the file, and the file over the defaults. `--dry-run` prints the whole
configuration as such a file, and starts nothing. An unknown name or an impossible combination is an
error before the run starts. On the command line a list is given in one piece,
`--sampling.stop A,B`, or option by option, and a switch needs no value: `--resume`.
"""

ROLES = {
    "A frozen model": (
        RoleConfig,
        "A reference, a teacher or a reward model that is not trained, such as `reference` and "
        "`reward_model` of recipes/ppo.py. Names stand behind that of the field, as in "
        "`--reference.num-workers 2`.",
    ),
    "A judge": (JudgeConfig, "A frozen model that answers in words."),
    "Another trained model": (
        TrainedRoleConfig,
        "A critic or another policy, such as `critic` of recipes/ppo.py. It has the options of "
        "the sections [model](#model) and [trainer](#trainer) behind its name, as in "
        "`--critic.trainer.learning-rate 1e-5`, and these defaults.",
    ),
}


def page() -> str:
    """Return the whole page."""
    sections = by_section(leaves(RunConfig))
    recipes = list(recipe_sections())
    titles = ["The command itself", "The run", *(name for name in sections if name)]
    titles += [*ROLES, "Options of recipes"]
    blocks = [INTRODUCTION, "\n".join(f"- [{title}](#{_anchor(title)})" for title in titles)]
    blocks += _block("The command itself", CommandOptions, leaves(CommandOptions))
    for name, members in sections.items():
        owner = members[-1].owner if name else RunConfig
        blocks += _block(name or "The run", owner, members)
    for title, (cls, text) in ROLES.items():
        blocks += [f"## {title}", text, _table(leaves(cls))]
    blocks += [
        "## Options of recipes",
        "Each recipe has the options above, with defaults that fit its task, and these of its own.",
    ]
    blocks += recipes
    return "\n\n".join(block.strip("\n") for block in blocks) + "\n"


def by_section(found: Iterable[Leaf]) -> dict[str, list[Leaf]]:
    """Return the fields by section, first those of the run itself."""
    sections: dict[str, list[Leaf]] = {"": []}
    for leaf in found:
        sections.setdefault(leaf.name.rpartition(".")[0], []).append(leaf)
    return sections


def recipe_sections() -> Iterator[str]:
    """Yield a heading and a table for each recipe with options of its own."""
    common = {leaf.name for leaf in leaves(RunConfig)}
    for path in sorted((ROOT / "recipes").glob("*.py")):
        if (cls := _config_of(path.stem)) is None:
            continue
        roles = {name for name, value in _sections(cls) if not hasattr(RunConfig(), name)}
        own = [
            leaf
            for leaf in leaves(cls)
            if leaf.name not in common and leaf.name.partition(".")[0] not in roles
        ]
        others = ", ".join(f"`{name}`" for name in sorted(roles))
        if own or roles:
            yield f"### {path.stem}"
        if others:
            yield f"Sections of other models: {others}."
        if own:
            yield _table(own)


def _config_of(recipe: str) -> type[Any] | None:
    """Return the class that the recipe's command line sets: the last one that it defines."""
    if recipe == "__init__" or "main" not in (ROOT / "recipes" / f"{recipe}.py").read_text():
        return None
    module = importlib.import_module(f"recipes.{recipe}")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, RunConfig)
        and value.__module__ == module.__name__
    ]
    return found[-1] if found and found[-1]().name != RunConfig().name else None


def _sections(cls: type[Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(cls()).items() if is_dataclass(value))


def _block(title: str, owner: type[Any], members: Sequence[Leaf]) -> list[str]:
    first, *_ = (inspect.getdoc(owner) or "").splitlines()
    return [f"## {title}", first, _table(members)]


def _table(members: Sequence[Leaf]) -> str:
    rows = ["| Option | Value | Default | Meaning |", "|---|---|---|---|"]
    for leaf in members:
        meaning = field_docs(leaf.owner).get(leaf.name.rpartition(".")[2], "")
        cells = (f"`{leaf.name}`", expected(leaf.type), _default(leaf), meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _default(leaf: Leaf) -> str:
    if leaf.default is MISSING:
        return "required"
    match leaf.default:
        case "" | ():
            return "empty"
        case None:
            return "none"
        case bool() | str():
            return f"`{json.dumps(leaf.default)}`"
        case tuple():
            return f"`{json.dumps(list(leaf.default))}`"
        case _:
            return f"`{leaf.default}`"


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
