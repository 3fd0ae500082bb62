"""The table of weights from every layout of a trainer to every generation engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from rlsys.types import FinishReason, Generation
from scripts.check_reallocation import ENGINES, FAMILIES, LAYOUTS, CellResult, check, difference

NO_EXPERTS = "trainer.layout='ep2': this model has no experts. Remove ep from the layout."


def assert_right(cells: list[CellResult]) -> None:
    """What a model without experts cannot be laid out as is refused, all else is equal."""
    for cell in cells:
        is_refused = cell.layout == "ep2" and cell.family != "qwen3_moe"
        expected = ("refused", NO_EXPERTS) if is_refused else ("equal", "")
        assert (cell.result, cell.remark) == expected, str(cell)


@pytest.mark.slow
def test_layouts_of_two_ranks_reach_the_torch_engine(tmp_path: Path) -> None:
    cells = check(
        tmp_path,
        families=["llama", "qwen3_moe"],
        layouts=["tp2", "pp2", "ep2"],
        engines=["torch"],
    )
    assert len(cells) == 6
    assert_right(cells)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_the_whole_table(tmp_path: Path) -> None:
    cells = check(tmp_path, on_cell=print)
    assert len(cells) == len(FAMILIES) * len(LAYOUTS) * len(ENGINES)
    assert_right(cells)


def generation(tokens: list[int], logprobs: list[float], version: int) -> Generation:
    return Generation(
        request_id="r",
        token_ids=np.array(tokens, np.int32),
        sampler_logprobs=np.array(logprobs, np.float32),
        policy_versions=np.full(len(tokens), version, np.int32),
        finish_reason=FinishReason.LENGTH,
    )


def test_a_different_bit_is_found() -> None:
    def describe(tokens: list[int], logprobs: list[float], version: int) -> str:
        return difference([generation(tokens, logprobs, version)], expected, 5)

    expected = [generation([3, 4], [-1.0, -2.0], 0)]
    assert describe([3, 4], [-1.0, -2.0], 5) == ""
    assert "tokens of versions {4}" in describe([3, 4], [-1.0, -2.0], 4)
    assert "has other tokens" in describe([3, 5], [-1.0, -2.0], 5)
    assert "differ by up to 1.19" in describe(
        [3, 4], [-1.0, float(np.nextafter(np.float32(-2), 0))], 5
    )
