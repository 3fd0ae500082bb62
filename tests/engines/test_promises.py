"""Lazy tensors give the values of their operations, and read no more than these depend on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from rlsys.engines.models.lazy_tensors import PIECE_BYTES, Index, LazyTensor, pieces, sources

NUMBERS = torch.arange(24).view(2, 3, 4).to(torch.bfloat16)  # two files [3, 4]
PART = (slice(1, 2), slice(2, 5), slice(0, 3))


class Files:
    """Two sources that count the numbers read from each."""

    def __init__(self) -> None:
        self.num_read = [0, 0]
        self.tensors = [
            LazyTensor((3, 4), torch.bfloat16, partial(self._read, number)) for number in range(2)
        ]

    def _read(self, number: int, index: Index) -> torch.Tensor:
        part = NUMBERS[number][index]
        self.num_read[number] += part.numel()
        return part


def fused(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return [2, 6, 4], as transformers fuses the matrices of two experts."""
    gate = torch.stack([one.to(torch.float32), other.to(torch.float32)])
    return torch.cat([gate, gate + 1], dim=1)


def interleaved(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    both = fused(one, other)
    return both.reshape(2, 2, 3, 4).transpose(1, 2).reshape(2, 6, 4).contiguous()


def second_half(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    wide = torch.cat([fused(one, other)] * 2, dim=-2)
    return torch.chunk(wide, 2, dim=1)[1].transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("make", [fused, interleaved, second_half])
def test_parts_of_a_result_are_those_of_the_whole(make: Callable[..., torch.Tensor]) -> None:
    made, expected = make(*Files().tensors), make(*NUMBERS)
    assert isinstance(made, LazyTensor)
    assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(made.read(PART), expected[PART])
    assert torch.equal(torch.nn.Parameter(made).read(), expected)  # type: ignore[attr-defined]


def test_only_the_needed_parts_are_read() -> None:
    files = Files()
    stacked = torch.stack([one.to(torch.float32) for one in files.tensors])
    stacked.read((slice(1, 2), slice(0, 2), slice(0, 4)))  # type: ignore[attr-defined]
    assert files.num_read == [0, 8]
    below = torch.cat((files.tensors[0], files.tensors[1])).transpose(0, 1)
    below.read((slice(0, 2), slice(2, 3)))  # type: ignore[attr-defined]
    assert files.num_read == [2, 8]


def test_a_result_knows_its_sources() -> None:
    files = Files()
    found = sources(fused(*files.tensors))  # type: ignore[arg-type]
    assert {id(one) for one in found} == {id(one) for one in files.tensors}
    (itself,) = sources(files.tensors[0])
    assert itself is files.tensors[0]


def test_lazy_tensors_are_compared_by_value_and_never_changed() -> None:
    one, other = Files().tensors
    assert torch.equal(one, Files().tensors[0])
    assert torch.equal(one, NUMBERS[0])
    assert not torch.equal(one, other)
    with pytest.raises(NotImplementedError) as found:
        one.zero_()
    assert "zero_" in str(found.value)


def test_pieces_follow_one_another() -> None:
    rows = PIECE_BYTES // 400  # a row has 100 numbers of 4 bytes
    index = (slice(5, 5 + 2 * rows + 1), slice(10, 110))
    firsts = [piece[0] for piece in pieces(index, 4)]
    assert firsts == [
        slice(5, 5 + rows),
        slice(5 + rows, 5 + 2 * rows),
        slice(5 + 2 * rows, 6 + 2 * rows),
    ]
    assert list(pieces((), 4)) == [()]
