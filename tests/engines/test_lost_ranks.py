"""A trainer rank that is killed while it stages weights: published weights stay readable."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException

from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.engines.training import publisher
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.reallocation.shards import local_part
from rlsys.reallocation.transport.shared_memory import MemoryGone
from rlsys.reallocation.transport.weight_views import Weights
from rlsys.types import Generation, WeightManifest
from scripts.ranks import staying_ranks
from tests.engines import published
from tests.engines.test_torch_engine import collect, running_engine
from tests.engines.torch_engine_harness import build_model, prompt, request
from tests.engines.training_harness import make_engine, make_rows, train_step

PARTS_BEFORE_DEATH = 3


@dataclass(frozen=True)
class RankGroup:
    """Two tensor ranks.

    The first version stays. When `go` is set they stage another one, and one rank is killed
    meanwhile.
    """

    go: Any

    @contextmanager
    def __call__(
        self, rank: int, world_size: int, path: Path
    ) -> Iterator[tuple[WeightManifest | None, int]]:
        engine = make_engine(path, layout="tp2", rank=rank, world_size=world_size)
        step(engine, seed=1)
        manifest = engine.publish()

        def go_on() -> None:
            self.go.wait()
            step(engine, seed=2)
            if rank == 1:
                die_at_a_part()
            engine.publish()

        threading.Thread(target=go_on, daemon=True).start()
        yield manifest, os.getpid()


def step(engine: FSDPEngine, seed: int) -> None:
    train_step(engine, make_rows(4, seed=seed))


def die_at_a_part() -> None:
    """End this process while it stages, at its part PARTS_BEFORE_DEATH + 1."""
    staged = threading.Semaphore(PARTS_BEFORE_DEATH)

    def last(tensor: torch.Tensor) -> torch.Tensor:
        if not staged.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGKILL)
        return local_part(tensor)

    pytest.MonkeyPatch().setattr(publisher, "local_part", last)


def until_gone(pid: int) -> None:
    process = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    assert poll.poll(120_000)
    os.close(process)


async def taken(engine: GenerationEngine, manifest: WeightManifest) -> None:
    await engine.prepare(manifest)
    await engine.pause()
    await engine.load()
    await engine.resume()


async def sampled(engine: GenerationEngine, name: str) -> Generation:
    engine.submit([request(name, prompt(6), max_tokens=12)])
    return (await collect(engine, 1))[name]


def test_a_rank_killed_while_it_stages_leaves_the_old_version_whole(tmp_path: Path) -> None:
    path = build_model(tmp_path / "model", "qwen3")
    go = get_context("spawn").Event()
    versions: list[int] = []

    async def scenario() -> None:
        async with running_engine(path) as engine:
            with staying_ranks(2, RankGroup(go), path) as ((first, _), (_, pid)):
                assert first is not None
                await taken(engine, first)
                before = await sampled(engine, "before")
                with Weights(first) as opened:  # like a replica that still reads it
                    whole = published.read_all(opened.local)
                    go.set()
                    await asyncio.to_thread(until_gone, pid)
                    for name, tensor in published.read_all(opened.local).items():
                        assert torch.equal(tensor, whole[name]), name
                # A reader that comes later gets an error and keeps its weights.
                with pytest.raises(MemoryGone):
                    await engine.prepare(first)
                after = await sampled(engine, "after")
                assert (after.policy_versions == 1).all()
                assert np.array_equal(after.token_ids, before.token_ids)
                assert np.array_equal(after.sampler_logprobs, before.sampler_logprobs)
                # The trainer starts again and publishes its initial weights.
                tensors = model_tensors(load_causal_lm(path, dtype="float32"))
                await taken(engine, published.publish(2, tensors.items()))
                versions.extend((await sampled(engine, "again")).policy_versions)

    with pytest.raises(ProcessExitedException) as ended:
        asyncio.run(scenario())
    assert (ended.value.error_index, ended.value.signal_name) == (1, "SIGKILL")
    assert versions == [2] * 12  # otherwise an earlier failure would be hidden by the rank's death
