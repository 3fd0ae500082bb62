"""JSON schemas of typed functions, and conversion of a model's arguments.

In: a function. Out: its `Signature`: name, description and parameters in OpenAI's format, which all
chat templates use, and `arguments`, which validates and converts a model's arguments with pydantic.
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
from rlsys.errors import InvalidValue, require

# OpenAI's rule for names of functions.
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

# Limits of the message to a model about its arguments.
MAX_MISTAKES = 5
MAX_VALUE_CHARS = 80

# Type checkers reject a TypedDict whose fields are only known at run time.
MAKE_TYPED_DICT: Any = TypedDict

REASONS = {"missing": "it is missing", "extra_forbidden": "there is no such parameter"}


class WrongArguments(ValueError):
    """Arguments of a model that do not match the schema. The message is for the model."""


class Signature:
    """Parameters of a function that a model can call.

    Args:
        taken: The parameters with resolved types. By default the annotations are resolved.

    Raises:
        InvalidValue: A parameter has no type, or cannot be passed by name as JSON.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        *,
        taken: Sequence[inspect.Parameter] | None = None,
    ) -> None:
        self.name = name or name_of(function)
        require(
            NAME.fullmatch(self.name) is not None,
            "tool: name",
            self.name,
            rule='must have 1 to 64 letters, digits, "_" or "-"',
            fix='Set one with @rlsys.tool(name="...").',
        )
        self.description, texts = described(_docstring(function))
        self.taken = _parameters(self.name, function) if taken is None else list(taken)
        fields = {one.name: _field(self.name, one, texts.get(one.name, "")) for one in self.taken}
        arguments = MAKE_TYPED_DICT(self.name, fields)
        arguments.__pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
        try:
            self._adapter = TypeAdapter(arguments)
            self.parameters = _simplified(self._adapter.json_schema())
        except (PydanticUserError, _ContainsItself) as error:
            raise InvalidValue(
                f"tool {self.name}{inspect.signature(function)}",
                rule="has a type that JSON cannot represent: "
                f"{str(error).splitlines()[0].removesuffix('.')}",
                fix="Use str, int, float, bool, Literal, Enum, list, dict[str, ...], a TypedDict "
                "(of typing_extensions) or a dataclass, and unions of these.",
            ) from error
        self.parameters.setdefault("properties", {})

    @property
    def schema(self) -> dict[str, Any]:
        """The schema in OpenAI's format."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        }

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments for the function.

        Missing arguments stay missing, so that the function's defaults apply. Raises
        WrongArguments.
        """
        try:
            found: dict[str, Any] = self._adapter.validate_python(dict(given))
        except ValidationError as error:
            raise WrongArguments(self._message(error)) from None
        return found

    def _message(self, error: ValidationError) -> str:
        mistakes = []
        for one in error.errors(include_url=False)[:MAX_MISTAKES]:
            where = ".".join(map(str, one["loc"]))
            value = "" if one["type"] in REASONS else f", not {_short(one['input'])}"
            mistakes.append(f"{where}: {REASONS.get(one['type'], one['msg'])}{value}")
        if error.error_count() > MAX_MISTAKES:
            mistakes.append(f"and {error.error_count() - MAX_MISTAKES} more")
        names = ", ".join(self.parameters["properties"]) or "none"
        return f"{'; '.join(mistakes)}. The parameters of {self.name} are: {names}."


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
        raise InvalidValue(
            f"tool {name}",
            rule=f"has an annotation that cannot be resolved: {error}",
            fix="Define the type at the top level of the function's module.",
        ) from error
    for one in parameters:
        require(
            one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY),
            f"tool {name}: {one}",
            rule="models pass each argument by name",
            fix="Use named parameters only.",
        )
        require(
            one.annotation is not one.empty,
            f"tool {name}: {one.name}",
            rule="has no type, which the schema needs",
            fix=f"Write {one.name}: int, for example.",
        )
    return parameters


def _field(tool: str, parameter: inspect.Parameter, text: str) -> Any:
    """Return the field of the TypedDict for one parameter."""
    kind = parameter.annotation
    extra: dict[str, Any] = {"description": _annotated_text(kind) or text or None}
    if parameter.default is parameter.empty:
        return Annotated[kind, Field(**extra)]
    if parameter.default is not None:
        try:
            extra["json_schema_extra"] = {"default": to_jsonable_python(parameter.default)}
        except PydanticSerializationError as error:
            raise InvalidValue(
                f"tool {tool}: {parameter.name}",
                parameter.default,
                rule="JSON cannot represent this default, which the schema contains",
                fix="Use None as default, and create the object inside the function.",
            ) from error
    return NotRequired[Annotated[kind, Field(**extra)]]


def _annotated_text(kind: Any) -> str:
    """Return the description of Annotated[int, "..."] or Annotated[int, Field(description=...)]."""
    if get_origin(kind) is Annotated:
        for one in get_args(kind)[1:]:
            if isinstance(one, str):
                return one
            if isinstance(one, FieldInfo) and one.description:
                return one.description
    return ""


def _simplified(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without titles and references, with "nullable" for a union with None.

    Chat templates are written for the schemas of transformers, which look like this.
    """
    definitions = schema.pop("$defs", {})
    return _simple(schema, definitions, ())


class _ContainsItself(Exception):
    """A recursive type, which needs references."""


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
