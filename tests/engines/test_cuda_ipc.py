"""Versions of the weights from GPU to GPU: a trainer and a reader, two processes on one GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.reallocation.transport.cuda_ipc import (
    HANDLE_BYTES,
    SPARE_FRAC,
    CudaDevice,
    shared_device,
)
from rlsys.reallocation.transport.shared_device import DeviceSharingError, SharedDevice
from rlsys.reallocation.transport.shared_memory import MemoryGone
from rlsys.reallocation.transport.staging import DamagedWeightsError
from rlsys.reallocation.transport.weight_views import Weights
from rlsys.types import WeightManifest
from tests.engines.published import read_all
from tests.engines.torch_engine_harness import build_model, prompt, request
from tests.engines.training_harness import (
    make_engine,
    make_rows,
    tiny_model,
    train_step,
)
from tests.reallocation.fake_device import segments_of, stage_on

pytestmark = pytest.mark.gpu

LIMIT_S = 120.0
# Three buckets: a matrix, an odd number of 16-bit numbers, a scalar.
TENSORS = {
    "matrix": torch.arange(10_000_000, dtype=torch.float32).view(4000, -1),
    "odd": torch.linspace(-1, 1, 12_345, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5),
}


class RecordedDevice(CudaDevice):
    """A GPU with a list of the memory that is allocated through it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        self.allocated: list[torch.Tensor] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.allocated.append(super().allocate(num_bytes))
        return self.allocated[-1]

    def free(self, memory: torch.Tensor) -> None:
        super().free(memory)
        self.allocated = [one for one in self.allocated if one is not memory]


def gpu() -> SharedDevice:
    device = shared_device("cuda")
    assert device is not None
    return device


@contextmanager
def process(run: Any) -> Iterator[tuple[Connection, Any]]:
    """Start another process; it ends with the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    started = context.Process(target=run, args=(there,), daemon=True)
    started.start()
    there.close()
    try:
        yield here, started
    finally:
        started.kill()
        started.join()


def answer(connection: Connection, *asked: Any) -> Any:
    if asked:
        connection.send(asked[0])
    assert connection.poll(LIMIT_S)
    return connection.recv()


def read(connection: Connection) -> None:
    """Return copies of each version that arrives, and keep it open if asked."""
    kept = []
    while True:
        manifest, keeps = connection.recv()
        try:
            connection.send({n: t.cpu() for n, t in read_all(manifest, gpu()).items()})
        except (DamagedWeightsError, DeviceSharingError, MemoryGone) as error:
            connection.send(error)
        if keeps:
            kept.append(Weights(manifest))
            kept[-1].open_on(gpu())
            connection.send("open")


def write(connection: Connection) -> None:
    """Publish a version, and keep it until the process is killed."""
    stage, manifest = stage_on(gpu(), 1, TENSORS)
    connection.send(manifest)
    connection.recv()
    stage.close()


def sample(connection: Connection) -> None:
    """Sample greedily after an update."""
    import asyncio

    from tests.engines.test_torch_engine import collect, load, running_engine

    async def scenario(path: Path, manifest: WeightManifest) -> tuple[list[int], Any]:
        async with running_engine(path, device="cuda") as engine:
            await load(engine, manifest)
            engine.submit([request("r", prompt(6), max_tokens=20, top_k=1)])
            one = (await collect(engine, 1))["r"]
            return one.token_ids.tolist(), one.sampler_logprobs

    while True:
        connection.send(asyncio.run(scenario(*connection.recv())))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.cpu()), name


@pytest.mark.parametrize("expandable", [False, True])
def test_another_process_reads_each_version_bit_by_bit(expandable: bool) -> None:
    """Versions take the same memory, with every setting of torch's allocator."""
    settings = torch.cuda.memory._set_allocator_settings
    settings(f"expandable_segments:{expandable}")
    try:
        on_gpu = {name: tensor.cuda() for name, tensor in TENSORS.items()}
        with process(read) as (reader, _):
            device = RecordedDevice()
            stage, manifest = stage_on(device, 1, on_gpu)
            assert_equal(answer(reader, (manifest, False)), TENSORS)
            for tensor in on_gpu.values():
                tensor.mul_(2)
            segments = segments_of(on_gpu)
            share = stage.write(segments, 2, lambda one: on_gpu[one.name][one.box.slices])
            assert share.path == manifest.shares[0].path
            again = WeightManifest(version=2, shares=(share,))
            assert_equal(answer(reader, (again, False)), on_gpu)
            assert isinstance(answer(reader, (manifest, False)), MemoryGone)
            (memory,) = device.allocated
            memory[7] ^= 1
            torch.cuda.synchronize()
            assert isinstance(answer(reader, (again, False)), DamagedWeightsError)
            stage.close()
    finally:
        settings("expandable_segments:False")


