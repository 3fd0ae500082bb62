"""A directory or pattern loads all of its data files, or raises an error."""

from __future__ import annotations

import datetime
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import DataConfig
from rlsys.data.row_loading import load_rows
from rlsys.errors import InvalidValue
from tests.errors import invalid


@pytest.fixture(autouse=True)
def _separate_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def load(path: Path | str, **options: Any) -> list[dict[str, Any]]:
    return list(load_rows(DataConfig(source=str(path), **options)))


def refusal(path: Path | str, **options: Any) -> InvalidValue:
    with pytest.raises(InvalidValue) as refused:
        load(path, **options)
    return refused.value


def write(path: Path, *answers: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"answer": one}) + "\n" for one in answers))
    return path


def write_table(path: Path, *answers: object) -> Path:
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"answer": pyarrow.array(answers)}), path)
    return path


def answers(path: Path | str, **options: Any) -> list[Any]:
    return [row["answer"] for row in load(path, **options)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_file_replaced_with_its_old_time_is_read_again(directory: Path, name: str) -> None:
    path = directory / name
    writer = write_table if name.endswith(".parquet") else write
    writer(path, "1")
    before = path.stat()
    assert answers(path) == answers(directory) == ["1"]
    writer(path, "2")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert answers(path) == answers(directory) == ["2"]


def test_files_of_other_endings_are_ignored_with_a_warning(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(directory / "a.jsonl", "1")
    for name in ("a.jsonl.bak", "b.tmp", "LICENSE.txt", "README.md", ".a.jsonl", "config.json"):
        write(directory / name, "2")
    with caplog.at_level(logging.WARNING):
        assert answers(directory) == ["1"]
    assert "a.jsonl.bak, b.tmp" in caplog.text
    assert "LICENSE" not in caplog.text


def test_a_link_to_no_file_is_refused(directory: Path) -> None:
    write(directory / "a-1.jsonl", "1")
    link = directory / "a-2.jsonl"
    link.symlink_to(directory / "gone.jsonl")
    for source in (directory, directory / "a-*.jsonl", link):
        assert refusal(source).value == str(link)
    write(directory / "gone", "2").rename(directory / "gone.jsonl")
    assert answers(directory / "a-*.jsonl") == ["1", "2"]


def test_links_to_directories_are_followed(directory: Path, tmp_path: Path) -> None:
    write(directory / "a.jsonl", "1")
    write(tmp_path / "other" / "b.jsonl", "2")
    (directory / "more").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "back").symlink_to(directory.parent / "other")
    assert answers(directory) == ["1", "2"]


def test_names_with_and_without_a_split_are_refused(directory: Path) -> None:
    write(directory / "train-math.jsonl", "1")
    write(directory / "code.jsonl", "2")
    error = refusal(directory)
    assert error.value == str(directory)
    assert "train-math.jsonl" in error.rule
    assert "code.jsonl" in error.rule
    assert answers(directory / "*.jsonl") == ["2", "1"]
    (directory / "code.jsonl").rename(directory / "Training.JSONL")
    assert answers(directory) == ["2", "1"]
    write(directory / "train-eval.jsonl")
    assert "test, train" in refusal(directory).rule


def test_a_file_with_the_split_of_another_directory_is_refused(directory: Path) -> None:
    write(directory / "training" / "train.jsonl", 1)
    write(directory / "training" / "test.jsonl", 2)
    assert refusal(directory).value == str(directory / "training" / "test.jsonl")


def test_splits_of_shards_and_of_directories(directory: Path) -> None:
    write_table(directory / "data" / "exam-00000-of-00001.parquet", "1")
    write_table(directory / "data" / "train-00000-of-00001.parquet", "2")
    write_table(directory / "dev" / "part.parquet", "3")
    found = {split: answers(directory, split=split) for split in ("exam", "train", "validation")}
    assert found == {"exam": ["1"], "train": ["2"], "validation": ["3"]}


def test_a_word_in_the_readme_lists_no_files(directory: Path) -> None:
    write(directory / "a.jsonl", "1")
    (directory / "b.csv").write_text("answer\n2\n")
    (directory / "README.md").write_text("# Data\nSee data_files in configs:\n")
    assert "1 .jsonl, 1 .csv" in refusal(directory).rule


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("license: mit", {"train": ["1"], "test": ["2"]}),
        ("configs:\n- config_name: default\n  data_files: '*.jsonl'", {"train": ["2", "1"]}),
        (
            "configs:\n- config_name: x\n  default: true\n  data_files:\n"
            "  - split: exam\n    path: [train.jsonl, test.jsonl]\n- config_name: y",
            {"exam": ["1", "2"]},
        ),
        ("configs:\n- config_name: x\n  data_files: {all: t*t.jsonl}", {"all": ["2"]}),
    ],
)
def test_the_header_of_the_readme_lists_files(
    directory: Path, header: str, expected: dict[str, list[str]]
) -> None:
    write(directory / "train.jsonl", "1")
    write(directory / "test.jsonl", "2")
    (directory / "README.md").write_text(f"---\n{header}\n---\n# Data\n")
    for split, values in expected.items():
        assert answers(directory, split=split) == values
    assert all(split in refusal(directory, split="none").rule for split in expected)


