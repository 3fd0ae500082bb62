"""Ranks as processes on this machine, for what is measured or tested of several."""

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

TIMEOUT_S = 120.0  # of every collective

# Ranks are forked off a process that has imported these, which would take each of them seconds.
PRELOAD = [
    "scripts.ranks",
    "rlsys.engines.training.fsdp_engine",
    "torch._dynamo.variables",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
]


def on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(rank, num_ranks, *arguments)` gives on each rank: processes of one thread that
    have met over gloo.
    """
    with staying_ranks(num_ranks, partial(_at_once, function), *arguments) as found:
        return found


@contextlib.contextmanager
def staying_ranks(
    num_ranks: int, function: Callable[..., AbstractContextManager[Any]], *arguments: Any
) -> Iterator[list[Any]]:
    """As on_ranks, of a function that gives a context: each rank, with all that others read of its
    memory, stays in it until the context here is left, or this process has ended.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    set_forkserver_preload(PRELOAD)
    pipes = get_context("forkserver").Pipe
    staying, leave = pipes(duplex=False)  # nothing is sent: its end tells the ranks to leave
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
            while not started.join():  # raises what a rank has met
                pass
            raise
    try:
        yield found
    finally:
        leave.close()
        while not started.join():
            pass


@contextlib.contextmanager
def _at_once(function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
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
    # An ordinary end takes torch down while threads of its own may still run: one in some hundred
    # of them aborted.
    os._exit(0)
