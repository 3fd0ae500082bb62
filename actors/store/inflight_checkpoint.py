"""Rollouts of unfinished groups, saved from the store into a checkpoint and restored.

OpenWork (cells) ──save──► rollouts.npz ──load──► OpenWork (new cells, in the resumed run)
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import ray

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.controller.state import OpenWork
from rlsys.controller.worker_protocols import FinishedRollout, RolloutText, RowsLost, StepPart
from rlsys.dataflow.graph.stages import SEATS_COLUMN
from rlsys.dataflow.store.blocks import BlockRef, ColumnRef, Columns
from rlsys.dataflow.store.rollout_archive import (
    COLUMNS,
    EXTRA_COLUMNS,
    SavedRollout,
    read_rollouts,
    write_rollouts,
)
from rlsys.environments.turn_columns import num_by_seat
from rlsys.rewards import RewardResult
from rlsys.runs.checkpoint import ROLLOUTS_FILE
from rlsys.types import FinishReason, Sampled

from .store_actor import StoreAddress, StoreClient, put_on_node

PART_COLUMNS = tuple(name for name in COLUMNS if name != "prompt_token_ids")


async def save(work: OpenWork, client: StoreClient, directory: Path) -> None:
    """Save rollouts into a checkpoint's directory.

    The caller must keep the rows of the cells until this returns. If a shard of the store has just
    died, no rollouts are saved, since they are sampled again anyway.
    """
    cells = [rollout.cell for rollout in work.finished]
    by_request: defaultdict[str, list[ColumnRef]] = defaultdict(list)
    for part in work.parts:
        by_request[part.request_id].append(part.cell)
    extra = _extra_columns([*cells, *(part.cell for part in work.parts)])
    partial_columns = (*PART_COLUMNS, *extra)
    try:
        whole = await client.get_async(cells, (*COLUMNS, *extra)) if cells else {}
        running = [await client.get_async(parts, partial_columns) for parts in by_request.values()]
    except RowsLost:
        await asyncio.to_thread(write_rollouts, directory / ROLLOUTS_FILE, [])
        return

    def write() -> None:
        finished = [
            SavedRollout(
                request_id=rollout.request_id,
                finish_reason=rollout.finish_reason,
                prompt_token_ids=whole["prompt_token_ids"][i],
                token_ids=whole["token_ids"][i],
                sampler_logprobs=whole["sampler_logprobs"][i],
                policy_versions=whole["policy_versions"][i],
                extra={name: whole[name][i] for name in extra},
                result=_result_json(rollout),
            )
            for i, rollout in enumerate(work.finished)
        ]
        partial = [
            SavedRollout(
                request_id=request_id,
                finish_reason="",
                prompt_token_ids=np.zeros(0, np.int32),
                token_ids=np.concatenate(columns["token_ids"]),
                sampler_logprobs=np.concatenate(columns["sampler_logprobs"]),
                policy_versions=np.concatenate(columns["policy_versions"]),
                extra={name: np.concatenate(columns[name]) for name in extra},
            )
            for request_id, columns in zip(by_request, running, strict=True)
        ]
        write_rollouts(directory / ROLLOUTS_FILE, [*finished, *partial])

    await asyncio.to_thread(write)


async def load(directory: Path, address: StoreAddress, *, nodes: Sequence[str]) -> OpenWork:
    """Load the rollouts of a checkpoint into the store, spread over `nodes`.

    `nodes` are those of the first replicas; if empty, this node is used. Rollouts for a node that
    has died are left out and sampled again.

    Raises:
        ValueError: The file is damaged.
    """
    path = directory / ROLLOUTS_FILE
    if not path.exists():
        return OpenWork()
    saved = await asyncio.to_thread(read_rollouts, path)
    here = ray.get_runtime_context().get_node_id()
    node_of = _spread(saved, nodes or [here])
    by_node: defaultdict[str, list[SavedRollout]] = defaultdict(list)
    for rollout in saved:
        by_node[node_of[_group_of(rollout)]].append(rollout)
    finished: list[FinishedRollout] = []
    parts: list[StepPart] = []
    for node, rollouts in by_node.items():
        rows = [_columns(rollout) for rollout in rollouts]
        try:
            blocks = await put_on_node(node, rows, address)
        except RowsLost:
            continue
        _add_restored(rollouts, blocks, finished, parts)
    return OpenWork(finished=finished, parts=parts, nodes=node_of)


def _columns(rollout: SavedRollout) -> Columns:
    names = tuple(COLUMNS) if rollout.finish_reason else PART_COLUMNS
    return {
        **{name: [getattr(rollout, name)] for name in names},
        **{name: [values] for name, values in rollout.extra.items()},
    }


def _extra_columns(cells: Sequence[ColumnRef]) -> tuple[str, ...]:
    """Return the columns that the run's rollouts have in addition to COLUMNS."""
    present = {name for block, _ in cells for name in block.layout.columns}
    return tuple(name for name in EXTRA_COLUMNS if name in present)


