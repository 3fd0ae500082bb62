"""Whatever the layout, the numbers are those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.algorithms.losses import clipped_surrogate
from rlsys.algorithms.values import value_loss
from rlsys.engines.training.parallel.tensor import sum_replicated
from rlsys.layout.mesh import Layout
from rlsys.types import MicroBatch, TrainRow
from scripts.bench.layouts import build_model
from tests.engines.training_harness import (
    Weights,
    gradients,
    make_engine,
    make_rows,
    run_ranks,
    weights,
)

ROWS = make_rows(12, seed=3)
Found = tuple[dict[str, float], Weights, Weights]


def trained(path: Path, layout: str, rank: int = 0, world_size: int = 1, **options: Any) -> Found:
    """Metrics, gradients and weights after a step on ROWS, in passes of at most 60 tokens."""
    options = {"micro_batch_tokens": 60} | options
    engine = make_engine(path, layout=layout, rank=rank, world_size=world_size, **options)
    parsed = Layout.parse(layout)
    engine.accumulate(
        MicroBatch(rows=with_returns(ROWS[parsed.data_index(rank) :: parsed.num_data]))
    )
    found = summed(engine)
    result = engine.optimizer_step()
    after = weights(engine) if options.get("head") is None else {}
    return dict(result.metrics), found, after


def summed(engine: Any) -> Weights:
    """Gradients of all ranks, which the engine adds up in the optimizer step only."""
    tp, mesh = engine._layout.tp, engine._mesh
    if tp > 1:
        sum_replicated(engine._parameters.values(), mesh)
    found = gradients(engine)
    if tp > 1:  # that step adds them once more
        for parameter in engine._parameters.values():
            if "tp" not in str(getattr(parameter, "device_mesh", "")):
                parameter.grad.div_(tp)
    return found


def with_returns(rows: Sequence[TrainRow]) -> list[TrainRow]:
    for row in rows:
        row.columns.setdefault("returns", row.columns["advantages"])  # type: ignore[attr-defined]
    return list(rows)


def all_trained(
    rank: int, world_size: int, directory: Path, *, cases: Sequence[tuple[str, str, dict[str, Any]]]
) -> list[Found]:
    return [
        trained(directory / family, layout, rank, world_size, **options)
        for family, layout, options in cases
    ]


def compare(
    directory: Path, cases: Sequence[tuple[str, str, dict[str, Any]]], *, rtol: float = 1e-5
) -> None:
    world_size = Layout.parse(cases[0][1]).num_ranks
    for family in {case[0] for case in cases}:
        build_model(directory / family, family)
    found = run_ranks(world_size, partial(all_trained, cases=cases), directory)
    for number, (family, layout, options) in enumerate(cases):
        expected = trained(directory / family, "dp1", **options)
        what = f"{family} {layout} {options}"
        for of_rank in found:
            assert of_rank[number][0].keys() == expected[0].keys()
            for name, value in expected[0].items():
                assert of_rank[number][0][name] == pytest.approx(value, rel=rtol, abs=1e-7), (
                    what,
                    name,
                )
        assert relative(found[0][number][1], expected[1]) < rtol, what
        if expected[2]:
            # Adam's first step is the gradient's sign times the rate, also where it is all noise.
            assert relative(found[0][number][2], expected[2]) < 100 * rtol, what


def relative(found: Weights, expected: Weights) -> float:
    assert found.keys() == expected.keys()
    errors = torch.stack([(found[name] - expected[name]).norm() for name in expected])
    return float(errors.norm() / torch.stack([x.norm() for x in expected.values()]).norm())


FAMILIES = ("qwen3", "llama", "gemma3_text", "qwen3_moe")


@pytest.mark.parametrize("layout", ["tp2", "cp2"])
def test_ranks_share_the_tokens_of_a_row(layout: str, tmp_path: Path) -> None:
    families = (*FAMILIES, "mistral", "olmo2", "gpt_oss", "deepseek_v3")
    compare(tmp_path, [(family, layout, {}) for family in families])


def test_experts_lie_on_several_ranks(tmp_path: Path) -> None:
    compare(tmp_path, [(name, "ep2", {}) for name in ("qwen3_moe", "gpt_oss", "deepseek_v3")])


@pytest.mark.parametrize(
    "cases",
    [
        [(name, layout, {}) for layout in ("dp2tp2", "dp2cp2", "dp2x2") for name in FAMILIES],
        [("qwen3", "cp2tp2", {}), *(("qwen3_moe", f"{x}2ep2", {}) for x in ("dp", "tp", "cp"))],
    ],
    ids=["data", "others"],
)
def test_layouts_compose(cases: list[tuple[str, str, dict[str, Any]]], tmp_path: Path) -> None:
    compare(tmp_path, cases)


def test_critics_losses_and_recomputation_know_no_layout(tmp_path: Path) -> None:
    critic = {"head": "value", "loss": value_loss()}
    entropy = {"loss": clipped_surrogate(0.2, 0.28), "gradient_checkpointing": True}
    cases = [
        (family, layout, options)
        for family, layout in (("qwen3", "tp2"), ("gemma3_text", "cp2"))
        for options in (critic, entropy, {"micro_batch_tokens": 1000})
    ]
    compare(tmp_path, cases)
