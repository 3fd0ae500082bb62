"""JSON files are loaded as they are written, or refused with the row that is changed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsys.config import DataConfig
from rlsys.data.row_loading import load_rows
from tests.errors import invalid
from tests.tiers import rest_slow


@pytest.fixture(autouse=True)
def _separate_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def load(path: Path) -> list[dict[str, Any]]:
    return list(load_rows(DataConfig(source=str(path))))


def refused(path: Path, file: Path | None = None) -> str:
    """Return the rule of the InvalidValue about a file."""
    with invalid("data.source", str(file or path)) as error:
        load(path)
    return error.value.rule


@pytest.mark.parametrize(
    ("first", "second", "column"),
    [
        ("010", 7, "'answer'"),
        ("010", True, "'answer'"),
        ("010", {"x": 1}, "'answer'"),
        ("010", ["7"], "'answer'"),
        (["010"], [7], "'answer[]'"),
        ({"x": "010"}, {"x": 7}, "'answer.x'"),
        ({"x": [{"y": "true"}]}, {"x": [{"y": True}]}, "'answer.x[].y'"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "indented.json"])
def test_texts_mixed_with_other_types_are_refused(
    tmp_path: Path, name: str, first: object, second: object, column: str
) -> None:
    rows = [{"prompt": "1", "answer": first}, {"prompt": "2", "answer": second}]
    text = json.dumps(rows, indent=1) if name.endswith(".json") else lines(rows)
    if name.startswith("indented"):
        text = "\n".join(json.dumps(row, indent=1) for row in rows)
    data = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    (tmp_path / name).write_bytes(data)
    rule = refused(tmp_path / name)
    for part in (column, "row 0 ", "row 1 "):
        assert part in rule


@pytest.mark.parametrize(
    ("many", "last"), rest_slow([("010", 7), (7, "010"), (7, "x"), (7, True), ("010", [7])])
)
def test_another_type_long_after_the_first_rows_is_refused(
    tmp_path: Path, many: object, last: object
) -> None:
    rows = [{"prompt": "x" * 1000, "answer": many}] * 12_000  # more than the loader reads at once
    (tmp_path / "a.jsonl").write_text(lines([*rows, {"prompt": "x", "answer": last}]))
    message = refused(tmp_path / "a.jsonl")
    for part in ("'answer'", "row 12000 ", "row 0 "):
        assert part in message


def test_another_type_in_the_second_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a-1.jsonl").write_text(lines([{"answer": 7}]))
    (tmp_path / "a-2.jsonl").write_text(lines([{"answer": "8"}, {"answer": "010"}]))
    rule = refused(tmp_path / "a-*.jsonl", tmp_path / "a-2.jsonl")
    assert f"'8' in row 0 (from 0) of {str(tmp_path / 'a-2.jsonl')!r}" in rule


def test_the_files_of_a_directory_are_checked(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    path = tmp_path / "train" / "train.jsonl"
    path.write_text(lines([{"answer": "010"}, {"answer": 7}]))
    rule = refused(path.parent, path)
    for part in ("'answer'", "row 1 "):
        assert part in rule
    path.write_text(lines([{"answer": "010"}, {"answer": "7"}]))
    assert load(path.parent) == [{"answer": "010"}, {"answer": "7"}]


def test_a_list_after_a_blank_line_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("\n" + json.dumps([{"answer": "010"}]))
    assert load(tmp_path / "a.json") == [{"answer": "010"}]


def test_rows_of_several_lines_are_read_as_written(tmp_path: Path) -> None:
    rows = [{"answer": "010"}, {"answer": "x"}, {"answer": "7"}]
    (tmp_path / "a.json").write_text("\n\n".join(json.dumps(row, indent=1) for row in rows) + " \n")
    assert load(tmp_path / "a.json") == rows


@pytest.mark.parametrize(
    "answers",
    [
        ["010", None, ""],
        [1, 2.5],
        [{"x": "010"}, {"y": 7}],
        ["words", [{"type": "text", "text": "010"}]],
        [[{"role": "user", "content": "1"}], []],
    ],
)
def test_other_values_are_read_as_written(tmp_path: Path, answers: list[Any]) -> None:
    rows = [{"prompt": "1", "answer": answer} for answer in answers]
    (tmp_path / "a.jsonl").write_text(lines(rows))
    assert load(tmp_path / "a.jsonl") == rows


SCALARS = st.sampled_from(["010", "true", "null", "x", '"x"', "[1]", 7, True, 2.5])


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(answers=st.lists(SCALARS | st.lists(SCALARS, max_size=2), min_size=1, max_size=3))
def test_values_are_read_as_written_or_refused(tmp_path: Path, answers: list[Any]) -> None:
    path = tmp_path / f"{abs(hash(repr(answers)))}.jsonl"
    path.write_text(lines([{"answer": answer} for answer in answers]))
    try:
        found = [row["answer"] for row in load(path)]
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017
        return
    assert found == answers