def _result_json(rollout: FinishedRollout) -> str:
    """Return an episode's result and the text of a recorded rollout as JSON, or "" for neither."""
    result = rollout.outcome if isinstance(rollout.outcome, RewardResult) else None
    if result is None and rollout.text is None:
        return ""
    entries = {"outcome": result, "text": rollout.text}
    return dump_json({name: one and asdict(one) for name, one in entries.items()})


def _parse_result(result_json: str) -> tuple[RewardResult | None, RolloutText | None]:
    if not result_json:
        return None, None
    read = parse_json(result_json)
    outcome, text = read["outcome"], read["text"]
    return outcome and RewardResult(**outcome), text and RolloutText(**text)


def _num_by_seat(rollout: SavedRollout) -> tuple[int, ...]:
    seats = rollout.extra.get(SEATS_COLUMN)
    return () if seats is None else num_by_seat(rollout.policy_versions, seats)


def _group_of(rollout: SavedRollout) -> int:
    return int(rollout.request_id.split(".")[0])


def _spread(saved: Sequence[SavedRollout], nodes: Sequence[str]) -> dict[int, str]:
    """Return a node for each group, so that all nodes have about the same number of tokens."""
    num_tokens: Counter[int] = Counter()
    for rollout in saved:
        num_tokens[_group_of(rollout)] += len(rollout.token_ids)
    held = dict.fromkeys(nodes, 0)
    node_of: dict[int, str] = {}
    for group_id in sorted(num_tokens):
        node = min(held, key=held.__getitem__)
        held[node] += num_tokens[group_id]
        node_of[group_id] = node
    return node_of


def _add_restored(
    rollouts: Sequence[SavedRollout],
    blocks: Sequence[BlockRef],
    finished: list[FinishedRollout],
    parts: list[StepPart],
) -> None:
    for rollout, block in zip(rollouts, blocks, strict=True):
        sampled = Sampled.of(rollout.policy_versions)
        outcome, text = _parse_result(rollout.result)
        if rollout.finish_reason:
            finished.append(
                FinishedRollout(
                    request_id=rollout.request_id,
                    cell=(block, 0),
                    num_prompt_tokens=len(rollout.prompt_token_ids),
                    num_tokens=len(rollout.token_ids),
                    min_version=sampled.oldest,
                    max_version=sampled.newest,
                    num_injected=sampled.num_injected,
                    num_by_seat=_num_by_seat(rollout),
                    finish_reason=FinishReason(rollout.finish_reason),
                    outcome=outcome,
                    text=text,
                )
            )
        else:
            parts.append(
                StepPart(
                    request_id=rollout.request_id,
                    start=0,
                    cell=(block, 0),
                    num_tokens=len(rollout.token_ids),
                    min_version=sampled.oldest,
                )
            )
