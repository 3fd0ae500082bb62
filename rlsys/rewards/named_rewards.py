"""Reward functions by name, for a command line.

In: a text. Out: the `Reward` that it names:

    numeric_answer, exact_match, math_answer     a built-in one, which reads the column "answer"
    code_tests                                   the unit tests in the column "tests"
    numeric_answer:solution                      the same with another column
    my_package.rewards:correct                   a function of a module that can be imported
    my_rewards.py:correct                        a function of a file
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from rlsys.errors import InvalidValue, require
from rlsys.rewards.answer_match import exact_match, numeric_answer
from rlsys.rewards.code_tests import code_tests
from rlsys.rewards.math_answer import math_answer
from rlsys.rewards.reward import Reward, reward

BUILT_IN: Mapping[str, Callable[[str], Reward]] = {
    "code_tests": code_tests,
    "exact_match": exact_match,
    "math_answer": math_answer,
    "numeric_answer": numeric_answer,
}
ANSWER_COLUMN = "answer"
COLUMNS = {"code_tests": "tests"}  # for rewards with another default column
REWARD_FIX = (
    f"Give one of {', '.join(BUILT_IN)}, or a function as module:function or file.py:function."
)


def named_reward(text: str) -> Reward:
    """Return the reward that a text names.

    Raises:
        InvalidValue: It names no reward function. The fix lists what there is.
    """
    place, _, name = text.partition(":")
    if place in BUILT_IN:
        return BUILT_IN[place](name or COLUMNS.get(place, ANSWER_COLUMN))
    named = named_function(text, "reward", Reward, REWARD_FIX)
    return named if isinstance(named, Reward) else reward(named)


def named_function(text: str, what: str, kind: type[Any], fix: str) -> Any:
    """Return the function that a text names as module:function or file.py:function.

    Args:
        text: The name.
        what: The field of an InvalidValue, such as "reward".
        kind: Type of objects that a message suggests if the function does not exist.
        fix: The fix for a text of another form.

    Raises:
        InvalidValue: The text names no function.
    """
    place, _, name = text.partition(":")
    require(
        bool(place) and bool(name), what, text, rule=f"does not name a {what} function", fix=fix
    )
    find = _from_file if place.endswith(".py") else _from_package
    module = find(place, what, text)
    function = getattr(module, name, None)
    if not callable(function):
        others = [key for key, value in vars(module).items() if isinstance(value, kind)]
        raise InvalidValue(
            what,
            text,
            rule=f"{place} has no function {name!r}"
            f"{'; it has ' + ', '.join(others) if others else ''}",
            fix="Name a function that exists.",
        )
    return function


def _from_package(place: str, field: str, text: str) -> ModuleType:
    if "" not in sys.path:  # python -m adds it; a script adds its own folder instead
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the module itself imports a missing package
        raise InvalidValue(
            field,
            text,
            rule=f"there is no module {error.name!r} (looked in {Path.cwd()} and Python's path)",
            fix="Give a module that can be imported, or file.py:function.",
        ) from error


def _from_file(place: str, field: str, text: str) -> ModuleType:
    """Load a file as a module. It can import its neighbours, as a script can."""
    path = Path(place)
    require(
        path.is_file(),
        field,
        text,
        rule=f"{place} does not exist (looked in {Path.cwd()})",
        fix="Give the path of a Python file.",
    )
    directory = str(path.resolve().parent)
    if directory not in sys.path:  # processes that run the functions get this path too
        sys.path.insert(0, directory)
    _check_neighbours(path, field, text)
    spec = importlib.util.spec_from_file_location(f"rlsys_functions_of_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # no other process could import it
    return module


def _check_neighbours(path: Path, field: str, text: str) -> None:
    """Raise InvalidValue if an import of the file would get another file of the same name.

    This happens if a module of this name was imported from another directory before.
    """
    source = path.read_text(encoding="utf-8", errors="replace")
    for name in sorted(_imported(source, str(path))):
        neighbour, loaded = path.parent / f"{name}.py", sys.modules.get(name)
        origin = getattr(loaded, "__file__", None)
        require(
            not neighbour.is_file() or not origin or Path(origin).resolve() == neighbour.resolve(),
            field,
            text,
            rule=f"{path} imports {name!r}, and {origin} was imported under this name before "
            f"{neighbour}",
            fix="Rename one of them.",
        )


def _imported(source: str, filename: str) -> set[str]:
    """Return the top-level names of the modules that a source imports.

    A source that cannot be parsed gives none.
    """
    try:
        tree = ast.parse(source, filename)
    except (SyntaxError, ValueError):
        return set()
    found = {
        one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names
    }
    found |= {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
    }
    return {name.partition(".")[0] for name in found}
