"""Differences between the configurations of a run, and which of them a resume allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.config.vllm_arguments import VLLM_ARGUMENTS

# What a resumed run may change: where and how fast it runs, what it shows, how long it trains. All
# other fields affect its numbers, and a run is one experiment.
MAY_CHANGE = {
    "name",
    "runs_dir",
    "resume",
    "num_steps",
    "checkpoint_every",
    "keep_checkpoints",
    "keep_every",
    "stop_when",
    "push_to",
    "profile_steps",
    "evaluation",
    "observe",
    "trackers",
    "cluster",
    "model.gradient_checkpointing",
    "rollout.num_replicas",
    "rollout.borrow",
    "rollout.tensor_parallel",
    "rollout.max_running",
    "rollout.speculation",
    *(f"rollout.vllm.{name}" for name, one in VLLM_ARGUMENTS.items() if one.kind == "passed"),
    "rollout.kv_cache_gib",
    "rollout.gpu_memory_frac",
    "rollout.num_cpus",
    "rollout.num_gpus",
    "rollout.weight_transport",
    "rollout.urls",
    "trainer.layout",
    "trainer.num_ranks",  # of runs that predate layouts
    "trainer.micro_batch_tokens",
    "trainer.snapshot_every",
    "trainer.num_cpus",
    "trainer.num_gpus",
    "reward.num_workers",
    "reward.concurrency",
    "reward.timeout_s",
}


def may_change(field: str) -> bool:
    """Return whether a resumed run may have another value of a field."""
    parts = field.split(".")
    return any(".".join(parts[:end]) in MAY_CHANGE for end in range(1, len(parts) + 1))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the leaf fields ("trainer.learning_rate") that differ, with both values as JSON.

    The value is "unset" where one side lacks the field.
    """
    old, new = leaves_of(before), leaves_of(now)
    return {
        field: (_shown(field, old), _shown(field, new))
        for field in sorted(old.keys() | new.keys())
        if field not in old or field not in new or old[field] != new[field]
    }


def leaves_of(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the fields of a configuration by dotted name, as JSON gives them back."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= leaves_of(value, f"{prefix}{key}.")
        else:  # by way of JSON: a tuple and the list that it is read back as are the same
            leaves[f"{prefix}{key}"] = parse_json(dump_json(value))
    return leaves


def _shown(field: str, leaves: Mapping[str, Any]) -> str:
    return dump_json(leaves[field]) if field in leaves else "unset"
