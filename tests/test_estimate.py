"""How much memory a run takes, by hand."""

from __future__ import annotations

import pytest

import rlsys
from recipes.grpo import GRPOConfig, grpo
from rlsys.config import AsyncConfig, ClusterConfig, DataConfig, SamplingConfig
from rlsys.estimate import row_bytes, store_bytes

# Prompt; token ids, log-probabilities and versions; padding of the block.
ROW_BYTES = 1000 * 4 + 3 * 4000 * 4 + 64


@pytest.mark.parametrize(
    ("prompts_per_step", "group_size", "max_staleness", "over_issue", "store_gib", "expected"),
    [
        (2, 2, 0, 0, 4.0, 64 << 20),  # the least
        # 64 · 2 + 8 groups of 8, twice over, of which half the memory is promised to rows.
        (64, 8, 1, 8, 4.0, 136 * 8 * ROW_BYTES * 4),
        (64, 8, 1, 0, 0.125, 128 << 20),  # the most
    ],
)
def test_the_store_has_room_for_what_can_be_in_flight(
    prompts_per_step: int,
    group_size: int,
    max_staleness: int,
    over_issue: int,
    store_gib: float,
    expected: int,
) -> None:
    config = GRPOConfig(
        prompts_per_step=prompts_per_step,
        group_size=group_size,
        asynchrony=AsyncConfig(
            max_staleness=max_staleness, over_issue=over_issue, order="complete"
        ),
        data=DataConfig(max_prompt_tokens=1000),
        sampling=SamplingConfig(max_tokens=4000),
        cluster=ClusterConfig(store_gib=store_gib),
    )
    flow: rlsys.Dataflow = grpo(config, [lambda rollout: 1.0])
    assert row_bytes(config, flow) == ROW_BYTES
    assert store_bytes(config, flow) == expected
