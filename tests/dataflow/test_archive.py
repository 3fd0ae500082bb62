"""Round trips of rollouts through a checkpoint's file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlsys.dataflow.store.rollout_archive import (
    COLUMNS,
    SavedRollout,
    read_rollouts,
    write_rollouts,
)
from tests.errors import invalid


def rollout(
    request_id: str, reason: str, *, num_prompt_tokens: int, num_tokens: int
) -> SavedRollout:
    rng = np.random.default_rng(num_tokens)
    return SavedRollout(
        request_id=request_id,
        finish_reason=reason,
        prompt_token_ids=rng.integers(0, 99, num_prompt_tokens, np.int32),
        token_ids=rng.integers(0, 99, num_tokens, np.int32),
        sampler_logprobs=rng.normal(size=num_tokens).astype(np.float32),
        policy_versions=np.full(num_tokens, 7, np.int32),
    )


def test_what_is_written_is_read_to_the_last_bit(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.npz"
    saved = [
        rollout("3.0.1", "stop", num_prompt_tokens=4, num_tokens=5),
        rollout("3.1.1", "", num_prompt_tokens=0, num_tokens=2),
        rollout("12.0.0", "length", num_prompt_tokens=1, num_tokens=0),
    ]
    write_rollouts(path, saved)
    for before, after in zip(saved, read_rollouts(path), strict=True):
        assert (before.request_id, before.finish_reason) == (after.request_id, after.finish_reason)
        for name, dtype in COLUMNS.items():
            assert getattr(after, name).dtype == dtype
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name))


def test_experts_are_kept_where_they_were_recorded(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.npz"
    saved = [
        replace(
            rollout(f"{n}.0.0", "stop", num_prompt_tokens=2, num_tokens=n),
            extra={"routed_experts": np.arange(2 * (1 + n), dtype=np.uint8)},
        )
        for n in (1, 4)
    ]
    write_rollouts(path, saved)
    for before, after in zip(saved, read_rollouts(path), strict=True):
        assert list(after.extra) == ["routed_experts"]
        assert after.extra["routed_experts"].dtype == np.uint8
        np.testing.assert_array_equal(after.extra["routed_experts"], before.extra["routed_experts"])


def test_what_an_episode_was_worth_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.npz"
    one = rollout("1.0.0", "stop", num_prompt_tokens=2, num_tokens=3)
    extra = {
        "turn_rewards": np.array([0, -0.5, 1], np.float32),
        "branches": np.array([3, -1, 2, 0], np.int32),
    }
    write_rollouts(path, [replace(one, extra=extra, result='{"outcome": 1}')])
    (after,) = read_rollouts(path)
    assert after.result == '{"outcome": 1}'
    assert {name: values.tolist() for name, values in after.extra.items()} == {
        "turn_rewards": [0, -0.5, 1],
        "branches": [3, -1, 2, 0],
    }


def test_nothing_is_a_file_too(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.npz", [])
    assert read_rollouts(tmp_path / "rollouts.npz") == []


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04 cut off"])
def test_a_damaged_file_is_named_with_the_way_out(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rollouts.npz"
    path.write_bytes(content)
    with invalid(str(path)):
        read_rollouts(path)
