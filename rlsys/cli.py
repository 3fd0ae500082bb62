"""The command line of a recipe, derived from its configuration class.

In: a configuration class and arguments such as `--config run.toml --trainer.learning-rate 1e-3`.
Out: a checked configuration; or one line that says what is wrong, and exit code 2.

The command line wins over the file, the file over the defaults. Names may be written with dashes or
underscores. A list is given in one piece (`--sampling.stop A,B`) or option by option; items that
contain a comma need the file.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from rlsys.fields import (
    Leaf,
    build,
    expected,
    flatten,
    leaves,
    split_optional,
    unknown_name,
)

C = TypeVar("C")

MAX_WIDTH = 100  # columns of --help


@dataclass(frozen=True, kw_only=True)
class Parsed(Generic[C]):
    config: C
    dry_run: bool


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Options of every recipe that are no part of its configuration."""

    config: str | None = None
    """TOML file with fields; the command line wins over it."""
    dry_run: bool = False
    """Print the resolved configuration, the graph, the placement and the memory, and exit."""


def parse(cls: type[C], argv: Sequence[str] | None = None, *, doc: str | None = None) -> Parsed[C]:
    """Read the configuration from `argv`, by default the process's own arguments.

    `doc` stands on top of --help, by default the docstring of the module that defines `cls`. Ends
    the process with code 0 after --help, and with code 2 after one line on stderr for a mistake.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if "--help" in arguments or "-h" in arguments:
        print(help_text(cls, doc=doc or inspect.getdoc(sys.modules[cls.__module__]) or ""))
        raise SystemExit(0)
    try:
        given = _read_arguments([*leaves(CommandOptions), *leaves(cls)], arguments)
        path, dry_run = given.pop("config", None), given.pop("dry_run", False)
        overrides = {**(_read_toml(cls, path) if path else {}), **given}
        return Parsed(config=build(cls, overrides), dry_run=dry_run)
    except ValueError as error:
        print(f"{_program()}: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


def _program() -> str:
    return os.path.basename(sys.argv[0])


def _option(leaf: Leaf) -> str:
    return "--" + leaf.name.replace("_", "-")


def _read_arguments(options: Sequence[Leaf], arguments: Sequence[str]) -> dict[str, Any]:
    """{dotted name: value} of the options that are given."""
    by_option = {_option(leaf): leaf for leaf in options}
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise ValueError(f"{argument!r} is no option; write options as --num-steps 10.")
        option, equals, text = argument.partition("=")
        option = option.replace("_", "-")
        leaf = by_option.get(option)
        if leaf is None:
            raise unknown_name(option, by_option, kind="option")
        if not equals:
            is_bare = not rest or rest[0].startswith("--")
            if leaf.type is bool and (is_bare or rest[0].lower() not in ("true", "false")):
                text = "true"
            elif is_bare:
                raise ValueError(f"{option} has no value; give {expected(leaf.type)}.")
            else:
                text = rest.pop(0)
        value = _read_text(text, leaf.type, option)
        if isinstance(value, tuple):
            value = (*values.get(leaf.name, ()), *value)
        values[leaf.name] = value
    return values


def _read_text(text: str, annotation: Any, option: str) -> Any:
    """A value from the command line. Raises ValueError with option, text and what is expected."""
    inner, optional = split_optional(annotation)
    if optional and text.lower() == "none":
        return None
    try:
        if get_origin(inner) is tuple:
            items = text.split(",") if text else []
            return tuple(_read_text(item, get_args(inner)[0], option) for item in items)
        if get_origin(inner) is Literal:
            return {str(choice): choice for choice in get_args(inner)}[text]
        if inner is bool:
            return {"true": True, "false": False}[text.lower()]
        return inner(text)
    except (KeyError, ValueError):
        raise ValueError(f"{option} {text!r} does not fit; give {expected(annotation)}.") from None


def _read_toml(cls: type[Any], path: str) -> dict[str, Any]:
    """{dotted name: value}; "none" stands for None, which TOML cannot write."""
    try:
        with open(path, "rb") as file:
            flat = flatten(cls, _with_underscores(tomllib.load(file)))
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}; give a TOML file.") from error
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from error
    optional = {leaf.name for leaf in leaves(cls) if split_optional(leaf.type)[1]}
    return {n: None if n in optional and value == "none" else value for n, value in flat.items()}


def _with_underscores(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key.replace("-", "_"): _with_underscores(value) if isinstance(value, dict) else value
        for key, value in table.items()
    }


def help_text(cls: type[Any], *, doc: str = "") -> str:
    """Every option with its type, docstring and default; the recipe's own fields come first."""
    width = min(shutil.get_terminal_size((MAX_WIDTH, 24)).columns, MAX_WIDTH)
    usage = f"usage: {_program()} [--help] [OPTION VALUE ...]"
    sections: dict[tuple[type[Any], str], list[Leaf]] = {}
    for leaf in [*leaves(CommandOptions), *leaves(cls)]:
        sections.setdefault((leaf.owner, leaf.name.rpartition(".")[0]), []).append(leaf)
    blocks = [doc.rstrip(), usage] if doc else [usage]
    for (owner, section), members in sorted(
        sections.items(), key=lambda item: item[0][0] is not cls
    ):
        title, *_ = (inspect.getdoc(owner) or owner.__name__).splitlines()
        docs = field_docs(owner)
        blocks.append(f"{section}: {title}" if section else title)
        for leaf in members:
            description = f"{docs.get(leaf.name.rpartition('.')[2], '')} [{_default(leaf)}]"
            blocks[-1] += f"\n  {_option(leaf)} {_metavar(leaf.type)}\n" + textwrap.indent(
                textwrap.fill(description, width - 8, break_on_hyphens=False), " " * 8
            )
    return "\n\n".join(blocks)


def field_docs(cls: type[Any]) -> dict[str, str]:
    """The string literal after each field of the class and of its bases, on one line."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # typed at a prompt, or built in: there is no source
            continue
        (definition,) = ast.parse(textwrap.dedent(source)).body
        assert isinstance(definition, ast.ClassDef)
        for statement, successor in itertools.pairwise(definition.body):
            match statement, successor:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = " ".join(text.split())
    return docs


def _metavar(annotation: Any) -> str:
    inner, optional = split_optional(annotation)
    if get_origin(inner) is Literal:
        text = "|".join(str(choice) for choice in get_args(inner))
    elif get_origin(inner) is tuple:
        text = "A,B,..."
    else:
        text = {bool: "[true|false]", int: "INT", float: "FLOAT", str: "TEXT"}[inner]
    return f"{text}|none" if optional else text


def _default(leaf: Leaf) -> str:
    if leaf.default is MISSING:
        return "required"
    match leaf.default:
        case "" | ():
            return "empty"
        case tuple():
            return ",".join(str(item) for item in leaf.default)
        case None | bool():
            return str(leaf.default).lower()
        case _:
            return str(leaf.default)