@pytest.mark.parametrize(
    "header",
    ["a: [", "configs: 5", "configs:\n- data_files: 5", "configs:\n- data_files: none.csv"],
)
def test_a_wrong_header_of_the_readme_is_refused(directory: Path, header: str) -> None:
    write(directory / "a.jsonl", "1")
    (directory / "README.md").write_text(f"---\n{header}\n---\n")
    with invalid("data.source"):
        load(directory)


def test_a_partitioned_table_is_refused(directory: Path) -> None:
    path = write_table(directory / "answer=u" / "a.parquet", "1")
    for source in (directory, directory / "*" / "*.parquet"):
        assert refusal(source).value == str(path)
    assert answers(directory / "answer=u" / "*.parquet") == ["1"]


def test_a_directory_with_brackets(tmp_path: Path) -> None:
    write(tmp_path / "run[1]" / "a*b" / "a.jsonl", "1")
    assert answers(tmp_path / "run[1]") == ["1"]
    (tmp_path / "run[1]" / "README.md").write_text(
        "---\nconfigs:\n- data_files: '**/*.jsonl'\n---\n"
    )
    assert answers(tmp_path / "run[1]") == ["1"]


@pytest.mark.parametrize("other", [("007",), (True,), (2.5,), ([1],), ({"x": 1},)])
def test_another_type_in_another_shard_is_refused(directory: Path, other: tuple[object]) -> None:
    write_table(directory / "a-1.parquet", 7)
    path = write_table(directory / "a-2.parquet", *other)
    for source in (directory, directory / "a-*.parquet"):
        error = refusal(source)
        assert error.value == str(path)
        assert "a-1.parquet" in error.rule
    assert answers(f"{directory}/a-1.parquet,{directory}/a-2.parquet") == [7, *other]


@pytest.mark.parametrize(
    ("empty", "value"), [(None, "007"), ([], [["x"]]), ({"x": []}, {"x": ["y"]})]
)
def test_a_shard_of_nulls_suits_any_type(directory: Path, empty: object, value: object) -> None:
    write_table(directory / "a-1.parquet", empty)
    write_table(directory / "a-2.parquet", value)
    assert answers(directory) == [empty, value]


def test_empty_shards_are_skipped(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(directory / "a-1.jsonl")
    write(directory / "a-2.jsonl", "1")
    (directory / "a-3.jsonl").write_text("\n")
    with caplog.at_level(logging.WARNING):
        assert answers(directory) == ["1"]
    assert "a-1.jsonl" in caplog.text
    write_table(directory / "b" / "b-1.parquet")
    write_table(directory / "b" / "b-2.parquet", "1")
    assert answers(directory / "b") == ["1"]


def test_data_without_rows_is_refused(directory: Path) -> None:
    import datasets

    assert refusal(write_table(directory / "a.parquet")).value == str(directory / "a.parquet")
    (directory / "a.csv").write_text("prompt,answer\n")
    assert refusal(directory / "a.csv").value == str(directory / "a.csv")
    datasets.Dataset.from_dict({"prompt": []}).save_to_disk(str(directory / "saved"))
    assert refusal(directory / "saved").value == str(directory / "saved")


def test_times_of_a_hub_dataset_of_json_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def loader(values: list[Any]) -> Any:
        rows = datasets.Dataset.from_dict({"a": values})
        rows.info.builder_name = "json"
        return lambda path, name, split: [rows]

    times = [{"x": [datetime.datetime(2020, 1, 1)]}]
    monkeypatch.setattr(datasets, "load_dataset", loader(times))
    assert refusal("org/name").value == "org/name"
    monkeypatch.setattr(datasets, "load_dataset", loader([{"date": "2020-01-01"}]))
    assert load("org/name") == [{"a": {"date": "2020-01-01"}}]
