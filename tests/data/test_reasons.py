"""Errors and their causes on one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.data.hub import MAX_REASON, in_short


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_all_lines_of_a_message_are_kept() -> None:
    error = ValueError("Validation error for field 'x':\n    TypeError: expected int, got str\n")
    assert in_short(error) == "Validation error for field 'x': TypeError: expected int, got str"


def test_a_long_message_keeps_its_end() -> None:
    text = in_short(RuntimeError("it failed: " + "x " * 5000 + "because of the disk"))
    assert text.startswith("it failed: x x")
    assert text.endswith("because of the disk")
    assert len(text) <= MAX_REASON + 10


def test_the_first_error_of_a_chain_is_named_once() -> None:
    broken = json.JSONDecodeError("Expecting value", '{"a":', 5)
    found = in_short(chained(OSError("config.json is no JSON file."), broken))
    assert found.startswith("config.json is no JSON file; caused by JSONDecodeError: Expecting")
    assert "line 1 column 6" in found
    quoting = chained(ValueError("it broke: Expecting value: line 1 column 6 (char 5)"), broken)
    assert "caused by" not in in_short(quoting)


def test_names_get_their_type_and_are_no_cause() -> None:
    assert in_short(KeyError("added_tokens")) == "KeyError: 'added_tokens'"
    assert in_short(KeyError()) == "KeyError"
    assert in_short(chained(ValueError("unknown model type"), KeyError("zzz"))) == (
        "unknown model type"
    )


def test_errors_in_a_circle_end() -> None:
    first, second = ValueError("the first one"), ValueError("the second one")
    first.__context__, second.__context__ = second, first
    assert in_short(first).startswith("the first one")


def test_a_damaged_configuration_is_named_with_its_place(tmp_path: Path) -> None:
    import transformers

    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(OSError) as refused:  # noqa: PT011
        transformers.AutoConfig.from_pretrained(str(tmp_path))
    assert "column" in in_short(refused.value)
