"""One step in a layout compared with one process of plain transformers.

Other tests of layouts compare with this project's own engine on one rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config.parallel_layout import ParallelLayout
from scripts.bench.layouts import FAMILIES, measure

BOUND = 1e-5  # relative error of the loss and of the norms of all gradients and weights
FOUR = ("qwen3", "llama", "gemma3_text", "qwen3_moe")


def check(layout: str, families: tuple[str, ...], path: Path) -> list[str]:
    """Check a step and return the families that do not support the layout."""
    found = measure(ParallelLayout.parse(layout), families, path, None)
    refused: list[str] = found.pop("refused", [])
    assert len(refused) < len(families)
    assert found.keys() == {"loss", "gradient", "weights"}
    assert max(found.values()) <= BOUND, found
    return refused


@pytest.mark.slow
def test_a_step_on_two_ranks_is_that_of_transformers(tmp_path: Path) -> None:
    assert check("tp2", ("qwen3", "gemma3_text"), tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["dp2", "pp2", "cp2", "dp2tp2", "dp2pp2"])
def test_a_step_is_that_of_transformers(layout: str, tmp_path: Path) -> None:
    assert check(layout, FOUR, tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["ep2", "dp2ep2"])
def test_a_step_of_experts_is_that_of_transformers(layout: str, tmp_path: Path) -> None:
    assert check(layout, FOUR, tmp_path) == ["gemma3_text", "llama", "qwen3"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_step_of_each_family_is_that_of_transformers(tmp_path: Path) -> None:
    assert check("dp2", tuple(FAMILIES), tmp_path) == []
