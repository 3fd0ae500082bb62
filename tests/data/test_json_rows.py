"""JSON files are loaded exactly as they are written, or refused with the line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsys.config import DataConfig
from rlsys.data.row_loading import load_rows
from tests.errors import invalid


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


def compressed(text: str, ending: str) -> bytes:
    data = text.encode()
    match ending:
        case ".gz":
            return gzip.compress(data)
        case ".bz2":
            return bz2.compress(data)
        case ".xz":
            return lzma.compress(data)
        case ".zst":
            found: bytes = pyarrow.compress(data, "zstd", asbytes=True)
            return found
    return data


def unchanged(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as the file's ending says, and assert that exactly these are loaded."""
    text = json.dumps(rows, indent=1) if path.suffixes[0] == ".json" else lines(rows)
    path.write_bytes(compressed(text, path.suffix))
    found = load(path)
    assert found == rows
    assert json.dumps(found) == json.dumps(rows)  # 1 == 1.0 == True


ENDINGS = ("a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.JSONL.ZST")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("010", 7),
        ("010", True),
        ("010", {"x": 1}),
        (["010"], [7]),
        ({"x": [{"y": "true"}]}, {"x": [{"y": True}]}),
        ("2020-01-01", "2020-01-01T00:00:00"),
        ({"x": ["2020-01-01"]}, {"x": ["no date"]}),
        (123456789012345678901234567890, 9007199254740993),
        (9007199254740993, 0.5),
        ({"x": None}, {}),
        ("\u2028 \U0001f600", "\ud800"),
    ],
)
def test_values_keep_their_types_and_digits(tmp_path: Path, first: object, second: object) -> None:
    rows = [{"prompt": "1", "answer": first}, {"prompt": "2", "answer": second}]
    unchanged(tmp_path / "a.jsonl", rows)


@pytest.mark.parametrize("name", ENDINGS)
def test_files_of_each_ending_are_read_as_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / name.lower()
    unchanged(path, [{"answer": "010"}, {"answer": 7}, {"answer": "2020-01-01"}])
    path = path.rename(tmp_path / f"b{name}")
    assert [row["answer"] for row in load(path)] == ["010", 7, "2020-01-01"]


def test_a_value_long_after_the_first_rows_is_read_as_written(tmp_path: Path) -> None:
    rows = [{"answer": "2020-01-01"}] * 1500  # more than one batch
    unchanged(tmp_path / "a.jsonl", [*rows, {"answer": "x"}, {"answer": "007"}])


def test_a_column_of_another_file_is_added(tmp_path: Path) -> None:
    (tmp_path / "a-1.jsonl").write_text(lines([{"answer": 7}]))
    (tmp_path / "a-2.jsonl").write_text(lines([{"answer": "010", "level": 1}]))
    assert load(tmp_path / "a-*.jsonl") == [
        {"answer": 7, "level": None},
        {"answer": "010", "level": 1},
    ]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"a": 1, "a": 2}', "'a'"),
        ('{"a": NaN}', "NaN"),
        ('{"a": 1e999}', "1e999"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2"),
        ("[1]", "line 2"),
        ('{"a": 1', "line 2"),
        ('{"a": %s}' % ("1" * 5000), "line 2"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' + text + "\n")
    assert word in refused(tmp_path / "a.jsonl")


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_a_truncated_compressed_file_is_refused(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(compressed('{"a": 1}\n' * 9, ending)[:-4])
    refused(path)


def test_compressed_data_without_the_ending_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(b'{"a": 1}\n'))
    with invalid("data.source", str(path)) as error:
        load(path)
    assert "a.jsonl.gz" in error.value.fix


def test_columns_are_read_like_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines([{"a": "010"}, {"b": [1]}, {"a": None}]))
    rows = load_rows(DataConfig(source=str(tmp_path / "a.jsonl"), split="train[1:]+train[:1]"))
    assert rows.column_names == ["a", "b"]
    assert list(rows["a"]) == [None, None, "010"]
    assert rows["b"][0] == rows[-3]["b"] == [1]
    assert (len(rows), len(rows["a"])) == (3, 3)


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


SCALARS = st.sampled_from(["010", "true", "null", "x", '"x"', "[1]", 7, True, 2.5, None])
VALUES = st.recursive(
    SCALARS
    | st.text(max_size=3)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(answers=st.lists(VALUES, min_size=1, max_size=3))
def test_all_values_are_read_as_written(tmp_path: Path, answers: list[Any]) -> None:
    unchanged(tmp_path / "a.jsonl", [{"answer": answer} for answer in answers])


@pytest.mark.parametrize("damage", ["empty", "half", "byte", "no checksum"])
def test_a_damaged_table_of_the_cache_is_made_anew(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines([{"prompt": f"{number}"} for number in range(2500)]))
    rows = load(path)
    (table,) = (tmp_path / "cache" / "rlsys").glob("*.arrow")
    whole = table.read_bytes()
    if damage == "no checksum":
        table.with_suffix(".sum").unlink()
    else:
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
        new = tmp_path / "damaged"  # the table is mapped by the rows above
        new.write_bytes({"empty": b"", "half": whole[:middle], "byte": flipped}[damage])
        new.replace(table)
    assert load(path) == rows
    assert table.read_bytes() == whole


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_cache_that_cannot_be_written_is_not_a_fault_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import datasets

    path = tmp_path / name
    datasets.Dataset.from_dict({"prompt": ["1+1="]}).to_parquet(str(path))
    if name != "a.parquet":
        path.write_text('{"prompt": "1+1="}\n' if name == "a.jsonl" else "prompt\n1+1=\n")
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the cache should be")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", blocked)
    with invalid("HF_DATASETS_CACHE", str(blocked)):
        load(path)


@pytest.mark.parametrize("text", ["1e-400", "-0.001e-399", "1e400"])
def test_a_number_that_no_float_holds_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "1", "x": {text}}}\n')
    assert text in refused(path)


def test_zeros_and_rounded_floats_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": [0.0, -0.0, 0e5, 1.10, 5e-324, 3.14159265358979323846]}\n')
    assert load(path) == [{"a": [0.0, -0.0, 0.0, 1.1, 5e-324, 3.141592653589793]}]


def test_slices_of_rows_and_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines([{"a": number} for number in range(4)]))
    rows: Any = load_rows(DataConfig(source=str(path)))
    assert rows[1:3] == [{"a": 1}, {"a": 2}]
    assert rows[::-2] == [{"a": 3}, {"a": 1}]
    assert rows["a"][-2:] == [2, 3]
    both: Any = load_rows(DataConfig(source=f"{path},{path}"))
    assert both[3:5] == [{"a": 3}, {"a": 0}]
