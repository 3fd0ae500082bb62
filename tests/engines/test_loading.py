"""Weights are read in parts, and each rank's parts are those of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from rlsys.engines.causal_lm import load_causal_lm
from rlsys.engines.model_tensors import model_tensors
from scripts.bench.layouts import FAMILIES, build_model
from tests.engines.training_harness import Weights, make_engine, run_ranks, weights

MIXTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3")


def loaded(
    rank: int, world_size: int, directory: Path, *, cases: Sequence[tuple[str, str]]
) -> list[Weights]:
    found = []
    for family, layout in cases:
        engine = make_engine(directory / family, layout=layout, rank=rank, world_size=world_size)
        found.append(weights(engine))
        engine.close()
    return found


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, [(name, layout) for layout in ("dp2", "tp2", "pp2") for name in FAMILIES]),
        (4, [(name, layout) for layout in ("dp4", "dp2tp2") for name in ("qwen3", "qwen3_moe")]),
        (4, [(name, "dp2ep2") for name in MIXTURES] + [("gemma3_text", "dp2x2")]),
    ],
    ids=["two", "four", "experts"],
)
def test_every_layout_holds_the_weights_of_the_files(
    world_size: int, cases: list[tuple[str, str]], tmp_path: Path
) -> None:
    whole = {}
    for family in {family for family, _ in cases}:
        model = load_causal_lm(build_model(tmp_path / family, family), dtype="float32")
        whole[family] = model_tensors(model)
    (first, *_) = run_ranks(world_size, partial(loaded, cases=cases), tmp_path)
    for (family, layout), found in zip(cases, first, strict=True):
        assert found.keys() == whole[family].keys(), (family, layout)
        for name, tensor in found.items():
            assert torch.equal(tensor, whole[family][name]), (family, layout, name)
