"""The command line of a recipe, derived from its configuration class.

In: a configuration class and arguments such as `--config run.toml --trainer.learning-rate 1e-3`.
Out: a checked configuration, or one line about each mistake and exit code 2.

The command line wins over the file, and the file over the defaults. Names have dashes or
underscores. A list is given at once (`--sampling.stop A,B`) or item by item in repeated options;
items that contain a comma need the file. An option of a table, such as
`--rollout.vllm.max-num-batched-tokens 4096`, has a value in JSON, or else text. The file is TOML,
as --dry-run prints it, or JSON, as in the config.json of a run.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import reprlib
import shutil
import stat
import sys
import textwrap
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Generic, NoReturn, TypeVar, get_args, get_origin

from rlsys.common.broken_pipe import close_stdout
from rlsys.common.option_names import started_from_command_line
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.config.fields import (
    Leaf,
    build,
    choices,
    expected,
    flatten,
    is_table,
    leaves,
    split_optional,
    unknown_name,
    wrong_type,
)
from rlsys.config.foreign_option_names import hint
from rlsys.config.plan_session import keep_dry_run, keep_options, open_for_plan, planned_settings
from rlsys.errors import ErrorCollector, InvalidValue, InvalidValues

C = TypeVar("C")

MAX_WIDTH = 80  # columns of --help

MAX_FILE_BYTES = 2**20  # size of a file for --config

# Lists that an empty text does not leave empty, so that an unset shell variable is a mistake.
NEVER_EMPTY = ("--rollout.urls",)

# Further spellings of true and false, such as --resume yes.
SPELLINGS = {"yes": "true", "no": "false"}


@dataclass(frozen=True, kw_only=True)
class Parsed(Generic[C]):
    """The result of `parse`.

    Attributes:
        config: The checked configuration.
        dry_run: False, True, or the machine to compare the run with, such as "8xH100". `launch`
            knows it too.
    """

    config: C
    dry_run: bool | str


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Options of every recipe."""

    config: str | None = None
    """File with options: TOML, or the config.json of a run. The command line wins over it."""
    dry_run: str | None = None
    """Print the configuration (a file for --config), the graph, the placement, the memory estimate
    and one prompt, then exit without writing anything. A value names the machines to check the
    memory against, such as 8xH100, 2x8xH100 (nodes x GPUs) or 4x24GiB, instead of this one."""
    plan: str | None = None
    """auto: plan the run for the cluster where it starts, and run the best plan (docs/planner.md).
    A resumed run keeps its plan. again: plan a resumed run anew. The command line wins over the
    plan, and the plan over --config."""


