"""Versions of tokens that vLLM marks with those of all policies of an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlsys.engines.generation.vllm.vllm_requests import (
    adapter_number,
    generation,
    partial_generation,
    version_label,
)


def completion() -> Any:
    """Return three tokens: the second policy was updated after the first, then the first one."""
    labels = [version_label(versions) for versions in ([3, 7], [3, 8], [4, 8])]
    return SimpleNamespace(
        token_ids=[5, 6, 7],
        logprobs=SimpleNamespace(logprobs=[-1.0, -1.0, -1.0]),
        weight_versions=[
            SimpleNamespace(version=label, start=place, end=place + 1)
            for place, label in enumerate(labels)
        ],
        finish_reason="stop",
    )


@pytest.mark.parametrize(("policy", "expected"), [(0, [3, 3, 4]), (1, [7, 8, 8])])
def test_a_token_has_the_version_of_its_own_policy(policy: int, expected: list[int]) -> None:
    assert generation("a", completion(), policy).policy_versions.tolist() == expected
    running = SimpleNamespace(
        external_req_id="a",
        lora_request=SimpleNamespace(lora_int_id=adapter_number(policy)),
        _new_completion_output=lambda *_: completion(),
        _weight_version_spans=lambda: completion().weight_versions,
    )
    assert partial_generation(running).policy_versions.tolist() == expected


def test_without_adapters_there_is_one_policy() -> None:
    made = completion()
    for span, version in zip(made.weight_versions, "344", strict=True):
        span.version = version
    assert generation("a", made).policy_versions.tolist() == [3, 4, 4]
    running = SimpleNamespace(
        external_req_id="a",
        lora_request=None,
        _new_completion_output=lambda *_: made,
        _weight_version_spans=lambda: made.weight_versions,
    )
    assert partial_generation(running).policy_versions.tolist() == [3, 4, 4]
