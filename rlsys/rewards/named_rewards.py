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
COLUMNS = {"code_tests": "tests"}  # of those that read another one
REWARD_FIX = (
    f"give one of {', '.join(BUILT_IN)}, or a function as module:function or file.py:function."
)


def named_reward(text: str) -> Reward:
    """Raises ValueError for a text that names no reward function, with what there is instead."""
    place, _, name = text.partition(":")
    if place in BUILT_IN:
        return BUILT_IN[place](name or COLUMNS.get(place, ANSWER_COLUMN))
    named = named_function(text, "reward", Reward, REWARD_FIX)
    return named if isinstance(named, Reward) else reward(named)


def named_function(text: str, what: str, kind: type[Any], fix: str) -> Any:
    """A function, or a `kind` of it, as module:function or file.py:function. Raises ValueError for
    a text that names none; messages call it `what`.
    """
    place, _, name = text.partition(":")
    if not place or not name:
        raise ValueError(f"{what} {text!r} names no {what} function; {fix}")
    told = f"{what} {text!r}"
    module = _from_file(place, told) if place.endswith(".py") else _from_package(place, told)
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if isinstance(value, kind)]
        raise ValueError(
            f"{told}: {place} has no function {name!r}"
            f"{'; it has ' + ', '.join(there) if there else ''}. Name one that it has."
        )
    return function


def _from_package(place: str, told: str) -> ModuleType:
    if "" not in sys.path:  # as for python -m; a script puts its own folder there instead
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # a package that is missing inside keeps its trace
        raise ValueError(
            f"{told}: there is no module {error.name!r}, looked for from {Path.cwd()} on; "
            "give one that can be imported there, or file.py:function."
        ) from error


def _from_file(place: str, told: str) -> ModuleType:
    """Load a file as a module. It can import its neighbours, as a script can."""
    path = Path(place)
    if not path.is_file():
        raise ValueError(f"{told}: {place} is no file (looked in {Path.cwd()}).")
    directory = str(path.resolve().parent)
    if directory not in sys.path:  # processes that run the functions take over this path
        sys.path.insert(0, directory)
    _check_neighbours(path, told)
    spec = importlib.util.spec_from_file_location(f"rlsys_functions_of_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # no other process could import it
    return module


def _check_neighbours(path: Path, told: str) -> None:
    """Raise ValueError for a neighbour that the file would not get, because a module of the same
    name was imported from the directory of another file before.
    """
    source = path.read_text(encoding="utf-8", errors="replace")
    for name in sorted(_imported(source, str(path))):
        neighbour, loaded = path.parent / f"{name}.py", sys.modules.get(name)
        origin = getattr(loaded, "__file__", None)
        if neighbour.is_file() and origin and Path(origin).resolve() != neighbour.resolve():
            raise ValueError(
                f"{told}: {path} imports {name!r}, and {origin} of this name was imported before "
                f"{neighbour}. Rename one of them."
            )


def _imported(source: str, filename: str) -> set[str]:
    """Return the first names of the modules that a source imports; none of a source that cannot be
    parsed.
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
