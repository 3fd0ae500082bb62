"""Exchanging the weights of a running model, in place or by copy."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from rlsys.config import RolloutConfig
from rlsys.engines.generation.torch import fused_decoder
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.engines.generation.torch.weight_buffers import WeightBuffers, exchange
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.reallocation.shards import Box
from rlsys.reallocation.transport.staging import StagingBuffer
from rlsys.reallocation.transport.weight_views import Weights, stage_whole
from rlsys.types import Generation, WeightManifest
from tests.engines.torch_engine_harness import build_model, prompt, request
from tests.reallocation.test_staging import laid_out

NEW = {
    "q": torch.arange(32.0).view(4, 8),
    "k": -torch.arange(16.0).view(2, 8),
    "norm": torch.linspace(0, 1, 8),
    "scalar": torch.tensor(2.0),
}
NAMES = list(NEW)


@pytest.fixture
def model() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros_like(one)) for name, one in NEW.items()}


def buffers_of(
    model: dict[str, nn.Parameter], *, is_transposed: bool = False
) -> list[WeightBuffers]:
    together = WeightBuffers([model["q"], model["k"]], is_transposed=is_transposed)
    return [together, WeightBuffers([model["norm"]]), WeightBuffers([model["scalar"]])]


def names_of(model: dict[str, nn.Parameter]) -> dict[int, str]:
    return {id(one): name for name, one in model.items()}


def assert_new(model: dict[str, nn.Parameter]) -> None:
    for name, expected in NEW.items():
        assert torch.equal(model[name].detach(), expected), name


def test_weights_in_the_needed_form_are_used_in_place(model: dict[str, nn.Parameter]) -> None:
    stage, manifest = stage_whole(1, NEW)
    rows = buffers_of(model)
    with Weights(manifest) as weights:
        found = exchange(rows, names_of(model), weights)
        assert found.uses_shared_memory
        assert not any(one.detach().any() for one in model.values())
        replaced = found.switch()
        places = {name: part.data_ptr() for name, _, part in weights.parts()}
    stage.close()  # existing mappings stay
    assert_new(model)
    assert {name: one.data_ptr() for name, one in model.items()} == places
    assert torch.equal(rows[0].whole, torch.cat([NEW["q"], NEW["k"]]))
    assert len(replaced) == len(NEW)


def test_a_transposed_matrix_is_copied_and_so_are_the_few_others(
    model: dict[str, nn.Parameter],
) -> None:
    stage, manifest = stage_whole(1, NEW)
    rows = buffers_of(model, is_transposed=True)
    with Weights(manifest) as weights:
        found = exchange(rows, names_of(model), weights)
        assert not found.uses_shared_memory
        places = {part.data_ptr() for _, _, part in weights.parts()}
    found.switch()
    assert_new(model)
    assert rows[0].whole.stride() == (1, 6)
    assert not places & {one.data_ptr() for one in model.values()}
    stage.close()


@pytest.mark.parametrize("is_transposed", [True, False])
def test_release_and_exchange(is_transposed: bool, model: dict[str, nn.Parameter]) -> None:
    stage, manifest = stage_whole(1, NEW)
    rows = buffers_of(model, is_transposed=is_transposed)
    for one in rows:
        one.release()
    assert not any(one.numel() for one in model.values())
    with Weights(manifest) as weights:
        exchange(rows, names_of(model), weights).switch()
    assert_new(model)
    stage.close()


@pytest.mark.parametrize("order", [["k", "q", "norm", "scalar"], ["q", "norm", "k", "scalar"]])
def test_rows_in_another_order_are_put_together(
    order: Sequence[str], model: dict[str, nn.Parameter]
) -> None:
    stage, manifest = stage_whole(1, {name: NEW[name] for name in order})
    with Weights(manifest) as weights:
        found = exchange(buffers_of(model), names_of(model), weights)
        assert not found.uses_shared_memory
        found.switch()
    assert_new(model)
    stage.close()


def test_parts_of_several_ranks_and_another_precision_are_put_together(
    model: dict[str, nn.Parameter],
) -> None:
    halves = [
        laid_out(
            ("q", Box(((2 * rank, 2 * rank + 2), (0, 8))), torch.float64),
            *((n, Box.whole(NEW[n].shape), torch.float32) for n in NAMES[1:] if rank),
        )
        for rank in range(2)
    ]
    stages = [StagingBuffer(segments, rank=rank) for rank, segments in enumerate(halves)]
    shares = tuple(one.write(3, lambda s: NEW[s.name][s.box.slices]) for one in stages)
    with Weights(WeightManifest(version=3, shares=shares)) as weights:
        weights.check(model)
        exchange(buffers_of(model), names_of(model), weights).switch()
    assert_new(model)
    for stage in stages:
        stage.close()


TRAINER = """
import pickle, sys, torch
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.reallocation.transport.weight_views import stage_whole
model = load_causal_lm(sys.argv[1], dtype="float32")
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(1.5)
model.save_pretrained(sys.argv[2])
stage, manifest = stage_whole(1, {name: one.detach() for name, one in model.named_parameters()})
sys.stdout.buffer.write(pickle.dumps(manifest))
sys.stdout.flush()
sys.stdin.read()
"""


def is_read(descriptor: int) -> bool:
    """Return whether a reader locks the memory against its next version."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


