"""Run a recipe. `rlsys run recipe.py OPTIONS` is the same as `python recipe.py OPTIONS`.

    rlsys run recipe.py --num-steps 100
    rlsys run recipe.py --help

The process becomes that of the recipe (exec). Its exit code, its reaction to signals and its
messages are therefore those of the recipe.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from rlsys.common.option_names import COMMAND_LINE
from rlsys.errors import InvalidValue, require

HELP = """\
usage: rlsys run RECIPE.py [OPTIONS]

Run a recipe, as `python RECIPE.py [OPTIONS]` does.

  rlsys run recipe.py --num-steps 100 --name first
  rlsys run recipe.py --name first --num-steps 200 --resume
  rlsys run recipe.py --config config.toml
  rlsys run recipe.py --dry-run
  rlsys run recipe.py --help        the options of the recipe
"""

# Statements that start nothing by themselves.
_PASSIVE = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.Pass,
)
NOT_PYTHON = "Give the Python file of a recipe; a file with options belongs after --config."
GUARD = 'if __name__ == "__main__": main()'


def main(arguments: Sequence[str]) -> None:
    """Replace this process by that of the recipe."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return
    if not arguments or arguments[0].startswith("-"):
        raise InvalidValue(
            "RECIPE",
            *arguments[:1],
            rule="the file of a recipe comes first",
            fix="Write rlsys run recipe.py OPTIONS.",
        )
    check_recipe(Path(arguments[0]))
    os.environ.pop(COMMAND_LINE, None)  # a recipe that parses options sets it
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *arguments])


def check_recipe(path: Path) -> None:
    """Check that a file is a Python program that starts something.

    Raises:
        InvalidValue: It is not.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise InvalidValue(
            "RECIPE", str(path), rule=f"cannot be read ({error.strerror})", fix=_other_file(path)
        ) from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f"line {line} is not Python" if line else "is not Python"
        raise InvalidValue(
            "RECIPE", str(path), rule=f"{place} ({getattr(error, 'msg', error)})", fix=NOT_PYTHON
        ) from None
    require(path.suffix == ".py", "RECIPE", str(path), rule="is not a .py file", fix=NOT_PYTHON)
    if not starts_something(tree):
        fix = "Give the file that calls rlsys.launch."
        if any(isinstance(one, ast.FunctionDef) and one.name == "main" for one in tree.body):
            fix = f"Add the lines {GUARD!r} at its end."
        raise InvalidValue(
            "RECIPE", str(path), rule="defines functions and starts nothing", fix=fix
        )


def starts_something(tree: ast.Module) -> bool:
    """Return whether a program does more than to define names.

    The call in `result = rlsys.launch(...)` counts, unless the program has a function `main`.
    """
    if any(not isinstance(one, _PASSIVE) and not _is_text(one) for one in tree.body):
        return True
    if any(isinstance(one, ast.FunctionDef) and one.name == "main" for one in tree.body):
        return False
    assigned = [one for one in tree.body if isinstance(one, ast.Assign | ast.AnnAssign)]
    return any(isinstance(node, ast.Call) for one in assigned for node in ast.walk(one))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _other_file(path: Path) -> str:
    if (path / "recipe.py").is_file():
        return f"Did you mean {path / 'recipe.py'}?"
    names = [one.name for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
    similar = get_close_matches(path.name, names, n=1)
    if similar:
        return f"Did you mean {path.parent / similar[0]}?"
    return "Give the Python file of a recipe; rlsys new DIR writes one."


def option_names() -> list[str]:
    """Return the options of every recipe, for shell completion."""
    from rlsys.config import RunConfig
    from rlsys.config.command_line import CommandOptions
    from rlsys.config.fields import leaves

    found = [*leaves(CommandOptions), *leaves(RunConfig)]
    return ["--" + leaf.name.replace("_", "-") for leaf in found] + ["--help"]