def test_freed_memory_can_be_allocated_again() -> None:
    _, total = torch.cuda.mem_get_info()
    for _ in range(20):  # twice the memory of the GPU
        memory = gpu().allocate(total // 10)
        assert len(gpu().export(memory)) == HANDLE_BYTES
        gpu().free(memory)


def test_a_reader_that_is_killed_releases_the_memory() -> None:
    device = RecordedDevice()
    stage, manifest = stage_on(device, 1, TENSORS)
    with process(read) as (reader, reading):
        assert_equal(answer(reader, (manifest, True)), TENSORS)
        assert answer(reader) == "open"
        segments = segments_of(TENSORS)

        def publish(version: int) -> str:
            return stage.write(segments, version, lambda one: TENSORS[one.name]).path

        assert publish(2) != manifest.shares[0].path
        reading.kill()
        reading.join()
        assert publish(3) == manifest.shares[0].path
    stage.close()
    assert not device.allocated


def test_a_trainer_that_is_killed_is_noticed_and_the_reader_goes_on() -> None:
    with process(write) as (writer, writing):
        manifest = answer(writer)
        with Weights(manifest) as weights:
            weights.open_on(gpu())
            weights.require_owners()
            writing.kill()
            writing.join()
            with pytest.raises(MemoryGone):
                weights.require_owners()
    with pytest.raises(MemoryGone):
        Weights(manifest)
    stage, manifest = stage_on(gpu(), 2, TENSORS)
    assert_equal({n: t.cpu() for n, t in read_all(manifest, gpu()).items()}, TENSORS)
    stage.close()


def test_memory_that_the_trainer_needs_is_not_taken() -> None:
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(DeviceSharingError):
        gpu().allocate(int((1 - SPARE_FRAC) * total))


def test_an_unknown_handle_is_refused() -> None:
    with pytest.raises(DeviceSharingError):
        gpu().open(bytes(HANDLE_BYTES), 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_publishes_the_same_in_both_memories(tmp_path: Path, dtype: str) -> None:
    path = tiny_model(tmp_path / "qwen3")
    engine = make_engine(path, device="cuda", dtype=dtype, shares_device=True)
    with process(read) as (reader, _):
        for step in range(2):
            train_step(engine, make_rows(6, seed=step))
            manifest = engine.publish()
            assert manifest is not None
            assert manifest.shares[0].on_device is not None
            found = answer(reader, (manifest, False))
            in_host = engine.publish(on_device=False)
            assert in_host is not None
            assert in_host.shares[0].on_device is None
            assert_equal(found, read_all(in_host))
    engine.close()


def test_an_engine_samples_alike_after_both_updates(tmp_path: Path) -> None:
    path = build_model(tmp_path, "qwen3")
    engine = make_engine(path, device="cuda", shares_device=True)
    train_step(engine, make_rows(6))
    with process(sample) as (sampler, _):
        tokens, logprobs = answer(sampler, (path, engine.publish()))
        expected, from_host = answer(sampler, (path, engine.publish(on_device=False)))
    assert tokens == expected
    np.testing.assert_array_equal(logprobs, from_host)
    engine.close()
