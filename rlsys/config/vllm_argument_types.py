"""Types of the engine arguments of the installed vLLM, read from its source.

    vllm/engine/arg_utils.py ──► installed_arguments ──► {name: annotation}
    rollout.vllm             ──► check_types         ──► InvalidValue for a value of another type

Importing vllm takes 8 to 60 s, and reading its source 0.1 s. So a run can check its options before
anything starts, on a machine without a GPU too. Annotations are resolved as far as they consist of
Python's own types and of Literals in vllm/config/. A nested configuration, which is a class in
vllm/config/, must be a table with the names of its fields. What vLLM checks in addition (values in
nested configurations, combinations) fails when an engine starts.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from rlsys.config.fields import wrong_type
from rlsys.config.vllm_arguments import FIELD
from rlsys.errors import ErrorCollector, InvalidValue, require

CLASSES = ("EngineArgs", "AsyncEngineArgs")


def check_types(values: Mapping[str, Any]) -> None:
    """Raise the mistakes of rollout.vllm that the installed vLLM shows.

    Does nothing where vLLM is not installed: an engine on another node checks its arguments.

    Raises:
        InvalidValue: An argument is unknown to this version, or a value has another type.
    """
    known = installed_arguments() if values else {}
    if not known:
        return
    mistakes = ErrorCollector()
    for name, value in values.items():
        with mistakes.collect():
            if name not in known:
                raise InvalidValue(
                    f"{FIELD}.{name}",
                    value,
                    rule="not an argument of the installed vLLM",
                    fix="Leave it out, or install the version of vLLM that rlsys names.",
                )
            annotation = _resolved(known[name])
            if not _fits(value, annotation):
                raise wrong_value(name, value, annotation)
            if isinstance(value, dict):
                _check_fields(name, value, known[name])
    mistakes.raise_found()


def _described(annotation: Any) -> str:
    """Return a type in the words of a configuration file."""
    words = {dict: "a table of names and values", list: "a list"}
    return words.get(get_origin(annotation) or annotation) or str(annotation)


def _check_fields(name: str, value: Mapping[str, Any], annotation: str) -> None:
    """Raise InvalidValue if a nested configuration has a field that vLLM's class lacks."""
    for cls in (text.strip() for text in annotation.split("|")):
        if (fields := _class_fields(cls)) is None:
            continue
        for key in value:
            near = difflib.get_close_matches(key, fields, n=1)
            require(
                key in fields,
                f"{FIELD}.{name}",
                value,
                rule=f"{key!r} is not a field of vLLM's {cls}",
                fix=f"Did you mean {near[0]!r}?" if near else "Leave it out.",
            )


def wrong_value(name: str, value: Any, annotation: Any) -> InvalidValue:
    """Return the error for a value that does not have the argument's type."""
    allowed = [repr(one) for one in _literals(annotation)]
    if not allowed:
        try:
            return wrong_type(f"{FIELD}.{name}", value, annotation)
        except TypeError:
            kinds = [one for one in _members(annotation) if one is not NoneType]
            allowed = [_described(one) for one in kinds]
    return InvalidValue(
        f"{FIELD}.{name}", value, rule="not a valid value", fix=f"Give {' or '.join(allowed)}."
    )


@cache
def installed_arguments() -> dict[str, str]:
    """Return the source text of each argument's annotation; empty if vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")  # does not import it
    if spec is None or spec.origin is None:
        return {}
    tree = ast.parse((Path(spec.origin).parent / "engine" / "arg_utils.py").read_text())
    return {
        statement.target.id: ast.unparse(statement.annotation).strip("'")
        for cls in tree.body
        if isinstance(cls, ast.ClassDef) and cls.name in CLASSES
        for statement in cls.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


@cache
def _definitions() -> tuple[ast.stmt, ...]:
    """Return the statements of all files in vllm/config/."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    files = sorted((Path(spec.origin).parent / "config").glob("*.py"))
    return tuple(statement for path in files for statement in ast.parse(path.read_text()).body)


@cache
def _aliases() -> dict[str, ast.expr]:
    """Return the names in vllm/config/ that are defined as a Literal or a union of types."""
    found: dict[str, ast.expr] = {}
    for statement in _definitions():
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() as value):
                found[name] = value
    return found


@cache
def _classes() -> dict[str, ast.ClassDef]:
    """Return the nested configurations of vLLM: the classes in vllm/config/ of that name."""
    return {
        statement.name: statement
        for statement in _definitions()
        if isinstance(statement, ast.ClassDef) and statement.name.endswith("Config")
    }


@cache
def _class_fields(name: str) -> frozenset[str] | None:
    """Return the fields of a nested configuration; None for another name.

    None too for a class with a base that is not in vllm/config/, whose fields are unknown.
    """
    cls = _classes().get(name)
    if cls is None:
        return None
    found = {
        one.target.id
        for one in cls.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    for base in cls.bases:
        inherited = _class_fields(base.id) if isinstance(base, ast.Name) else None
        if inherited is None:
            return None
        found |= inherited
    return frozenset(found)


@cache
def _resolved(text: str) -> Any:
    """Return the type of an annotation; Any for the parts that only vLLM can resolve."""
    return _type(ast.parse(text, mode="eval").body)


def _type(node: ast.expr) -> Any:
    plain = {"int": int, "float": float, "bool": bool, "str": str, "dict": dict, "list": list}
    match node:
        case ast.Constant(value=None):
            return NoneType
        case ast.Constant(value=str(text)):
            return _type(ast.parse(text, mode="eval").body)
        case ast.Name(id=name) if name in plain:
            return plain[name]
        case ast.Name(id=name) if name in _aliases():
            return _type(_aliases()[name])
        case ast.Name(id=name) if name in _classes():
            return dict
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            members = (_type(left), _type(right))
            return Any if Any in members else Union[members]  # noqa: UP007, computed
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            values = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            known = [one.value for one in values if isinstance(one, ast.Constant)]
            return Literal[tuple(known)] if len(known) == len(values) else Any
        case ast.Subscript(value=ast.Name(id="dict" | "list" as name)):
            return plain[name]
    return Any


def _literals(annotation: Any) -> Iterator[Any]:
    for member in _members(annotation):
        if get_origin(member) is Literal:
            yield from get_args(member)


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _fits(value: Any, annotation: Any) -> bool:
    for member in _members(annotation):
        if member is Any:
            return True
        if get_origin(member) is Literal:
            if any(type(value) is type(one) and value == one for one in get_args(member)):
                return True
        elif type(value) is member or (member is float and type(value) is int):
            return True
    return False
