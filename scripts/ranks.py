"""Ranks as processes on this machine, for measurements and tests."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing import get_context, set_forkserver_preload
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from rlsys.engines.models.causal_lm import hide_progress_bars
from rlsys.engines.training.ranks import init_process_group

TIMEOUT_S = 120.0  # of each collective

# Ranks are forked from a process that has imported these; the imports take seconds.
PRELOAD = [
    "scripts.ranks",
    "rlsys.engines.training.fsdp_engine",
    "torch._dynamo.variables",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
]


def on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the results of `function(rank, num_ranks, *arguments)` on all ranks.

    The ranks are processes of one thread each, connected over gloo.
    """
    with staying_ranks(num_ranks, partial(_call, function), *arguments) as found:
        return found


@contextlib.contextmanager
def staying_ranks(
    num_ranks: int, function: Callable[..., AbstractContextManager[Any]], *arguments: Any
) -> Iterator[list[Any]]:
    """Yield the results of a context manager on all ranks; each rank stays in its context.

    The ranks, with all memory that others read, stay until the context here is left or this process
    ends. `function` has the arguments of `on_ranks`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    set_forkserver_preload(PRELOAD)
    pipes = get_context("forkserver").Pipe
    staying, leave = pipes(duplex=False)  # nothing is sent; ranks leave when it is closed
    readers, writers = zip(*(pipes(duplex=False) for _ in range(num_ranks)), strict=True)
    started = start_processes(
        _rank,
        (port, writers, staying, function, arguments),
        nprocs=num_ranks,
        join=False,
        start_method="forkserver",
    )
    for one in (*writers, staying):
        one.close()
    found = []
    for reader in readers:
        try:
            found.append(pickle.loads(reader.recv_bytes()))
        except EOFError:
            while not started.join():  # raises the error of a rank
                pass
            raise
    try:
        yield found
    finally:
        leave.close()
        while not started.join():
            pass


@contextlib.contextmanager
def _call(function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    yield function(*arguments)


def _rank(
    rank: int,
    port: int,
    writers: Sequence[Connection],
    staying: Connection,
    function: Callable[..., AbstractContextManager[Any]],
    arguments: Sequence[Any],
) -> None:
    for other in (*writers[:rank], *writers[rank + 1 :]):
        other.close()
    torch.set_num_threads(1)
    hide_progress_bars()
    init_process_group(rank, len(writers), "127.0.0.1", port, "cpu", TIMEOUT_S)
    try:
        with function(rank, len(writers), *arguments) as result:
            writers[rank].send_bytes(pickle.dumps(result))
            with contextlib.suppress(EOFError):
                staying.recv_bytes()
    finally:
        dist.destroy_process_group()
    # A regular exit unloads torch while its threads may still run: about one in a hundred aborted.
    os._exit(0)
