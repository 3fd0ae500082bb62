"""Loading rows: local files really read, and what is wrong with them said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.config import DataConfig
from rlsys.data.rows import load_rows

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


@pytest.fixture(autouse=True)
def _no_network_and_a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def write(path: Path) -> Path:
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        case ".json":
            path.write_text(json.dumps(ROWS))
        case ".parquet":
            import datasets

            datasets.Dataset.from_list(ROWS).to_parquet(str(path))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_local_files_are_read(tmp_path: Path, name: str) -> None:
    rows = load_rows(DataConfig(source=str(write(tmp_path / name))))
    assert rows.column_names == ["prompt", "answer"]
    assert list(rows) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("missing.jsonl", None, ["missing.jsonl' is no file (looked in ", "give the path"]),
        ("missing.py", None, ["missing.py' cannot be loaded (", "or give a local file"]),
        ("a.jsonl", "", ["a.jsonl' is an empty file"]),
        ("a.jsonl", "\n", ["cannot be loaded", "one JSON object per line"]),
        ("a.json", "[]", ["cannot be loaded"]),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt":\n', ["cannot be loaded (", "JSON"]),
        ("a.parquet", "PAR", ["cannot be loaded (", "Parquet", "write it anew"]),
        ("a.jsonl", '["prompt"]\n', ["first row is no JSON object", "one JSON object per line"]),
        ("a.json", '\n["a", "b"]', ["first row is no JSON object", "a list of them for .json"]),
        ("a.jsonl", "null\n", ["first row is no JSON object"]),
        ("a.csv", "prompt\n1", ["file of unknown type", ".jsonl, .json, .parquet"]),
    ],
)
def test_a_file_without_rows_is_refused(
    tmp_path: Path, name: str, content: str | None, parts: list[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r"data\.source=") as refused:
        load_rows(DataConfig(source=str(tmp_path / name)))
    for part in parts:
        assert part in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "content", ['\ufeff{"prompt": "x"}\n', '\n\n {"prompt": "x"}', '\n[\n{"prompt": "x"}]']
)
def test_a_file_may_begin_with_marks_and_blanks(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    assert load_rows(DataConfig(source=str(tmp_path / "a.json")))["prompt"][0] == "x"


def test_a_subset_of_a_local_file_is_refused(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match=r"data.subset='main' .* leave data.subset out"):
        load_rows(DataConfig(source=path, subset="main"))


def test_no_source_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.source is empty"):
        load_rows(DataConfig())


def test_a_hub_dataset_that_cannot_be_had_says_what_to_check() -> None:
    with pytest.raises(ValueError, match=r"'no-one/nothing' cannot be loaded .*the network"):
        load_rows(DataConfig(source="no-one/nothing"))


def test_a_directory_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a directory; give one of its files"):
        load_rows(DataConfig(source=str(tmp_path)))
