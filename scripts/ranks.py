"""Ranks as processes on this machine, for what is measured or tested of several."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from rlsys.engines.causal_lm import hide_progress_bars
from rlsys.engines.training.ranks import init_process_group

TIMEOUT_S = 120.0  # of every collective


def on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(rank, num_ranks, *arguments)` gives on each rank: processes of one thread that
    have met over gloo."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / str(rank) for rank in range(num_ranks)]
        spawn(_rank, (port, files, function, arguments), nprocs=num_ranks)
        return [pickle.loads(file.read_bytes()) for file in files]


def _rank(
    rank: int,
    port: int,
    files: Sequence[Path],
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    torch.set_num_threads(1)
    hide_progress_bars()
    init_process_group(rank, len(files), "127.0.0.1", port, "cpu", TIMEOUT_S)
    try:
        result = function(rank, len(files), *arguments)
    finally:
        dist.destroy_process_group()
    files[rank].write_bytes(pickle.dumps(result))
    # An ordinary end takes torch down while threads of its own may still run: one in some hundred
    # of them aborted.
    os._exit(0)