def parse(
    cls: type[C],
    argv: Sequence[str] | None = None,
    *,
    doc: str | None = None,
    options: type[Any] = CommandOptions,
) -> Parsed[C]:
    """Read the configuration from the command line.

    Args:
        cls: Class of the configuration, such as a subclass of RunConfig.
        argv: Arguments, by default those of the process.
        doc: First paragraphs of --help, by default the docstring of the module that defines `cls`.
        options: Class with the fields `config` and `dry_run`, for a command whose --dry-run differs
            from that of a recipe.

    Returns:
        The configuration and the value of --dry-run.

    Raises:
        SystemExit: Code 0 after --help; code 2 after one line about each mistake on stderr.
    """
    if argv is None:
        started_from_command_line()
    if not isinstance(cls, type):
        raise TypeError(
            f"rlsys.parse: {reprlib.repr(cls)} is not a class. Give the class of the "
            f"configuration, {type(cls).__name__}."
        )
    arguments = sys.argv[1:] if argv is None else list(argv)
    if "--help" in arguments or "-h" in arguments:
        try:
            doc = doc or inspect.getdoc(sys.modules[cls.__module__]) or ""
            print(help_text(cls, doc=doc, options=options))
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has closed the pipe, as `head` does
            close_stdout()
        raise SystemExit(0)
    try:
        values = _read_arguments([*leaves(options), *leaves(cls)], arguments)
        path, dry_run = values.pop("config", None), _dry_run(values.pop("dry_run", None))
        planned = planned_settings(values.pop("plan", None), values)
        in_file = {} if path is None else _read_file(cls, path)
        keep_options(values, in_file)
        overrides = _merged({**in_file, **planned}, values)
        overrides |= open_for_plan(cls, overrides, values)
        parsed = Parsed(config=build(cls, overrides), dry_run=dry_run)
    except ValueError as error:
        for each in error.errors if isinstance(error, InvalidValues) else (error,):
            print(f"{_program()}: error: {' '.join(str(each).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    keep_dry_run(dry_run)
    return parsed


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of both; the second ones win, option by option of a table."""
    merged = {**first, **second}
    for name, value in second.items():
        if isinstance(value, dict) and isinstance(first.get(name), dict):
            merged[name] = {**first[name], **value}
    return merged


def _dry_run(text: str | bool | None) -> bool | str:
    """Return the value of --dry-run: a bool, or the name of a machine.

    Raises:
        InvalidValue: The text is neither.
    """
    if isinstance(text, bool):
        return text
    if text is None or (word := _spelled(text)) in ("false", "none"):
        return False
    if word == "true":
        return True
    from rlsys.config.machine import parse_machines

    try:
        parse_machines(text)
    except InvalidValue as error:
        raise InvalidValue(
            "--dry-run",
            text,
            rule="must be true, false or machines",
            fix=error.fix,
        ) from None
    return text


def _program() -> str:
    return os.path.basename(sys.argv[0])


def _option(leaf: Leaf) -> str:
    return "--" + leaf.name.replace("_", "-")


def _read_arguments(options: Sequence[Leaf], arguments: Sequence[str]) -> dict[str, Any]:
    """Return {dotted name: value} of the options in `arguments`.

    Raises:
        InvalidValue: One or more options are unknown or have no value of their type.
    """
    by_option = {_option(leaf): leaf for leaf in options}
    values: dict[str, Any] = {}
    mistakes = ErrorCollector()
    rest = list(arguments)
    while rest:
        with mistakes.collect():
            _read_option(by_option, values, rest)
    mistakes.raise_found()
    return values


def _read_option(by_option: Mapping[str, Leaf], values: dict[str, Any], rest: list[str]) -> None:
    """Remove the first option and its value from `rest`, and add it to `values`.

    Raises:
        InvalidValue: The option is unknown or has no value of its type. The value is removed too.
    """
    argument = rest.pop(0)
    if not argument.startswith("--"):
        name, equals, _ = argument.lstrip("+").partition("=")
        if equals and (replacement := hint(name, by_option)):  # NAME=VALUE as in Hydra
            raise InvalidValue(name, rule="not an option", fix=replacement)
        raise InvalidValue(argument, rule="not an option", fix="Write options as --num-steps 10.")
    option, equals, text = argument.partition("=")
    option = option.replace("_", "-")
    leaf, key = by_option.get(option), ""
    if leaf is None:
        leaf, key = _option_of_table(option, by_option)
    if leaf is None:
        if not equals and rest and not rest[0].startswith("--"):
            rest.pop(0)  # its value
        _check_not_a_section(option, by_option)
        raise unknown_name(option, by_option, kind="option")
    if not equals:
        is_bare = not rest or rest[0].startswith("--")
        words = choices(leaf.type) or {}
        if is_bare and ("true" in words or leaf.name == "dry_run" or key):
            text = "true"
        elif is_bare:
            raise InvalidValue(option, rule="needs a value", fix=f"Give {expected(leaf.type)}.")
        else:
            text = rest.pop(0)
            if get_origin(leaf.type) is tuple:  # several words, as in --trackers wandb mlflow
                while rest and not rest[0].startswith("--"):
                    text += "," + rest.pop(0)
    value = {key: _json_or_text(text, option)} if key else _read_text(text, leaf.type, option)
    if isinstance(value, dict):
        value = {**values.get(leaf.name, {}), **value}
    elif isinstance(value, tuple):
        value = (*values.get(leaf.name, ()), *value)
    elif leaf.name in values and values[leaf.name] != value:
        _note(f"{option} was given twice: {value} replaces {values[leaf.name]}.")
    values[leaf.name] = value


def _option_of_table(option: str, by_option: Mapping[str, Leaf]) -> tuple[Leaf | None, str]:
    """Return the table that `option` begins with and the name within it, or None."""
    for name, leaf in by_option.items():
        if is_table(leaf.type) and option.startswith(f"{name}."):
            return leaf, option[len(name) + 1 :].replace("-", "_")
    return None, ""


def _json_or_text(text: str, option: str) -> Any:
    """Return the value of a table's option.

    Raises:
        InvalidValue: The text begins as a JSON object, list or string, and is not valid.
    """
    try:
        return parse_json(text)
    except ValueError as error:
        if text.lstrip().startswith(("{", "[", '"')):
            raise InvalidValue(
                option,
                text,
                rule=f"is not valid JSON ({error})",
                fix='Give JSON such as {"name": "value"}, in single quotes of the shell.',
            ) from None
        return text


def _note(text: str) -> None:
    print(f"{_program()}: note: {text}", file=sys.stderr)


def _check_not_a_section(option: str, options: Iterable[str]) -> None:
    """Raise an InvalidValue that lists the options of the section if `option` is a section."""
    members = [other for other in options if other.startswith(f"{option}.")]
    if members:
        fields = ", ".join(other.rpartition(".")[2] for other in members)
        raise InvalidValue(
            option,
            rule="is a section and cannot have a value",
            fix=f"Set its fields, such as {members[0]}: {fields}.",
        )


def _read_text(text: str, annotation: Any, option: str) -> Any:
    """Return the value of an option.

    Raises:
        InvalidValue: The text is not a value of the type.
    """
    inner, optional = split_optional(annotation)
    if optional and text.lower() == "none":
        return None
    try:
        if get_origin(inner) is tuple:
            items = text.split(",") if text or option in NEVER_EMPTY else []
            return tuple(_read_text(item, get_args(inner)[0], option) for item in items)
        if is_table(inner):
            value = parse_json(text)
            if not isinstance(value, dict):
                raise wrong_type(option, text, annotation)
            return value
        if words := choices(inner):
            return words[text if text in words else _spelled(text)]
        if inner == int | str:
            return text
        if inner is not str and not text.isascii():  # Python accepts the digits of all scripts
            raise ValueError(text)
        return inner(text)
    except (KeyError, ValueError):
        raise wrong_type(option, text, annotation) from None


def _spelled(text: str) -> str:
    return SPELLINGS.get(text.lower(), text.lower())


def _read_file(cls: type[Any], path: str) -> dict[str, Any]:
    """Return {dotted name: value} of a file; "none" becomes None, which TOML cannot write.

    Raises:
        InvalidValue: The file cannot be read, or has unknown or invalid options.
    """

    def refuse(rule: str, fix: str = "Give a TOML file or the config.json of a run.") -> NoReturn:
        raise InvalidValue("--config", path, rule=rule, fix=fix)

    try:
        if path.endswith((".yaml", ".yml")):
            refuse("is a YAML file", "Give TOML, as --dry-run prints it, or JSON.")
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            refuse("is not a regular file")
        if found.st_size > MAX_FILE_BYTES:
            refuse(f"has {found.st_size:,} bytes, and a configuration at most {MAX_FILE_BYTES:,}")
        with open(path, encoding="utf-8") as file:  # raises IsADirectoryError for a directory
            text = file.read()
    except OSError as error:
        refuse(f"cannot be read ({error.strerror})")
    except UnicodeDecodeError as error:
        refuse(f"is not UTF-8 text ({error.reason} at byte {error.start})")
    try:
        tables = {leaf.name for leaf in leaves(cls) if is_table(leaf.type)}
        flat = flatten(cls, _with_underscores(_tables(text), tables))
    except InvalidValue as error:
        raise error.within(f"--config {path!r}: ") from error
    optional = {leaf.name for leaf in leaves(cls) if split_optional(leaf.type)[1]}
    return {n: None if n in optional and value == "none" else value for n, value in flat.items()}


def _tables(text: str) -> Mapping[str, Any]:
    """Return the tables of TOML, or of JSON with the fields at the top or below "config".

    Raises:
        InvalidValue: The text is neither TOML nor a JSON object.
    """
    if not text.lstrip().startswith("{"):
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InvalidValue(
                "TOML",
                rule=str(error),
                fix="Write fields as num_steps = 10 and sections as [trainer], as --dry-run "
                "prints them.",
            ) from error
    try:
        found: dict[str, Any] = parse_json(text)
    except ValueError as error:
        raise InvalidValue(
            "JSON", rule=str(error), fix="Restore the file, or give one that --dry-run printed."
        ) from error
    inner = found.get("config")
    return inner if isinstance(inner, dict) else found


def _with_underscores(
    table: Mapping[str, Any], tables: Collection[str], name: str = ""
) -> dict[str, Any]:
    """Return a table with underscores in the names of options; values of `tables` are kept."""
    changed = {}
    for key, value in table.items():
        key = key.replace("-", "_")
        if isinstance(value, dict) and name not in tables:
            value = _with_underscores(value, tables, f"{name}.{key}" if name else key)
        changed[key] = value
    return changed


def help_text(cls: type[Any], *, doc: str = "", options: type[Any] = CommandOptions) -> str:
    """Return the text of --help: each option with its type, docstring and default.

    The order is: --config and --dry-run; the options of the run; those of the recipe; the sections.
    """
    width = min(shutil.get_terminal_size((MAX_WIDTH, 24)).columns, MAX_WIDTH)
    usage = (
        f"usage: {_program()} [OPTION VALUE ...]\n\n"
        "Write --num-steps 10 or --num-steps=10, with dashes or underscores."
    )
    sections: dict[tuple[type[Any], str], list[Leaf]] = {}
    for leaf in [*leaves(options), *leaves(cls)]:
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
    """Return a paragraph in lines of `width`; an indented one, such as commands, is unchanged."""
    if any(line.startswith(" ") for line in paragraph.splitlines()):
        return paragraph
    return textwrap.fill(paragraph, width, break_on_hyphens=False)


def _introducer(leaf: Leaf) -> type[Any]:
    """Return the base class that introduces the field; its subclasses only change the default."""
    key = leaf.name.rpartition(".")[2]
    bases: list[type[Any]] = list(reversed(leaf.owner.__mro__))
    return next(base for base in bases if key in inspect.get_annotations(base))


def field_docs(cls: type[Any]) -> dict[str, str]:
    """Return the docstring of each field of the class and its bases, on one line."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs |= _own_field_docs(base)
    return docs


@functools.cache  # finding a class in its file takes milliseconds, and --help asks for each field
def _own_field_docs(cls: type[Any]) -> dict[str, str]:
    """Return the docstring of each field that the class itself defines, on one line."""
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):  # defined at a prompt, or built in: no source
        return {}
    docs: dict[str, str] = {}
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
    if leaf.name == "dry_run" and leaf.type is not bool:
        return "[MACHINE]"
    annotation = leaf.type
    inner, optional = split_optional(annotation)
    if words := choices(inner):
        text = "|".join(words)
        if "true" in words:
            text = f"[{text}]"
    elif is_table(inner):
        text = "JSON"
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
        case dict():
            return dump_json(leaf.default) if leaf.default else "empty"
        case tuple():
            return ",".join(str(item) for item in leaf.default)
        case None | bool():
            return str(leaf.default).lower()
        case _:
            return str(leaf.default)
