from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.data.vocabulary_check import check_vocabularies, check_vocabulary
from rlsys.launcher.tiny_models import build_tokenizer

DIGITS = "0123456789+="


def saved(directory: Path, characters: str) -> str:
    build_tokenizer(characters).save_pretrained(directory)
    return str(directory)


def test_a_tokenizer_has_no_token_beyond_its_model() -> None:
    tokenizer = build_tokenizer(DIGITS)  # three special tokens and twelve characters
    check_vocabulary(tokenizer, 15, "m")
    with pytest.raises(ValueError, match=r"^model.path='m': the model has 13 tokens, .* 2 more, s"):
        check_vocabulary(tokenizer, 13, "m")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    check_vocabulary(tokenizer, 15, "m")  # as Gemma 3's tokenizer has one for its text models
    tokenizer.eos_token = "<image>"
    with pytest.raises(ValueError, match=r"such as '<image>' \(15\); put the model's own"):
        check_vocabulary(tokenizer, 15, "m")


def test_a_model_that_has_the_policys_tokens_may_have_more(tmp_path: Path) -> None:
    policy = build_tokenizer(DIGITS)
    paths = {"teacher": saved(tmp_path / "same", DIGITS), "critic": ""}
    check_vocabularies(policy, paths)
    check_vocabularies(policy, {"teacher": saved(tmp_path / "more", DIGITS + "-*")})


@pytest.mark.parametrize(
    ("characters", "words"),
    [("+0123456789=", r"11 of the policy's 15 tokens"), ("0123456789+", r"such as \['='\]")],
)
def test_another_vocabulary_is_refused(tmp_path: Path, characters: str, words: str) -> None:
    paths = {"teacher": saved(tmp_path / "other", characters)}
    with pytest.raises(ValueError, match=f"teacher.model.path=.*another vocabulary.*{words}"):
        check_vocabularies(build_tokenizer(DIGITS), paths)


def test_a_path_is_told_with_its_role(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^teacher\.model\.path='\S+/gone' is no directory"):
        check_vocabularies(build_tokenizer(DIGITS), {"teacher": str(tmp_path / "gone")})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"^teacher\.model\.path='\S+/empty' holds no tokenizer"):
        check_vocabularies(build_tokenizer(DIGITS), {"teacher": str(tmp_path / "empty")})