@pytest.mark.slow
def test_an_engine_uses_weights_of_a_killed_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep the weights of the dead trainer until the engine has others."""
    monkeypatch.setattr(fused_decoder, "is_best_turned", lambda weight: False)
    path = build_model(tmp_path / "model", "qwen3")
    config = RolloutConfig(max_running=4, kv_cache_gib=0.05)
    asked = [request(str(i), prompt(4 + i, seed=i), seed=i, max_tokens=20) for i in range(4)]

    async def sampled(engine: TorchEngine) -> dict[str, Generation]:
        ended: dict[str, Generation] = {}
        engine.submit(asked)
        async with asyncio.timeout(300):
            while len(ended) < len(asked):
                ended |= {one.request_id: one for one in await engine.collect()}
        return ended

    async def take(engine: TorchEngine, manifest: WeightManifest) -> None:
        await engine.prepare(manifest)
        await engine.pause()
        await engine.load()
        await engine.resume()

    async def scenario() -> tuple[dict[str, Generation], dict[str, Generation]]:
        engine = TorchEngine(path, config, dtype="float32", stop_token_ids=())
        await engine.start()
        with subprocess.Popen(  # noqa: ASYNC220 - nothing else is to happen meanwhile
            [sys.executable, "-c", TRAINER, str(path), str(tmp_path / "after")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        ) as trainer:
            assert trainer.stdout is not None
            manifest: WeightManifest = pickle.load(trainer.stdout)
            share = os.open(manifest.shares[0].path, os.O_RDONLY)
            await take(engine, manifest)
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
        assert is_read(share)
        updated = await sampled(engine)
        model = load_causal_lm(path, dtype="float32")
        stage, manifest = stage_whole(2, dict(model.named_parameters()))
        await take(engine, manifest)
        async with asyncio.timeout(60):
            while is_read(share):  # noqa: ASYNC110 - freed during generation
                await asyncio.sleep(0.01)
        os.close(share)
        assert stage.memory.kept[0].lock() is False
        await engine.release()
        assert stage.memory.kept[0].lock()
        await engine.close()
        stage.close()
        fresh = TorchEngine(tmp_path / "after", config, dtype="float32", stop_token_ids=())
        await fresh.start()
        expected = await sampled(fresh)
        await fresh.close()
        return updated, expected

    updated, expected = asyncio.run(scenario())
    for name, one in expected.items():
        np.testing.assert_array_equal(updated[name].token_ids, one.token_ids)
        np.testing.assert_array_equal(updated[name].sampler_logprobs, one.sampler_logprobs)
