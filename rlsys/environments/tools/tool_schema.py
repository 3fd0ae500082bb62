"""From a typed signature to a JSON schema, and from a model's arguments to the function's.

In: a function. Out: its `Signature`: name, description and parameters in the shape that OpenAI's
API and all chat templates know, and `arguments`, which checks and converts what a model gives.
Types, schemas and conversion are pydantic's.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NotRequired, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_jsonable_python
from typing_extensions import TypedDict

from rlsys.common.user_functions import name_of
from rlsys.environments.tools.docstring import described

# OpenAI's rule, which templates and other models share.
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

# Of all that a model gave wrong, this much is told to it.
MAX_TOLD = 5
MAX_VALUE_CHARS = 80

# Called with what only a running program knows, which type checkers take for a mistake.
MAKE_TYPED_DICT: Any = TypedDict

TOLD = {"missing": "it is missing", "extra_forbidden": "there is no such parameter"}


class WrongArguments(ValueError):
    """What a model gave does not fit the schema; the message is made for the model."""


class Signature:
    """What a model may give to one function. `taken`: its parameters with their types, where these
    are known; else the names of types in its annotations are looked up.

    Raises ValueError for a function whose arguments cannot all be given by name as JSON.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        *,
        taken: Sequence[inspect.Parameter] | None = None,
    ) -> None:
        self.name = name or name_of(function)
        if not NAME.fullmatch(self.name):
            raise ValueError(
                f"a tool named {self.name!r} is none that a model can call: a name has 1 to 64 "
                'letters, digits, "_" or "-". Give it one with @rlsys.tool(name="...").'
            )
        self.description, told = described(_docstring(function))
        self.taken = _parameters(self.name, function) if taken is None else list(taken)
        fields = {one.name: _field(self.name, one, told.get(one.name, "")) for one in self.taken}
        arguments = MAKE_TYPED_DICT(self.name, fields)
        arguments.__pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
        try:
            self._adapter = TypeAdapter(arguments)
            self.parameters = _simplified(self._adapter.json_schema())
        except (PydanticUserError, _ContainsItself) as error:
            raise ValueError(
                f"tool {self.name}{inspect.signature(function)} has a type that JSON cannot "
                f"hold: {str(error).splitlines()[0]} Use str, int, float, bool, Literal, Enum, "
                "list, dict[str, ...], a TypedDict (of typing_extensions) or a dataclass, and "
                "unions of these."
            ) from error
        self.parameters.setdefault("properties", {})

    @property
    def schema(self) -> dict[str, Any]:
        """`{"type": "function", "function": {name, description, parameters}}`."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        }

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The function's keyword arguments. Those that the model left out are left out here, so
        that the function's own defaults hold. Raises WrongArguments.
        """
        try:
            found: dict[str, Any] = self._adapter.validate_python(dict(given))
        except ValidationError as error:
            raise WrongArguments(self._told(error)) from None
        return found

    def _told(self, error: ValidationError) -> str:
        wrong = []
        for one in error.errors(include_url=False)[:MAX_TOLD]:
            where = ".".join(map(str, one["loc"]))
            value = "" if one["type"] in TOLD else f", not {_short(one['input'])}"
            wrong.append(f"{where}: {TOLD.get(one['type'], one['msg'])}{value}")
        if error.error_count() > MAX_TOLD:
            wrong.append(f"and {error.error_count() - MAX_TOLD} more")
        names = ", ".join(self.parameters["properties"]) or "none"
        return f"{'; '.join(wrong)}. The parameters of {self.name} are: {names}."


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


def _docstring(function: Any) -> str | None:
    while isinstance(function, functools.partial):
        function = function.func
    text = getattr(function, "__doc__", None)
    return text if isinstance(text, str) else None


def _parameters(name: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    except NameError as error:
        raise ValueError(
            f"tool {name} has an annotation that cannot be resolved: {error}. Define the type "
            "beside the function's module, not within another function."
        ) from error
    for one in parameters:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
            raise ValueError(
                f"tool {name} takes {one}, but a model gives each argument by its name; spell "
                "the parameters out."
            )
        if one.annotation is one.empty:
            raise ValueError(
                f"parameter {one.name!r} of tool {name} has no type, but the schema that the model "
                f"is shown is made of the types; write {one.name}: int, or what it is."
            )
    return parameters


def _field(tool: str, parameter: inspect.Parameter, told: str) -> Any:
    """The field of the TypedDict that stands for one parameter."""
    kind = parameter.annotation
    extra: dict[str, Any] = {"description": _annotated_text(kind) or told or None}
    if parameter.default is parameter.empty:
        return Annotated[kind, Field(**extra)]
    if parameter.default is not None:
        try:
            extra["json_schema_extra"] = {"default": to_jsonable_python(parameter.default)}
        except PydanticSerializationError as error:
            raise ValueError(
                f"the default {parameter.default!r} of {parameter.name!r} of tool {tool} is not "
                "JSON, but the model is shown it; use None, and make it within the function."
            ) from error
    return NotRequired[Annotated[kind, Field(**extra)]]


def _annotated_text(kind: Any) -> str:
    """The description of Annotated[int, "how many"] or Annotated[int, Field(description=...)]."""
    if get_origin(kind) is Annotated:
        for one in get_args(kind)[1:]:
            if isinstance(one, str):
                return one
            if isinstance(one, FieldInfo) and one.description:
                return one.description
    return ""


def _simplified(schema: dict[str, Any]) -> dict[str, Any]:
    """Without titles and references, and "nullable" for a union with None: what chat templates were
    written for is what transformers makes, which has neither.
    """
    definitions = schema.pop("$defs", {})
    return _simple(schema, definitions, ())


class _ContainsItself(Exception):
    """A type that cannot be written out without references."""


def _simple(
    schema: dict[str, Any], definitions: Mapping[str, Any], within: tuple[str, ...]
) -> dict[str, Any]:
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        if name in within:
            raise _ContainsItself(f"{name} contains itself.")
        within = (*within, name)
        schema = {**definitions[name], **schema}
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("title", "$ref") or (key == "additionalProperties" and value is False):
            continue
        if key in ("properties", "patternProperties"):
            found[key] = {name: _simple(one, definitions, within) for name, one in value.items()}
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            found[key] = [_simple(one, definitions, within) for one in value]
        elif key in ("items", "additionalProperties", "contains") and isinstance(value, dict):
            found[key] = _simple(value, definitions, within)
        else:
            found[key] = value
    return _without_null(found)


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    either = schema.get("anyOf", [])
    others = [one for one in either if one != {"type": "null"}]
    if len(others) == len(either):
        return schema
    kept = {key: value for key, value in schema.items() if key != "anyOf"}
    if len(others) == 1:
        return {**others[0], "nullable": True, **kept}
    return {"anyOf": others, "nullable": True, **kept}
