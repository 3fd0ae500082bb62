from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.data.vocabulary_check import check_vocabularies, check_vocabulary
from rlsys.launcher.tiny_models import build_tokenizer
from tests.errors import invalid

DIGITS = "0123456789+="


def saved(directory: Path, characters: str) -> str:
    build_tokenizer(characters).save_pretrained(directory)
    return str(directory)


def test_a_tokenizer_has_no_token_beyond_its_model() -> None:
    tokenizer = build_tokenizer(DIGITS)  # three special tokens and twelve characters
    check_vocabulary(tokenizer, 15, "m")
    with invalid("model.path", "m") as found:
        check_vocabulary(tokenizer, 13, "m")
    assert "has 13 tokens, and its tokenizer 2 more" in found.value.rule
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    check_vocabulary(tokenizer, 15, "m")  # like Gemma 3's tokenizer for its text models
    tokenizer.eos_token = "<image>"
    with invalid("model.path", "m") as found:
        check_vocabulary(tokenizer, 15, "m")
    assert "'<image>' (15)" in found.value.rule


def test_a_model_may_have_more_tokens_than_the_policy(tmp_path: Path) -> None:
    policy = build_tokenizer(DIGITS)
    paths = {"teacher": saved(tmp_path / "same", DIGITS), "critic": ""}
    check_vocabularies(policy, paths)
    check_vocabularies(policy, {"teacher": saved(tmp_path / "more", DIGITS + "-*")})


@pytest.mark.parametrize(
    ("characters", "words"),
    [("+0123456789=", "11 of the policy's 15 tokens"), ("0123456789+", "['=']")],
)
def test_another_vocabulary_is_refused(tmp_path: Path, characters: str, words: str) -> None:
    paths = {"teacher": saved(tmp_path / "other", characters)}
    with invalid("teacher.model.path", paths["teacher"]) as found:
        check_vocabularies(build_tokenizer(DIGITS), paths)
    assert words in found.value.rule


def test_a_wrong_path_is_named_with_its_role(tmp_path: Path) -> None:
    with invalid("teacher.model.path", str(tmp_path / "gone")):
        check_vocabularies(build_tokenizer(DIGITS), {"teacher": str(tmp_path / "gone")})
    (tmp_path / "empty").mkdir()
    with invalid("teacher.model.path", str(tmp_path / "empty")):
        check_vocabularies(build_tokenizer(DIGITS), {"teacher": str(tmp_path / "empty")})
