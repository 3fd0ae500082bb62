"""Boxes that a loader copies, and that copying the boxes gives the loader's result."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.reallocation.loader_trace import Copy, CopyRecorder, NotCopied, joined
from rlsys.reallocation.shards import Box

Tensors = Mapping[str, torch.Tensor]
Load = Callable[[Tensors, Tensors], None]


def recorded(load: Load, sources: Tensors, targets: Tensors) -> CopyRecorder:
    recorder = CopyRecorder(
        meta_sources := {name: one.to("meta") for name, one in sources.items()},
        meta_targets := {name: one.to("meta") for name, one in targets.items()},
    )
    with recorder:
        load(meta_sources, meta_targets)
    return recorder


def assert_same_effect(load: Load, sources: Tensors, targets: Tensors) -> list[Copy]:
    """Assert that the recorded copies have the effect of the loader, and return them."""
    recorder = recorded(load, sources, targets)
    expected = {name: one.clone() for name, one in targets.items()}
    load(sources, expected)
    for copies in (recorder.copies, joined(recorder.copies)):
        found = {name: one.clone() for name, one in targets.items()}
        for name, box in recorder.fills:
            found[name][box.slices] = 0
        for copy in copies:
            part = sources[copy.source][copy.source_box.slices]
            found[copy.target][copy.target_box.slices] = copy.arranged(part)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    return recorder.copies


def numbers(*shape: int, start: int = 1) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_fused_projections_and_a_padded_vocabulary() -> None:
    def load(sources: Tensors, targets: Tensors) -> None:
        qkv, embedding = targets["qkv"], targets["embedding"]
        qkv.narrow(0, 0, 4).copy_(sources["q"].narrow(0, 4, 4))
        qkv[4:6].copy_(sources["k"][2:4])
        embedding[:5].copy_(sources["embedding"])
        embedding[5:].fill_(0)

    sources = {"q": numbers(8, 6), "k": numbers(4, 6, start=100), "embedding": numbers(5, 3)}
    targets = {"qkv": torch.zeros(6, 6), "embedding": torch.ones(8, 3)}
    copies = assert_same_effect(load, sources, targets)
    assert copies[0] == Copy("q", Box(((4, 8), (0, 6))), "qkv", Box(((0, 4), (0, 6))), order=(0, 1))
    assert recorded(load, sources, targets).fills == [("embedding", Box(((5, 8), (0, 3))))]


def test_experts_in_one_tensor_or_in_several() -> None:
    def load(sources: Tensors, targets: Tensors) -> None:
        for expert in range(3):
            targets["apart"][expert].copy_(sources[f"{expert}"])
            targets["turned"][expert].copy_(sources["together"][expert].t())
        targets["flat"].copy_(sources["together"].reshape(12, 5))

    sources = {f"{expert}": numbers(4, 5, start=100 * expert) for expert in range(3)}
    sources["together"] = numbers(3, 4, 5, start=1000)
    targets = {
        "apart": torch.zeros(3, 4, 5),
        "turned": torch.zeros(3, 5, 4),
        "flat": torch.zeros(12, 5),
    }
    copies = assert_same_effect(load, sources, targets)
    assert {copy.order for copy in copies if copy.target == "turned"} == {(0, 2, 1)}
    whole = Copy("together", Box.whole((3, 4, 5)), "turned", Box.whole((3, 5, 4)), order=(0, 2, 1))
    assert [copy for copy in joined(copies) if copy.target == "turned"] == [whole]


def test_gate_and_up_of_a_slice_of_each_expert_are_two_copies() -> None:
    def load(sources: Tensors, targets: Tensors) -> None:
        for expert in range(3):
            for half, part in enumerate(sources["together"][expert].chunk(2)):
                targets["w13"][expert, 2 * half : 2 * half + 2].copy_(part[2:4])

    sources, targets = {"together": numbers(3, 8, 5)}, {"w13": torch.zeros(3, 4, 5)}
    copies = assert_same_effect(load, sources, targets)
    assert len(copies) == 6
    assert [copy.target_box.bounds for copy in joined(copies)] == [
        ((0, 3), (0, 2), (0, 5)),
        ((0, 3), (2, 4), (0, 5)),
    ]


def test_copies_that_continue_along_different_dimensions_are_not_joined() -> None:
    def load(sources: Tensors, targets: Tensors) -> None:
        for column in range(2):
            targets["w"][:, column].copy_(sources["w"].narrow(1, 3 * column, 3)[0])

    copies = assert_same_effect(load, {"w": numbers(1, 6, 4)}, {"w": torch.zeros(3, 2, 4)})
    assert joined(copies) == copies
    assert len(copies) == 2


def test_heads_with_interleaved_query_key_and_value() -> None:
    def load(sources: Tensors, targets: Tensors) -> None:
        per_head = sources["qkv"].view(4, 3, 2, 5)
        for number, name in enumerate("qkv"):
            targets[name].copy_(per_head[:, number].reshape(8, 5))  # reshape makes a clone

    targets = {name: torch.zeros(8, 5) for name in "qkv"}
    copies = assert_same_effect(load, {"qkv": numbers(24, 5)}, targets)
    assert len(copies) == 12
    assert copies[1].source_box == Box(((6, 8), (0, 5)))


def test_clones_are_traced_to_their_source() -> None:
    def load(sources: Tensors, targets: Tensors) -> None:
        transposed = sources["w"].t().contiguous()
        half = transposed.to(torch.float64)[1:]
        targets["w"].copy_(half[:, ::2])

    assert_same_effect(load, {"w": numbers(4, 3)}, {"w": torch.zeros(2, 2)})


def test_scalars_and_single_rows() -> None:
    def load(sources: Tensors, targets: Tensors) -> None:
        targets["scalar"].copy_(sources["scalar"])
        targets["one"].copy_(sources["one"])
        targets["row"][2].copy_(sources["column"][:, 0])

    sources = {"scalar": torch.tensor(7.0), "one": numbers(1), "column": numbers(4, 1)}
    targets = {"scalar": torch.tensor(0.0), "one": torch.zeros(1), "row": torch.zeros(3, 4)}
    assert_same_effect(load, sources, targets)


@pytest.mark.parametrize(
    "load",
    [
        lambda s, t: t["w"].copy_(s["w"] + 1),
        lambda s, t: t["w"].copy_(torch.cat((s["w"][:2], s["w"][2:]))),
        lambda s, t: t["w"].copy_(s["w"][:1]),
        lambda s, t: torch.empty(4, 3, device="meta").copy_(s["w"]),
    ],
    ids=["computed", "concatenated", "repeated", "into its own tensor"],
)
def test_operations_that_are_not_copies_are_refused(load: Load) -> None:
    with pytest.raises(NotCopied):
        recorded(load, {"w": numbers(4, 3)}, {"w": torch.zeros(4, 3)})


@st.composite
def views(draw: st.DrawFn, tensor: str) -> list[tuple[str, tuple[int, ...]]]:
    """Draw operations that a loader may apply, adapted to a tensor by `applied`."""
    names = ["narrow", "transpose", "select", "chunk", "split", "contiguous", "unsqueeze"]
    integers = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9))
    return draw(st.lists(st.tuples(st.sampled_from(names), integers), max_size=5))


def applied(tensor: torch.Tensor, operations: list[tuple[str, tuple[int, ...]]]) -> torch.Tensor:
    for name, (a, b, c) in operations:
        if name == "contiguous":
            tensor = tensor.contiguous()
        elif name == "unsqueeze":
            tensor = tensor.unsqueeze(a % (tensor.dim() + 1))
        elif tensor.dim():
            dim = a % tensor.dim()
            size = tensor.shape[dim]
            if name == "narrow":
                start = b % size
                tensor = tensor.narrow(dim, start, 1 + c % (size - start))
            elif name == "transpose":
                tensor = tensor.transpose(dim, b % tensor.dim())
            elif name == "select":
                tensor = tensor.select(dim, b % size)
            elif name == "chunk" and size % 2 == 0:
                tensor = tensor.chunk(2, dim)[b % 2]
            elif name == "split" and size % 2 == 0:
                tensor = tensor.unflatten(dim, (2, size // 2))
    return tensor


@given(
    shape=st.lists(st.sampled_from([1, 2, 4, 6]), min_size=1, max_size=3),
    operations=views("source"),
    targeted=views("target"),
)
def test_any_chain_of_views_is_recorded(
    shape: list[int],
    operations: list[tuple[str, tuple[int, ...]]],
    targeted: list[tuple[str, tuple[int, ...]]],
) -> None:
    source = numbers(*shape)
    part = applied(source, operations)
    # A target that contains a view of the part's shape.
    whole = torch.zeros([size + 2 for size in part.shape])

    def load(sources: Tensors, targets: Tensors) -> None:
        target = targets["w"]
        for dim, size in enumerate(part.shape):
            target = target.narrow(dim, 1, size)
        taken = applied(sources["w"], operations)
        inner = [one for one in targeted if one[0] not in ("contiguous", "unsqueeze")]
        applied(target, inner).copy_(applied(taken, inner))

    assert_same_effect(load, {"w": source}, {"w": whole})
