"""Weights sent to another node, whole or as changes, are the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.reallocation.plan import Segment
from rlsys.reallocation.shards import Box
from rlsys.reallocation.transport.changed_bytes import GROUP_BYTES, Changes, apply, changes
from rlsys.reallocation.transport.shared_memory import Bytes, MemoryGone
from rlsys.reallocation.transport.staging import DamagedWeightsError, Share, pack
from rlsys.reallocation.transport.weight_deltas import WHOLE_EVERY, Inbox, Outbox, WeightDelta
from rlsys.types import WeightShare

NUM_ROWS = 400
SEGMENT = Segment(
    buffer="", offset=0, name="w", dtype=torch.bfloat16, box=Box(((0, NUM_ROWS), (0, 16)))
)


@given(
    st.integers(1, 40),
    st.lists(st.integers(0, 40 * GROUP_BYTES - 1), max_size=60),
    st.integers(1, 255),
)
def test_changes_bring_the_older_bytes_to_the_newer(
    num_groups: int, places: list[int], flip: int
) -> None:
    old = np.random.default_rng(0).integers(0, 256, num_groups * GROUP_BYTES, np.uint8)
    new = old.copy()
    new[[place for place in places if place < len(new)]] ^= flip
    apply(changes(old, new), old)
    assert np.array_equal(old, new)


def test_changes_take_few_bytes_where_little_changes() -> None:
    old = np.zeros(100 * GROUP_BYTES, np.uint8)
    new = old.copy()
    new[[0, 1, 2, 5 * GROUP_BYTES]] = 7  # two words of the first group, one of the sixth
    difference = changes(old, new)
    assert difference.values.tolist() == [0x0707, 7, 7]
    # 100 bits of groups, 16 bits for each of two groups, three words.
    assert difference.num_bytes == 13 + 2 * 2 + 3 * 2


def packed(version: int, tensor: torch.Tensor) -> Callable[[], tuple[WeightShare, Bytes]]:
    share = WeightShare(version=version, rank=0, node="a", path="", num_bytes=0, checksum=0)
    return lambda: pack([SEGMENT], share, lambda one: tensor)


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    """Return tensors of which each differs from the one before in one number."""
    tensor = torch.randn(NUM_ROWS, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for number in range(2 * WHOLE_EVERY + 2):
        tensor = tensor.clone()
        tensor[number, 3] += 1
        found.append(tensor)
    return found


def read(share: WeightShare) -> torch.Tensor:
    opened = Share(share)
    opened.verify()
    ((_, part),) = opened.parts()
    part = part.clone()
    opened.close()
    return part


def test_changes_follow_the_first_version_and_regularly_a_whole_one(
    tensors: list[torch.Tensor],
) -> None:
    outbox, inbox = Outbox(), Inbox()
    whole = []
    for version, tensor in enumerate(tensors):
        weight_delta = outbox.weight_delta(
            "b", version - 1 if version else None, packed(version, tensor)
        )
        if weight_delta.base is None:
            whole.append(version)
        else:
            assert weight_delta.num_bytes < 0.1 * tensor.numel() * 2
        assert torch.equal(read(inbox.take(weight_delta)), tensor.to(torch.bfloat16))
    assert whole == [0, WHOLE_EVERY, 2 * WHOLE_EVERY]


def test_a_reader_that_joins_or_missed_a_version_gets_a_whole_one(
    tensors: list[torch.Tensor],
) -> None:
    outbox = Outbox()
    assert outbox.weight_delta("b", None, packed(1, tensors[1])).base is None
    assert outbox.weight_delta("c", 1, packed(2, tensors[2])).base is None  # another place
    assert outbox.weight_delta("b", 0, packed(2, tensors[2])).base is None
    assert outbox.weight_delta("b", 2, packed(3, tensors[3])).base == 2


def test_versions_that_differ_everywhere_are_sent_whole_and_compared_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[int] = []

    def count(old: Bytes, new: Bytes) -> Changes:
        compared.append(len(new))
        return changes(old, new)

    monkeypatch.setattr("rlsys.reallocation.transport.weight_deltas.changes", count)
    outbox = Outbox()
    generator = torch.Generator().manual_seed(0)
    for version in range(1, 2 * WHOLE_EVERY):
        tensor = torch.randn(NUM_ROWS, 16, generator=generator)
        assert outbox.weight_delta("b", version - 1, packed(version, tensor)).base is None
    assert len(compared) == 2


def test_changes_to_a_missing_version_are_refused(tensors: list[torch.Tensor]) -> None:
    outbox, inbox = Outbox(), Inbox()
    first = outbox.weight_delta("b", None, packed(1, tensors[1]))
    second = outbox.weight_delta("b", 1, packed(2, tensors[2]))
    with pytest.raises(DamagedWeightsError):
        inbox.take(second)
    inbox.take(first)
    inbox.take(second)
    with pytest.raises(DamagedWeightsError):
        inbox.take(second)


def test_changes_to_a_share_of_another_layout_are_refused(tensors: list[torch.Tensor]) -> None:
    """A restarted trainer publishes its first version again, maybe in another layout."""
    half = replace(SEGMENT, box=Box(((0, NUM_ROWS // 2), (0, 16))))
    share = WeightShare(version=1, rank=0, node="a", path="", num_bytes=0, checksum=0)
    before, content = pack([half], share, lambda one: tensors[1][one.box.slices])
    outbox, inbox = Outbox(), Inbox()
    inbox.take(WeightDelta(share=before, content=content))
    outbox.weight_delta("b", None, packed(1, tensors[1]))
    weight_delta = outbox.weight_delta("b", 1, packed(2, tensors[2]))
    assert weight_delta.base == 1
    with pytest.raises(DamagedWeightsError):
        inbox.take(weight_delta)
    inbox.take(outbox.weight_delta("b", None, packed(2, tensors[2])))


def test_weights_of_removed_ranks_are_released(tensors: list[torch.Tensor]) -> None:
    inbox = Inbox()
    for rank in (0, 1):
        share, content = packed(1, tensors[1])()
        received = inbox.take(WeightDelta(share=replace(share, rank=rank), content=content))
    inbox.keep([0])
    with pytest.raises(MemoryGone):
        Share(received)


def test_damage_on_the_way_is_found(tensors: list[torch.Tensor]) -> None:
    share, content = packed(1, tensors[1])()
    content[-1] ^= 1
    inbox = Inbox()
    with pytest.raises(DamagedWeightsError) as found:
        read(inbox.take(WeightDelta(share=share, content=content)))
    assert "in 1 of its 1 " in str(found.value)
    again, content = packed(1, tensors[1])()
    received = inbox.take(WeightDelta(share=again, content=content))
    assert torch.equal(read(received), tensors[1].to(torch.bfloat16))
    with pytest.raises(MemoryGone):
        Share(share)  # it has no path
