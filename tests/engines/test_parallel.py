"""Results do not depend on the layout: they equal those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.algorithms.losses import clipped_surrogate
from rlsys.algorithms.values import value_loss
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.engines.training.optimizer import MOMENTS
from rlsys.errors import InvalidValue
from rlsys.reallocation.shards import local_part, whole
from rlsys.types import MicroBatch, TrainRow
from scripts.bench.layouts import FAMILIES as FAMILIES_OF_BENCH
from scripts.bench.layouts import build_model
from scripts.ranks import on_ranks
from tests.engines.training_harness import (
    Weights,
    gradients,
    make_engine,
    make_rows,
    memory,
    save,
    weights,
)
from tests.tiers import rest_slow

ROWS = [replace(row, recorded_as=i % 4) for i, row in enumerate(make_rows(12, seed=3))]
# In addition to the benchmark's families, which have two layers and four heads.
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    **{f"deep {name}": (name, {"num_layers": 4}) for name in ("qwen3", "gemma3_text")},
    **{
        f"{count}-headed {name}": (name, {"num_heads": count})
        for count in (1, 2, 3)
        for name in ("qwen3", "gemma3_text", "gpt_oss", "deepseek_v3")
    },
}
Gaps = dict[tuple[int, int], np.ndarray]
Found = tuple[dict[str, float], Weights, Weights, Gaps]


def trained(path: Path, layout: str, rank: int = 0, world_size: int = 1, **options: Any) -> Found:
    """Return metrics, gradients, weights and log-probability gaps after a step on ROWS.

    The rows are in two micro-batches whose passes have at most 60 tokens. With `routed`, other
    ranks chose the experts.
    """
    options = {"micro_batch_tokens": 60} | options
    rows = with_experts(ROWS) if options.pop("routed", False) else ROWS
    engine = make_engine(path, layout=layout, rank=rank, world_size=world_size, **options)
    check_holdings(engine)
    parsed = ParallelLayout.parse(layout)
    share = with_returns(rows[parsed.data_index(rank) :: parsed.num_data])
    engine.accumulate(MicroBatch(rows=share[:1]), MicroBatch(rows=share[1:]))
    found = summed(engine)
    result = engine.optimizer_step()
    after = weights(engine) if options.get("head") is None else {}
    return dict(result.metrics), found, after, dict(result.gaps)


def summed(engine: Any) -> Weights:
    """Return gradients of all ranks, some of which the engine sums only in the optimizer step."""
    parameters = engine.parameters
    copies = {name: one.grad.detach().clone() for name, one in parameters.items()}
    engine.gradient_sums.add_up(list(parameters.values()))
    found = gradients(engine)
    for name, one in parameters.items():  # the optimizer step sums them again
        one.grad.copy_(copies[name])
    return found


def with_returns(rows: Sequence[TrainRow]) -> list[TrainRow]:
    for row in rows:
        row.columns.setdefault("returns", row.columns["advantages"])  # type: ignore[attr-defined]
    return list(rows)


def with_experts(rows: Sequence[TrainRow]) -> list[TrainRow]:
    """Draw two different experts of 8, in each of two layers."""
    rng = np.random.default_rng(0)

    def experts(row: TrainRow) -> np.ndarray:
        num_inputs = len(row.prompt_token_ids) + len(row.token_ids) - 1
        first = rng.integers(0, 8, (num_inputs, 2, 1), np.uint8)
        second = (first + rng.integers(1, 8, first.shape, np.uint8)) % 8
        both: np.ndarray = np.concatenate((first, second), -1)
        return both.flatten()

    return [replace(row, routed_experts=experts(row)) for row in rows]


def check_holdings(engine: FSDPEngine) -> None:
    """Check that a rank has the shards in its `holdings`."""
    for held in engine.holdings:
        tensor = engine.base[held.name]
        assert held.shape == tensor.shape
        assert torch.equal(local_part(tensor), whole(tensor)[held.box.slices]), held


def all_trained(
    rank: int, world_size: int, directory: Path, *, cases: Sequence[tuple[str, str, dict[str, Any]]]
) -> list[Found]:
    return [
        trained(directory / family, layout, rank, world_size, **options)
        for family, layout, options in cases
    ]


# Relative rounding of 16-bit products that ranks sum in another order.
TOLERANCE = {"float32": 1e-5, "float16": 0.01, "bfloat16": 0.1}


def compare(directory: Path, cases: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
    world_size = ParallelLayout.parse(cases[0][1]).num_ranks
    for model in {case[0] for case in cases}:
        family, changes = MODELS.get(model, (model, {}))
        build_model(directory / model, family, **changes)
    found = on_ranks(world_size, partial(all_trained, cases=cases), directory)
    for number, (family, layout, options) in enumerate(cases):
        expected = trained(directory / family, "dp1", **options)
        rtol = TOLERANCE[options.get("dtype", "float32")]
        what = f"{family} {layout} {options}"
        for of_rank in found:
            assert of_rank[number][0].keys() == expected[0].keys()
            for name, value in expected[0].items():
                assert of_rank[number][0][name] == pytest.approx(value, rel=rtol, abs=1e-7), (
                    what,
                    name,
                )
        # Pipeline stages have some each.
        gradient = {name: x for rank in found for name, x in rank[number][1].items()}
        assert relative(gradient, expected[1]) < rtol, what
        assert sum(len(rank[number][3]) for rank in found) == len(expected[3]), what
        for rank in found:
            for key, gaps in rank[number][3].items():
                np.testing.assert_allclose(gaps, expected[3][key], atol=10 * rtol, err_msg=what)
        if expected[2]:
            # Adam's first step is the gradient's sign times the rate, also where it is all noise.
            assert relative(found[0][number][2], expected[2]) < 100 * rtol, what


def relative(found: Weights, expected: Weights) -> float:
    assert found.keys() == expected.keys()
    errors = torch.stack([(found[name] - expected[name]).norm() for name in expected])
    return float(errors.norm() / torch.stack([x.norm() for x in expected.values()]).norm())


FAMILIES = ("qwen3", "llama", "gemma3_text", "qwen3_moe")
HARDER = {
    "pp2": [("deep qwen3", "pp2v2"), ("deep gemma3_text", "pp2v2")],
    # Keys are sent around; with windows, sinks and values of another width they are gathered.
    "cp2": [(f"1-headed {name}", "cp2") for name in ("qwen3", "gemma3_text", "gpt_oss")]
    + [("3-headed qwen3", "cp2"), ("1-headed deepseek_v3", "cp2")],
}


@pytest.mark.parametrize("layout", ["tp2", "cp2", "pp2"])
def test_ranks_share_rows_and_layers(layout: str, tmp_path: Path) -> None:
    cases = [("qwen3", layout), *HARDER.get(layout, [])[:1]]
    routed = ("qwen3_moe", layout, {"routed": True})
    compare(tmp_path, [*((*case, {}) for case in cases), routed])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "cp2", "pp2"])
def test_ranks_share_rows_and_layers_of_all_families(layout: str, tmp_path: Path) -> None:
    families = (*FAMILIES[1:], "mistral", "olmo2", "gpt_oss", "deepseek_v3")
    cases = [*((family, layout) for family in families), *HARDER.get(layout, [])[1:]]
    compare(tmp_path, [(*case, {}) for case in cases])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    rest_slow([("qwen3", "tp2"), ("1-headed qwen3", "cp2"), ("deep qwen3", "pp2v2")]),
)
def test_16_bit_results_ignore_the_layout(model: str, layout: str, tmp_path: Path) -> None:
    compare(tmp_path, [(model, layout, {"dtype": dtype}) for dtype in ("bfloat16", "float16")])


def test_experts_are_split_over_ranks(tmp_path: Path) -> None:
    routed = {"routed": True}
    recomputed = {"gradient_checkpointing": "selective"}
    compare(tmp_path, [("qwen3_moe", "ep2", options) for options in ({}, routed, recomputed)])


@pytest.mark.slow
def test_experts_of_other_families_are_split_over_ranks(tmp_path: Path) -> None:
    compare(tmp_path, [("gpt_oss", "ep2", {"routed": True}), ("deepseek_v3", "ep2", {})])


# Layers pass more than hidden states on.
GEMMA3N = {
    "vocab_size_per_layer_input": 24,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "num_kv_shared_layers": 0,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "activation_sparsity_pattern": [0.0, 0.0],
}


def refused_field(rank: int, world_size: int, directory: Path, *, layout: str) -> str | None:
    """Return the field of the error, None for the error of another rank."""
    with pytest.raises((InvalidValue, RuntimeError)) as refusal:
        make_engine(directory / "model", layout=layout, rank=rank, world_size=world_size)
    return refusal.value.field if isinstance(refusal.value, InvalidValue) else None


@pytest.mark.parametrize(
    ("family", "changes", "layout"),
    [
        ("cohere", {"use_qk_norm": True}, "tp2"),  # norms per head, which its plan does not split
        pytest.param("gemma3n_text", GEMMA3N, "pp2", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_does_more_than_its_plan_is_rejected(
    family: str,
    changes: dict[str, Any],
    layout: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FAMILIES_OF_BENCH, family, changes)
    build_model(tmp_path / "model", family)
    fields = on_ranks(2, partial(refused_field, layout=layout), tmp_path)
    assert "trainer.layout" in fields
    assert {*fields} <= {"trainer.layout", None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        [(name, layout, {}) for layout in ("dp2tp2", "dp2cp2", "dp2x2") for name in FAMILIES],
        [
            *((name, x, {}) for x in ("dp2pp2", "tp2pp2", "cp2pp2") for name in FAMILIES),
            ("deep qwen3", "dp2pp2v2", {"gradient_checkpointing": "full"}),
        ],
        pytest.param(
            [
                *((name, "cp4", {}) for name in ("1-headed qwen3", "2-headed qwen3")),
                *((name, "cp4", {}) for name in ("2-headed gemma3_text", "2-headed gpt_oss")),
                ("qwen3", "cp2tp2", {}),
                *(("qwen3_moe", f"{x}2ep2", {}) for x in ("dp", "tp", "cp")),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["data", "stages", "others"],
)
def test_layouts_compose(cases: list[tuple[str, str, dict[str, Any]]], tmp_path: Path) -> None:
    compare(tmp_path, cases)


@pytest.mark.slow
def test_critics_losses_and_recomputation_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    critic = {"head": "value", "loss": value_loss()}
    loss = clipped_surrogate(0.2, 0.28)
    recomputed: list[dict[str, Any]] = [
        {"loss": loss, "gradient_checkpointing": how} for how in ("selective", "full")
    ]
    cases = [
        (family, layout, options)
        for family, layout in (
            *(("qwen3", "tp2"), ("gemma3_text", "cp2")),
            *(("qwen3", "pp2"), ("deep qwen3", "pp2v2")),
        )
        for options in (critic, *recomputed, {"micro_batch_tokens": 1000})
    ]
    compare(tmp_path, cases)


def resumed(rank: int, world_size: int, directory: Path, *, before: str, after: str) -> Any:
    """Return results of two steps, and of an engine of another layout after the first step.

    The results are outputs of `infer` and published weights.
    """

    def engine(layout: str) -> Any:
        return make_engine(
            directory / "model",
            layout=layout,
            rank=rank,
            world_size=ParallelLayout.parse(layout).num_ranks,
            micro_batch_tokens=60,
            optimizer_state="bfloat16" if "cp2" in (before, after) else "float32",
        )

    def step(one: Any) -> None:
        layout = one.layout
        one.accumulate(MicroBatch(rows=ROWS[layout.data_index(rank) :: layout.num_data]))
        one.optimizer_step()

    first = engine(before)
    step(first)
    saved = weights(first)
    save(first, directory / f"state-{before}")
    second = engine(after)
    second.load(directory / f"state-{before}")
    restored = weights(second)
    for one in (first, second):
        step(one)
    second.export(directory / f"hf-{after}")
    outputs = second.infer(ROWS) if second.layout.counts(rank) else second.infer(ROWS) and None
    return restored, saved, weights(first), weights(second), outputs


def tied_moments(rank: int, world_size: int, directory: Path) -> list[torch.Tensor] | None:
    """Return weights and 16-bit moments of the tied embedding on this stage, after two steps."""
    engine = make_engine(
        directory / "model",
        layout="pp2",
        rank=rank,
        world_size=world_size,
        optimizer_state="bfloat16",
    )
    for _ in range(2):
        engine.accumulate(MicroBatch(rows=ROWS))
        engine.optimizer_step()
    assert engine.role.stage is not None
    weight = engine.role.stage.tied_weight()
    if weight is None:
        return None
    moments = engine.optimizer.moments(weight)
    return [local_part(one).detach().clone() for one in (weight, *(moments[n] for n in MOMENTS))]


@pytest.mark.slow
def test_tied_weights_of_two_stages_are_rounded_alike(tmp_path: Path) -> None:
    build_model(tmp_path / "model", "qwen3", num_layers=2)  # embedding and head are tied
    first, last = on_ranks(2, tied_moments, tmp_path)
    assert first is not None
    assert last is not None
    for one, other in zip(first, last, strict=True):
        assert torch.equal(one, other)
        assert one.abs().sum() > 0


@pytest.mark.parametrize(
    ("before", "after"), rest_slow([("pp2v2", "tp2"), ("tp2", "pp2v2"), ("cp2", "dp2")])
)
def test_a_checkpoint_continues_in_another_layout(before: str, after: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    build_model(tmp_path / "model", "qwen3", num_layers=4)
    found = on_ranks(2, partial(resumed, before=before, after=after), tmp_path)
    restored, saved, expected, again, _ = found[0]
    assert restored.keys() == expected.keys() == again.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in restored.items())
    assert relative(again, expected) < 1e-3
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / f"hf-{after}")
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, again[name])
    (outputs,) = [one[4] for one in found if one[4] is not None][:1]
    plain = make_engine(tmp_path / f"hf-{after}").infer(ROWS)
    for one, other in zip(outputs, plain, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-4)


def inferred(rank: int, world_size: int, directory: Path, *, cases: Sequence[Any]) -> Any:
    """Return by case the outputs for rows before and after a step, with an `infer` before it.

    Then those of two other engines, which ran `infer` before they restored the state from a
    checkpoint and from a snapshot.
    """
    found = []
    for layout, dtype in cases:
        first, second, third = (
            make_engine(
                directory / "model",
                layout=layout,
                dtype=dtype,
                learning_rate=0.05,
                rank=rank,
                world_size=world_size,
                micro_batch_tokens=60,
            )
            for _ in range(3)
        )
        own = ROWS[first.layout.data_index(rank) :: first.layout.num_data]
        outputs = [one.infer(own) for one in (first, second, third)][:1]
        first.accumulate(MicroBatch(rows=own))
        first.infer(own)
        first.optimizer_step()
        name = f"{layout}-{dtype}-{rank}"
        kept = memory(directory / name, first.snapshot_bytes(1)), name
        first.snapshot(first.open_snapshots(*kept))
        save(first, state := directory / f"{layout}-{dtype}")
        second.load(state)
        third.restore(third.open_snapshots(*kept), 1)
        outputs += [one.infer(own) for one in (first, second, third)]
        first.export(directory / f"hf-{layout}-{dtype}")
        found.append((outputs, own))
    return found


@pytest.mark.parametrize(
    "cases",
    [
        [("dp1", "bfloat16")],
        pytest.param(
            [("dp2", "float32"), ("cp2", "float32"), ("cp2", "bfloat16"), ("tp2", "bfloat16")],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one rank", "two ranks"],
)
def test_no_pass_uses_outdated_weights(cases: Sequence[Any], tmp_path: Path) -> None:
    build_model(tmp_path / "model", "qwen3")
    num_ranks = ParallelLayout.parse(cases[0][0]).num_ranks
    found = on_ranks(num_ranks, partial(inferred, cases=cases), tmp_path)[0]
    for (layout, dtype), ((before, *after), rows) in zip(cases, found, strict=True):
        plain = make_engine(tmp_path / f"hf-{layout}-{dtype}").infer(rows)
        near = 1e-4 if dtype == "float32" else 0.1
        for outputs in after:
            for one, other in zip(outputs, after[0], strict=True):
                assert np.array_equal(one, other), (layout, dtype)
            for one, other in zip(outputs, plain, strict=True):
                assert np.abs(one - other).max() < near, (layout, dtype)
        moved = [np.abs(one - other).max() for one, other in zip(before, plain, strict=True)]
        assert max(moved) > 0.5


def fails(inputs: Any) -> Any:
    raise RuntimeError("the loss fails")


@pytest.mark.parametrize("dtype", rest_slow(["bfloat16", "float16"]))
def test_a_failed_pass_leaves_no_outdated_weights(dtype: str, tmp_path: Path) -> None:
    build_model(tmp_path / "model", "qwen3")
    other = make_engine(tmp_path / "model", dtype=dtype, learning_rate=0.1)
    other.accumulate(MicroBatch(rows=ROWS))
    other.optimizer_step()
    save(other, tmp_path / "state")
    expected = other.infer(ROWS)
    unknown = replace(ROWS[0], token_ids=ROWS[0].token_ids + 10**6)
    for fail in (
        lambda engine: engine.infer([unknown]),
        lambda engine: engine.accumulate(MicroBatch(rows=[unknown])),
        lambda engine: engine.accumulate(MicroBatch(rows=ROWS)),
    ):
        engine = make_engine(tmp_path / "model", dtype=dtype, learning_rate=0.1, loss=fails)
        with pytest.raises((RuntimeError, IndexError)):
            fail(engine)
        engine.load(tmp_path / "state")
        for one, plain in zip(engine.infer(ROWS), expected, strict=True):
            assert np.array_equal(one, plain)
