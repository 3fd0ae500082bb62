"""Token ids mean the same to every model of a run, or it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.data.vocabulary import check_vocabulary
from rlsys.tiny_models import build_tokenizer


def test_a_model_may_know_more_tokens_but_no_other_ones(tmp_path: Path) -> None:
    build_tokenizer("0123=").save_pretrained(tmp_path / "judge")
    judge = str(tmp_path / "judge")
    check_vocabulary("judge", judge, build_tokenizer("0123="))
    check_vocabulary("judge", judge, build_tokenizer("012"))
    with pytest.raises(ValueError, match=r"model 'judge' at .*1 of 9 tokens differ, first '4'"):
        check_vocabulary("judge", judge, build_tokenizer("0123=4"))
    with pytest.raises(ValueError, match="first '1', which is 3 for the policy and 4 there"):
        check_vocabulary("judge", judge, build_tokenizer("10"))


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no tokenizer"):
        check_vocabulary("judge", str(tmp_path), build_tokenizer("01"))
