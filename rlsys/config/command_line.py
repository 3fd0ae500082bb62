"""The command line of a recipe, derived from its configuration class.

In: a configuration class and arguments such as `--config run.toml --trainer.learning-rate 1e-3`.
Out: a checked configuration; or one line that says what is wrong, and exit code 2.

The command line wins over the file, the file over the defaults. Names may be written with dashes or
underscores. A list is given in one piece (`--sampling.stop A,B`) or option by option; items that
contain a comma need the file. The file is TOML, such as --dry-run prints, or JSON, such as the
config.json of a run.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import reprlib
import shutil
import stat
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Generic, TypeVar, get_args, get_origin

from rlsys.common.broken_pipe import close_stdout
from rlsys.common.option_names import started_from_command_line
from rlsys.common.safe_json import parse_json
from rlsys.config.fields import (
    Leaf,
    build,
    choices,
    expected,
    flatten,
    leaves,
    split_optional,
    unknown_name,
)
from rlsys.config.foreign_option_names import hint

C = TypeVar("C")

MAX_WIDTH = 80  # columns of --help

MAX_FILE_BYTES = 2**20  # of a file for --config

# Beside true and false, and for resume: --resume yes.
SPELLINGS = {"yes": "true", "no": "false"}


@dataclass(frozen=True, kw_only=True)
class Parsed(Generic[C]):
    config: C
    dry_run: bool | str  # a text names the machine to compare the run with


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Every recipe."""

    config: str | None = None
    """File with fields: TOML, or a run's config.json. The command line wins over it."""
    dry_run: str | None = None
    """Read the model's shape and the data, print the configuration (a file for --config), the
    graph, the placement, the memory, whether it fits, and one prompt, and exit. Nothing is written.
    With a value: compare with that machine, such as 8xH100 or 4x24GiB, instead of this one."""


