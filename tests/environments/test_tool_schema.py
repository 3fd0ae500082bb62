"""Schemas of typed signatures, and conversion of a model's arguments."""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from transformers.utils import get_json_schema
from typing_extensions import TypedDict

from rlsys.environments.tools.docstring import described
from rlsys.environments.tools.tool_schema import Signature, WrongArguments
from tests.errors import error_about, invalid


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(TypedDict):
    x: int
    y: int


@dataclass
class Box:
    corner: Point
    title: str = "none"


class Node(TypedDict):
    children: list[Node]


def common(
    text: str,
    count: int,
    ratio: float,
    is_new: bool,
    names: list[str],
    counts: dict[str, int],
    mode: Literal["a", "b"],
    maybe: int | None = None,
    size: int = 3,
) -> str:
    """Does much.

    In two paragraphs.

    Args:
        text: What is
            read.
        count: How many.
        ratio: How much.
        is_new: Whether.
        names: Which.
        counts: How many of each.
        mode: How.
        maybe: Perhaps.
        size: How large.

    Returns:
        A text.
    """
    return ""


def test_the_schema_is_the_one_that_transformers_makes() -> None:
    theirs = get_json_schema(common)["function"]
    ours = Signature(common).schema["function"]
    assert ours["name"] == theirs["name"] == "common"
    assert ours["description"] == "Does much.\n\nIn two paragraphs."
    properties = ours["parameters"]["properties"]
    assert properties.pop("size") == {
        "type": "integer",
        "description": "How large.",
        "default": 3,  # which transformers omits
    }
    theirs["parameters"]["properties"].pop("size")
    assert properties == theirs["parameters"]["properties"]
    assert ours["parameters"]["required"] == theirs["parameters"]["required"]


def test_types_that_have_parts_are_written_out() -> None:
    def draw(box: Box, colour: Colour = Colour.RED, at: Point | None = None) -> None:
        """Draws."""

    parameters = Signature(draw).parameters
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
        "required": ["x", "y"],
    }
    assert parameters["properties"] == {
        "box": {
            "type": "object",
            "properties": {"corner": point, "title": {"type": "string", "default": "none"}},
            "required": ["corner"],
        },
        "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
        "at": {**point, "nullable": True},
    }
    json.dumps(parameters)
    given = {"box": {"corner": {"x": "1", "y": 2}}, "colour": "blue"}
    assert Signature(draw).arguments(given) == {
        "box": Box(corner={"x": 1, "y": 2}),
        "colour": Colour.BLUE,
    }


def test_a_parameter_may_be_named_as_anything() -> None:
    def odd(title: str, schema: dict[str, str], copy: bool, model_config: int) -> None: ...

    signature = Signature(odd)
    assert list(signature.parameters["properties"]) == ["title", "schema", "copy", "model_config"]
    assert signature.parameters["properties"]["title"] == {"type": "string"}
    given = {"title": "t", "schema": {"title": "x"}, "copy": True, "model_config": 1}
    assert signature.arguments(given) == given


def test_annotated_describes_a_parameter() -> None:
    def add(a: Annotated[int, "the first"], b: int) -> int:
        """Adds.

        Args:
            a: is overruled
            b (int): the second
        """
        return a + b

    properties = Signature(add).parameters["properties"]
    assert properties["a"]["description"] == "the first"
    assert properties["b"]["description"] == "the second"


def test_a_function_without_parameters_takes_an_empty_object() -> None:
    def now() -> str:
        return ""

    assert Signature(now).parameters == {"type": "object", "properties": {}}
    assert Signature(now).arguments({}) == {}


def test_missing_arguments_get_the_functions_defaults() -> None:
    def f(n: int, m: int = 2) -> int:
        return n * m

    assert Signature(f).arguments({"n": "3"}) == {"n": 3}
    assert Signature(functools.partial(f, m=4)).arguments({"n": 3}) == {"n": 3}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "n: "),
        ({"n": 1, "k": 2}, "k: "),
        ({"n": "one"}, "n: "),
        ({"n": 1.5}, "not 1.5"),
        ({"n": None}, "not None"),
        ({"n": 1, "mode": "c"}, "not 'c'"),
        ({"n": 1, "names": ["x", {}]}, "names.1"),
        ({"n": "9" * 10_000}, "..."),
    ],
)
def test_wrong_arguments_are_reported(given: dict[str, Any], reason: str) -> None:
    def f(n: int, mode: Literal["a", "b"] = "a", names: list[str] | None = None) -> int:
        return n

    with pytest.raises(WrongArguments) as error:
        Signature(f).arguments(given)
    assert reason in str(error.value)
    assert "n, mode, names" in str(error.value)
    assert len(str(error.value)) < 400


def test_a_long_list_of_mistakes_is_cut() -> None:
    def f() -> None: ...

    with error_about(WrongArguments, "995"):
        Signature(f).arguments({f"x{i}": 1 for i in range(1000)})


def untyped(n) -> int:  # type: ignore[no-untyped-def]
    return int(n)


def many(*numbers: int) -> int:
    return sum(numbers)


def named(**numbers: int) -> int:
    return len(numbers)


def by_place(n: int, /) -> int:
    return n


def of_a_lock(lock: object, pool: functools.partial[int]) -> None: ...


def of_a_tree(tree: Node) -> None: ...


def of_a_default(n: Any = object()) -> None: ...  # noqa: B008


def of_nobody(n: Nobody) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "field"),
    [
        (untyped, "tool untyped: n"),
        (many, "tool many: *numbers: int"),
        (named, "tool named: **numbers: int"),
        (by_place, "tool by_place: n: int"),
        (of_a_lock, "tool of_a_lock(lock: 'object', pool: 'functools.partial[int]') -> 'None'"),
        (of_a_tree, "tool of_a_tree(tree: 'Node') -> 'None'"),
        (of_a_default, "tool of_a_default: n"),
        (of_nobody, "tool of_nobody"),
        (lambda: 1, "tool: name"),
    ],
)
def test_invalid_signatures(function: Callable[..., Any], field: str) -> None:
    with invalid(field):
        Signature(function)


def test_a_docstring_without_sections_is_the_description() -> None:
    assert described("One\n    line.\n\n    Two.") == ("One line.\n\nTwo.", {})
    assert described(None) == ("", {})
    assert described("Args:\n    a: b: c\n      d\n    e: f") == ("", {"a": "b: c d", "e": "f"})
    assert described("X.\n\nArgs:\n\nReturns:\n    a: b") == ("X.", {})
