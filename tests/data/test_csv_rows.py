"""CSV and TSV files: each field is the text in the file, or the line is refused."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsys.config import DataConfig
from rlsys.data.prompts import PromptSource
from rlsys.data.row_loading import load_rows
from rlsys.launcher.tiny_models import build_tokenizer
from tests.errors import invalid


@pytest.fixture(autouse=True)
def _separate_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def load(path: Path) -> list[dict[str, Any]]:
    return list(load_rows(DataConfig(source=str(path))))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("prompt,answer\n1,2,3\n4,5,6\n", "line 2"),
        ("prompt,answer\n1,2\n\n3\n", "line 4"),
        ('prompt,answer\n"1\n2",3\n4,5,6\n', "line 4"),
        ("prompt,answer,answer\n1,2,3\n", "'answer'"),
        ('prompt,answer\n1,2\n"3,4\n', "line 3"),
        ('prompt,answer\n1,2\n"3"4,5\n', "line 3"),
    ],
)
def test_a_malformed_file_is_refused_with_the_line(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with invalid("data.source", str(tmp_path / "a.csv")) as error:
        load(tmp_path / "a.csv")
    assert word in error.value.rule


def test_fields_stay_texts(tmp_path: Path) -> None:
    text = "\ufeffprompt,answer\n1,007\n\n2,\n3,9007199254740993\nNA, 1e5 \n"
    text += 'True,"a, ""b"""\n"x\nc",null\n'
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    answers = ["007", None, "9007199254740993", " 1e5 ", 'a, "b"', "null"]
    prompts = ["1", "2", "3", "NA", "True", "x\nc"]
    assert load(tmp_path / "a.csv") == [
        {"prompt": prompt, "answer": answer}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def test_a_type_does_not_depend_on_later_rows(tmp_path: Path) -> None:
    rows = ["prompt,answer", *["1,7"] * 12_000, "1,007", "1,x"]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    answers = [row["answer"] for row in load(tmp_path / "a.csv")]
    assert answers == ["7"] * 12_000 + ["007", "x"]


def test_files_of_a_pattern_have_the_same_columns(tmp_path: Path) -> None:
    (tmp_path / "a-1.csv").write_text("prompt,answer\n1,2\n")
    (tmp_path / "a-2.tsv").write_text("answer\tprompt\n4\t3\n")
    assert load(tmp_path / "a-*")[1] == {"prompt": "3", "answer": "4"}
    other = tmp_path / "a-3.csv"
    other.write_text("prompt,level\n1,2\n")
    with invalid("data.source", str(other)):
        load(tmp_path / "a-*.csv")


def test_numbers_of_a_csv_file_are_prompts_and_completions(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion\n1,04\n2,5\n")
    source = PromptSource(
        DataConfig(source=str(tmp_path / "a.csv"), shuffle=False),
        build_tokenizer(),
        seed=0,
        max_tokens=8,
        max_context=64,
        completions=("completion", 1),
    )
    found = [(source.at(n).text, source.at(n).completions[0].text) for n in range(2)]
    assert found == [("1", "04"), ("2", "5")]


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=5)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3))
def test_written_texts_are_read_as_they_are(tmp_path: Path, rows: list[tuple[str, str]]) -> None:
    file = io.StringIO(newline="")
    csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    (tmp_path / "a.csv").write_bytes(file.getvalue().encode())
    assert [(row["a"], row["b"]) for row in load(tmp_path / "a.csv")] == rows