def parse(cls: type[C], argv: Sequence[str] | None = None, *, doc: str | None = None) -> Parsed[C]:
    """Read the configuration from `argv`, by default the process's own arguments.

    `doc` stands on top of --help, by default the docstring of the module that defines `cls`. Ends
    the process with code 0 after --help, and with code 2 after one line on stderr for a mistake.
    """
    if argv is None:
        started_from_command_line()
    if not isinstance(cls, type):
        raise TypeError(
            f"rlsys.parse is given {reprlib.repr(cls)}; give the class of the configuration, "
            f"{type(cls).__name__}, whose fields the arguments set."
        )
    arguments = sys.argv[1:] if argv is None else list(argv)
    if "--help" in arguments or "-h" in arguments:
        try:
            print(help_text(cls, doc=doc or inspect.getdoc(sys.modules[cls.__module__]) or ""))
            sys.stdout.flush()
        except BrokenPipeError:  # it was read as far as somebody wanted, such as by `head`
            close_stdout()
        raise SystemExit(0)
    try:
        given = _read_arguments([*leaves(CommandOptions), *leaves(cls)], arguments)
        path, dry_run = given.pop("config", None), _dry_run(given.pop("dry_run", None))
        overrides = {**({} if path is None else _read_file(cls, path)), **given}
        return Parsed(config=build(cls, overrides), dry_run=dry_run)
    except ValueError as error:
        print(f"{_program()}: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


def _dry_run(text: str | None) -> bool | str:
    """Return whether it is a dry run, or the machine that one names. Raises ValueError for a text
    that names none.
    """
    if text is None or (word := _spelled(text)) in ("false", "none"):
        return False
    if word == "true":
        return True
    from rlsys.config.machine import parse_machine

    try:
        parse_machine(text)
    except ValueError as error:
        raise ValueError(
            f"--dry-run {text!r} does not fit; give true or false, or a machine: {error}"
        ) from None
    return text


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
            name, equals, _ = argument.lstrip("+").partition("=")
            if equals and (named := hint(name, by_option)):  # as Hydra's command lines have them
                raise ValueError(f"{name} is no option; {named}")
            raise ValueError(f"{argument!r} is no option; write options as --num-steps 10.")
        option, equals, text = argument.partition("=")
        option = option.replace("_", "-")
        leaf = by_option.get(option)
        if leaf is None:
            _check_no_section(option, by_option)
            raise unknown_name(option, by_option, kind="option")
        if not equals:
            is_bare = not rest or rest[0].startswith("--")
            words = choices(leaf.type) or {}
            if is_bare and ("true" in words or leaf.name == "dry_run"):
                text = "true"
            elif is_bare:
                raise ValueError(f"{option} has no value; give {expected(leaf.type)}.")
            else:
                text = rest.pop(0)
        value = _read_text(text, leaf.type, option)
        if isinstance(value, tuple):
            value = (*values.get(leaf.name, ()), *value)
        elif leaf.name in values and values[leaf.name] != value:
            _note(f"{option} stands twice, with {values[leaf.name]} and {value}; the last counts.")
        values[leaf.name] = value
    return values


def _note(text: str) -> None:
    print(f"{_program()}: note: {text}", file=sys.stderr)


def _check_no_section(option: str, options: Iterable[str]) -> None:
    """Raise ValueError for a section's name, with its options."""
    members = [other for other in options if other.startswith(f"{option}.")]
    if members:
        raise ValueError(
            f"{option} is a section and has no value of its own; set its fields, such as "
            f"{members[0]}: {', '.join(other.rpartition('.')[2] for other in members)}."
        )


def _read_text(text: str, annotation: Any, option: str) -> Any:
    """A value from the command line. Raises ValueError with option, text and what is expected."""
    inner, optional = split_optional(annotation)
    if optional and text.lower() == "none":
        return None
    try:
        if get_origin(inner) is tuple:
            items = text.split(",") if text else []
            return tuple(_read_text(item, get_args(inner)[0], option) for item in items)
        if words := choices(inner):
            return words[text if text in words else _spelled(text)]
        if inner == int | str:
            return text
        if inner is not str and not text.isascii():  # Python reads digits of every script
            raise ValueError(text)
        return inner(text)
    except (KeyError, ValueError):
        raise ValueError(f"{option} {text!r} does not fit; give {expected(annotation)}.") from None


def _spelled(text: str) -> str:
    return SPELLINGS.get(text.lower(), text.lower())


def _read_file(cls: type[Any], path: str) -> dict[str, Any]:
    """{dotted name: value}; "none" stands for None, which TOML cannot write."""
    try:
        if path.endswith((".yaml", ".yml")):
            raise ValueError("it is YAML; give TOML, such as --dry-run prints, or JSON.")
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise ValueError("it is no ordinary file, and may never end; give one.")
        if found.st_size > MAX_FILE_BYTES:
            raise ValueError(
                f"it has {found.st_size:,} bytes, and a configuration at most {MAX_FILE_BYTES:,}; "
                "give a file that --dry-run has printed, or a run's config.json."
            )
        with open(path, encoding="utf-8") as file:  # a directory is refused here
            flat = flatten(cls, _with_underscores(_tables(file.read())))
    except OSError as error:
        raise ValueError(
            f"--config {path!r}: {error.strerror}; give a TOML file, or a run's config.json."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--config {path!r} is no UTF-8 text ({error.reason} at byte {error.start}); give a "
            "TOML file, or a run's config.json."
        ) from error
    except ValueError as error:
        raise ValueError(f"--config {path!r}: {error}") from error
    optional = {leaf.name for leaf in leaves(cls) if split_optional(leaf.type)[1]}
    return {n: None if n in optional and value == "none" else value for n, value in flat.items()}


def _tables(text: str) -> Mapping[str, Any]:
    """TOML, or JSON with the fields as they are or below the "config" of a run's config.json.
    Raises ValueError for what is neither.
    """
    if not text.lstrip().startswith("{"):
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(
                f"it is no TOML ({error}); write fields as num_steps = 10 and sections as "
                "[trainer], or give a file that --dry-run has printed."
            ) from error
    try:
        found: dict[str, Any] = parse_json(text)
    except ValueError as error:
        raise ValueError(
            f"it is no JSON ({error}); restore the file, or give one that --dry-run has printed."
        ) from error
    inner = found.get("config")
    return inner if isinstance(inner, dict) else found


def _with_underscores(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key.replace("-", "_"): _with_underscores(value) if isinstance(value, dict) else value
        for key, value in table.items()
    }


def help_text(cls: type[Any], *, doc: str = "") -> str:
    """Every option with its type, docstring and default.

    In the order in which they are looked for: the file and the dry run; the run itself (name,
    steps, resume); what the recipe adds; then section after section, from the model outwards.
    """
    width = min(shutil.get_terminal_size((MAX_WIDTH, 24)).columns, MAX_WIDTH)
    usage = (
        f"usage: {_program()} [OPTION VALUE ...]\n\n"
        "Write --num-steps 10 or --num-steps=10, with dashes or underscores."
    )
    sections: dict[tuple[type[Any], str], list[Leaf]] = {}
    for leaf in [*leaves(CommandOptions), *leaves(cls)]:
        sections.setdefault((_introducer(leaf), leaf.name.rpartition(".")[0]), []).append(leaf)
    blocks = [*(_filled(text, width) for text in doc.rstrip().split("\n\n") if text), usage]
    for (owner, section), members in sorted(sections.items(), key=lambda item: item[0][1] != ""):
        title, *_ = (inspect.getdoc(owner) or owner.__name__).splitlines()
        blocks.append(f"{section}: {title}" if section else title)
        for leaf in members:
            docs = field_docs(leaf.owner)
            description = f"{docs.get(leaf.name.rpartition('.')[2], '')} [{_default(leaf)}]"
            blocks[-1] += f"\n  {_option(leaf)} {_metavar(leaf)}\n" + textwrap.indent(
                textwrap.fill(description, width - 8, break_on_hyphens=False), " " * 8
            )
    return "\n\n".join(blocks)


def _filled(paragraph: str, width: int) -> str:
    """Prose in lines of `width`; what is indented, such as commands, as it stands."""
    if any(line.startswith(" ") for line in paragraph.splitlines()):
        return paragraph
    return textwrap.fill(paragraph, width, break_on_hyphens=False)


def _introducer(leaf: Leaf) -> type[Any]:
    """The class that has the field first, of the owner's bases; others only set it anew."""
    key = leaf.name.rpartition(".")[2]
    bases: list[type[Any]] = list(reversed(leaf.owner.__mro__))
    return next(base for base in bases if key in inspect.get_annotations(base))


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


def _metavar(leaf: Leaf) -> str:
    if leaf.name == "dry_run":
        return "[MACHINE]"
    annotation = leaf.type
    inner, optional = split_optional(annotation)
    if words := choices(inner):
        text = "|".join(words)
        if "true" in words:
            text = f"[{text}]"
    elif get_origin(inner) is tuple:
        text = "A,B,..."
    else:
        text = {int: "INT", float: "FLOAT", str: "TEXT", int | str: "INT|TEXT"}[inner]
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
