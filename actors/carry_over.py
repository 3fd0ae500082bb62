"""Rollouts of groups that have not ended, from the store into a checkpoint and back.

OpenWork (cells) ──save──► rollouts.npz ──load──► OpenWork (other cells, of the resumed run)
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import numpy as np

from rlsys.controller import OpenWork
from rlsys.dataflow.archive import COLUMNS, SavedRollout, read_rollouts, write_rollouts
from rlsys.dataflow.blocks import Cell
from rlsys.types import FinishReason
from rlsys.workers import FinishedRollout, Part, RowsLost

from .store import StoreClient

FILE = "rollouts.npz"
PART_COLUMNS = tuple(name for name in COLUMNS if name != "prompt_token_ids")


async def save(work: OpenWork, client: StoreClient, directory: Path) -> None:
    """Into a checkpoint's directory. The cells' bytes must stay until this returns. Where a shard
    of the store has just died, its rollouts are left out: they are sampled again anyway."""
    cells = [rollout.cell for rollout in work.finished]
    by_request: defaultdict[str, list[Cell]] = defaultdict(list)
    for part in work.parts:
        by_request[part.request_id].append(part.cell)
    try:
        whole = await client.get_async(cells, tuple(COLUMNS)) if cells else {}
        running = [await client.get_async(parts, PART_COLUMNS) for parts in by_request.values()]
    except RowsLost:
        await asyncio.to_thread(write_rollouts, directory / FILE, [])
        return

    def write() -> None:
        finished = [
            SavedRollout(
                request_id=rollout.request_id,
                finish_reason=rollout.finish_reason,
                **{name: whole[name][i] for name in COLUMNS},
            )
            for i, rollout in enumerate(work.finished)
        ]
        partial = [
            SavedRollout(
                request_id=request_id,
                finish_reason="",
                prompt_token_ids=np.zeros(0, np.int32),
                **{name: np.concatenate(columns[name]) for name in PART_COLUMNS},
            )
            for request_id, columns in zip(by_request, running, strict=True)
        ]
        write_rollouts(directory / FILE, [*finished, *partial])

    await asyncio.to_thread(write)


async def load(directory: Path, client: StoreClient) -> OpenWork:
    """Out of a checkpoint's directory into the store. Raises ValueError for a damaged file."""
    path = directory / FILE
    if not path.exists():
        return OpenWork()
    saved = await asyncio.to_thread(read_rollouts, path)
    finished: list[FinishedRollout] = []
    parts: list[Part] = []
    for rollout in saved:
        columns = tuple(COLUMNS) if rollout.finish_reason else PART_COLUMNS
        block = await client.put_async({name: [getattr(rollout, name)] for name in columns})
        versions = rollout.policy_versions
        if rollout.finish_reason:
            finished.append(
                FinishedRollout(
                    request_id=rollout.request_id,
                    cell=(block, 0),
                    num_prompt_tokens=len(rollout.prompt_token_ids),
                    num_tokens=len(rollout.token_ids),
                    min_version=int(versions.min(initial=np.iinfo(np.int32).max)),
                    max_version=int(versions.max(initial=0)),
                    finish_reason=FinishReason(rollout.finish_reason),
                )
            )
        else:
            parts.append(
                Part(
                    request_id=rollout.request_id,
                    start=0,
                    cell=(block, 0),
                    num_tokens=len(rollout.token_ids),
                    min_version=int(versions.min()),
                )
            )
    return OpenWork(finished=finished, parts=parts)
