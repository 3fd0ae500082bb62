"""Loading of rows from real local files, and the errors of wrong ones."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import DataConfig
from rlsys.data.row_loading import load_rows
from rlsys.data.source_names import hub_names, may_have_splits
from rlsys.errors import InvalidValue
from tests.errors import invalid

WRONG_WEIGHTS = ("-1", "1e308", "nan", "inf", "1e-12", "abc")

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


@pytest.fixture(autouse=True)
def _no_network_and_a_separate_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    ("name", "content"),
    [
        ("missing.jsonl", None),
        ("missing.py", None),
        ("a.jsonl", ""),
        ("a.jsonl", "\n"),
        ("a.jsonl", "\n" * 5000),
        ("a.json", "[]"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt":\n'),
        ("a.parquet", "PAR"),
        ("a.jsonl", '["prompt"]\n'),
        ("a.json", '\n["a", "b"]'),
        ("a.jsonl", "null\n"),
        ("a.txt", "1+1="),
        ("a.jsonl.gz", "no gzip"),
        ("a.csv", ""),
        ("a.arrow", "ARROW"),
    ],
)
def test_a_file_without_rows_is_refused(tmp_path: Path, name: str, content: str | None) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with invalid("data.source", str(tmp_path / name)) as refused:
        load_rows(DataConfig(source=str(tmp_path / name)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
@pytest.mark.parametrize("encoding", ["latin1", "utf-16", "utf-16-le"])
def test_the_fix_of_another_encoding_is_iconv(tmp_path: Path, name: str, encoding: str) -> None:
    text = {"a.jsonl": '{"prompt": "é"}\n', "a.csv": "prompt\né\n"}[name]
    (tmp_path / name).write_bytes(text.encode(encoding))
    with invalid("data.source", str(tmp_path / name)) as refused:
        load_rows(DataConfig(source=str(tmp_path / name)))
    source = "LATIN1" if encoding == "latin1" else "UTF-16"
    assert refused.value.fix.endswith(f"iconv -f {source} -t UTF-8 {name}")


@pytest.mark.parametrize(
    "content", ['\ufeff{"prompt": "x"}\n', '\n\n {"prompt": "x"}', '\n[\n{"prompt": "x"}]']
)
def test_a_file_may_begin_with_marks_and_blanks(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    assert load_rows(DataConfig(source=str(tmp_path / "a.json")))["prompt"][0] == "x"


def test_a_subset_of_a_local_file_is_refused(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.jsonl"))
    with invalid("data.subset", "main"):
        load_rows(DataConfig(source=path, subset="main"))


def test_no_source_is_refused() -> None:
    with invalid("data.source", ""):
        load_rows(DataConfig())


def test_a_hub_dataset_that_cannot_be_loaded_is_refused() -> None:
    with invalid("data.source", "no-one/nothing"):
        load_rows(DataConfig(source="no-one/nothing"))


def saved(rows: list[dict[str, Any]] = ROWS) -> Any:
    import datasets

    return datasets.Dataset.from_list(rows)


def loaded(source: Path | str, **options: Any) -> list[dict[str, Any]]:
    return list(load_rows(DataConfig(source=str(source), **options)))


def refusal(source: Path | str, *, evaluated: bool = False, **options: Any) -> InvalidValue:
    config = DataConfig(source=str(source), **options)
    with pytest.raises(InvalidValue) as refused:
        load_rows(config, file_split="test" if evaluated else "train")
    return refused.value


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "a.jsonl.gz", "a.json.gz"])
def test_texts_are_read_compressed_or_not(tmp_path: Path, name: str) -> None:
    between = "\t" if "tsv" in name else ","
    text = "".join(
        between.join(row) + "\n" for row in [("prompt", "answer"), ("1+1=", "2"), ("2+2=", "4")]
    )
    if "json" in name:
        text = json.dumps(ROWS) if ".json." in name else "\n".join(map(json.dumps, ROWS))
    data = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    (tmp_path / name).write_bytes(data)
    rows = loaded(tmp_path / name)
    assert [(row["prompt"], int(row["answer"])) for row in rows] == [("1+1=", 2), ("2+2=", 4)]


def test_an_arrow_file_is_read(tmp_path: Path) -> None:
    saved().save_to_disk(str(tmp_path / "saved"))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    assert loaded(file) == ROWS


def test_a_pattern_takes_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        row = {"prompt": f"{number}", "answer": "0"}
        (tmp_path / f"part-{number:02}.jsonl").write_text(json.dumps(row))
    rows = loaded(tmp_path / "part-*.jsonl")
    assert [row["prompt"] for row in rows] == ["1", "2", "10"]
    assert refusal(tmp_path / "none-*.jsonl").value == str(tmp_path / "none-*.jsonl")
    (tmp_path / "part-3.csv").write_text("prompt\n1\n")
    assert "['csv', 'json']" in refusal(tmp_path / "part-*").rule
    (tmp_path / "part.txt").write_text("1")
    assert "part.txt" in refusal(tmp_path / "part*").rule


@pytest.mark.parametrize("name", ["a[1].jsonl", "a,b.jsonl", "a*0.5.jsonl", "a*2"])
def test_a_path_that_exists_is_not_a_pattern(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix == ".jsonl":
        write(path)
    else:
        saved().save_to_disk(str(path))
    assert loaded(path) == ROWS


def test_files_below_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.jsonl", "b,c.jsonl"):
        write(tmp_path / name)
        assert loaded(f"~/{name}") == ROWS
    assert len(loaded("~/a.jsonl, ~/a.jsonl")) == 2 * len(ROWS)
    assert hub_names("~/a.jsonl*0.5,~/*.jsonl*0.5") == []


def test_a_directory_that_save_to_disk_wrote(tmp_path: Path) -> None:
    import datasets

    saved().save_to_disk(str(tmp_path / "one"))
    assert loaded(tmp_path / "one") == ROWS
    assert loaded(tmp_path / "one", split="train[1:]") == ROWS[1:]
    assert refusal(tmp_path / "one", split="test").field == "data.split"
    assert refusal(tmp_path / "one", subset="main").field == "data.subset"

    both = datasets.DatasetDict(train=saved(), test=saved(ROWS[1:]))
    both.save_to_disk(str(tmp_path / "both"))
    assert loaded(tmp_path / "both") == ROWS
    assert loaded(tmp_path / "both", split="test") == ROWS[1:]
    assert loaded(tmp_path / "both", split="train[:1]+test") == ROWS
    assert "train, test" in refusal(tmp_path / "both", split="validation").rule


def test_a_directory_of_files(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(3):
        row = {"prompt": f"{number}", "answer": "0"}
        saved([row]).to_parquet(str(shards / f"train-0000{number}-of-00003.parquet"))
    saved().to_parquet(str(shards / "test-00000-of-00001.parquet"))
    assert [row["prompt"] for row in loaded(shards)] == ["0", "1", "2"]
    assert loaded(shards, split="test") == ROWS
    error = refusal(shards, split="validation")
    assert (error.field, error.value) == ("data.split", "validation")
    assert "test, train" in error.rule


def test_a_directory_with_files_of_two_types_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    write(directory / "a.jsonl")
    (directory / "b.csv").write_text("prompt,answer\n3+3=,6\n")
    error = refusal(directory)
    assert (error.field, error.value) == ("data.source", str(directory))
    assert "1 .jsonl, 1 .csv" in error.rule
    patterns = f"{directory}/*.jsonl,{directory}/*.csv"
    assert patterns in error.fix
    assert [row["prompt"] for row in loaded(patterns)] == ["1+1=", "2+2=", "3+3="]
    (directory / "b.csv").rename(directory / "b.txt")
    assert loaded(directory) == ROWS


def test_a_local_copy_of_a_hub_dataset(tmp_path: Path) -> None:
    """The hub's own cache, a directory with the snapshots of a dataset, is one too."""
    cache = tmp_path / "datasets--org--name"
    copy = cache / "snapshots" / "0123"
    (copy / "hard").mkdir(parents=True)
    saved().to_parquet(str(copy / "hard" / "questions.parquet"))
    saved(ROWS[1:]).to_parquet(str(copy / "easy.parquet"))
    (copy / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: hard\n  data_files:\n  - split: exam\n    path: hard/*.parquet\n"
        "- config_name: easy\n  data_files: easy.parquet\n---\n"
    )
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123")
    assert loaded(copy, subset="hard", split="exam") == ROWS
    assert loaded(cache, subset="easy") == ROWS[1:]
    error = refusal(copy, subset="medium")
    assert (error.field, error.value) == ("data.subset", "medium")
    assert "hard, easy" in error.rule
    assert refusal(copy).field == "data.subset"


def test_a_directory_without_data_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path).value == str(tmp_path)


def test_a_split_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    assert loaded(path, split="train[:50%]") == ROWS[:1]
    assert loaded(path, split="train[50%:]") == ROWS[1:]
    for split in ("test", "", "validation[:1]", "train[:1]+test"):
        error = refusal(path, split=split)
        assert (error.field, error.value) == ("data.split", split)
    config = DataConfig(source=str(path), split="test[1:]")
    assert list(load_rows(config, file_split="test")) == ROWS[1:]
    assert refusal(path, split="validation", evaluated=True).value == "validation"


WRONG_SPLITS = ("train[", "train[:200%]", "train[::2]", " train", "train]", "train[a:]")
EMPTY_PARTS = ("train[:0%]", "train[100:]", "train[50%:40%]", "train[:1]+train[2:]", "train[1:1]")


@pytest.mark.parametrize("split", [*WRONG_SPLITS, *EMPTY_PARTS, "train[:50%](pct1_dropremainder)"])
@pytest.mark.parametrize("kind", ["file", "saved", "dictionary", "directory"])
def test_a_wrong_split_or_an_empty_part_names_the_split(
    tmp_path: Path, split: str, kind: str
) -> None:
    import datasets

    path = tmp_path / "data"
    match kind:
        case "file":
            path = write(tmp_path / "a.jsonl")
        case "saved":
            saved().save_to_disk(str(path))
        case "dictionary":
            datasets.DatasetDict(train=saved()).save_to_disk(str(path))
        case "directory":
            path.mkdir()
            write(path / "a.jsonl")
    error = refusal(path, split=split)
    assert (error.field, error.value) == ("data.split", split)
    if split in EMPTY_PARTS:
        assert "no rows" in error.rule


def test_a_wrong_split_of_an_evaluation_names_its_own_setting(tmp_path: Path) -> None:
    config = DataConfig(source=str(write(tmp_path / "a.jsonl")), split="test[")
    with invalid("evaluation.split", "test["):
        load_rows(config, "evaluation.source", file_split="test")


def test_parts_of_the_splits_of_a_directory(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl")
    (tmp_path / "test.jsonl").write_text(json.dumps(ROWS[0]))
    assert loaded(tmp_path, split="train[1:]+test") == [ROWS[1], ROWS[0]]


@pytest.mark.parametrize("source", ["a" * 5000, "a/" * 2000, "a" * 300 + ".jsonl"])
def test_a_source_too_long_for_a_path_is_refused_with_a_short_message(source: str) -> None:
    error = refusal(source)
    assert error.value == source
    assert len(str(error)) < 600


@pytest.mark.parametrize("source", ["/dev/zero", "/dev/null"])
def test_a_device_is_refused(source: str) -> None:
    assert "device" in refusal(source).rule


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    assert "pipe" in refusal(tmp_path / "a.jsonl").rule


def test_the_root_is_refused() -> None:
    assert "root" in refusal("/").rule


def test_several_sources_follow_each_other_with_the_columns_of_all(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl")
    (tmp_path / "b.csv").write_text("prompt,level\n3+3=,7\n")
    rows = load_rows(DataConfig(source=f"{first}, {tmp_path / 'b.csv'}"))
    assert rows.column_names == ["prompt", "answer", "level"]
    assert list(rows) == [
        *({**row, "level": None} for row in ROWS),
        {"prompt": "3+3=", "answer": None, "level": "7"},
    ]
    assert rows["answer"] == ["2", "4", None]
    assert rows[-1] == rows[2]
    with pytest.raises(IndexError):
        rows[3]
    assert rows.weights is None


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{a},{a}*0.5", "weight"),
        ("{a}*0,{a}*1", "*0"),
        ("{a},", "empty"),
        ("{a},missing.csv", "missing.csv"),
        *((f"{{a}}*{weight}", f"weight {weight!r}") for weight in WRONG_WEIGHTS),
        ("{a}*0.5,{a}*nan", "weight 'nan'"),
        ("org/name*-1", "weight '-1'"),
    ],
)
def test_a_list_of_sources_that_cannot_be_read(tmp_path: Path, text: str, word: str) -> None:
    assert word in str(refusal(text.format(a=write(tmp_path / "a.jsonl"))))


def test_blanks_around_names_and_weights_are_ignored(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    rows = load_rows(DataConfig(source=f" {path} * 0.7 , {path}* .3 "))
    assert rows.weights == [0.7, 0.3]
    assert len(rows) == 4
    assert hub_names("org/name * 0.5 , other") == ["org/name", "other"]


def test_names_for_the_hub_are_found_in_a_list(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    text = f"org/name*0.5,a.jsonl,{tmp_path}/copy,b-*.parquet,other"
    assert hub_names(text) == ["org/name", "other"]
    assert hub_names("") == []
    assert may_have_splits("a.jsonl,org/name*2")
    assert may_have_splits(str(tmp_path / "copy"))
    assert not may_have_splits("a.jsonl*0.5,b.csv.gz*0.5")
