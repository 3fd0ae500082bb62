"""Memory of tensors is released and allocated again."""

from __future__ import annotations

import torch

from rlsys.engines.devices.offload import HostMemory, Offloaded, OffloadedMemory

PAGES = 1 << 16  # numbers: several pages of memory


def test_offloaded_numbers_are_restored_in_all_views() -> None:
    whole = torch.arange(4 * PAGES, dtype=torch.float32)
    view, other = whole[PAGES : 2 * PAGES].view(2, -1), torch.randn(PAGES).to(torch.bfloat16)
    whole.numpy()  # from now on its storage cannot be resized
    expected = [one.clone() for one in (whole, view, other)]
    host: HostMemory = {}
    for _ in range(2):
        offloaded = Offloaded([view, other, whole], host)
        assert whole[PAGES:-PAGES].count_nonzero() == 0
        offloaded.take_back()
        assert all(map(torch.equal, (whole, view, other), expected))
    assert len(host) == 2


def test_memory_next_to_released_memory_is_kept() -> None:
    others = [torch.ones(3) for _ in range(64)]
    OffloadedMemory([torch.randn(1000) for _ in range(64)]).take_back()
    assert all(one.tolist() == [1, 1, 1] for one in others)
