"""Weight updates and released memory on one GPU.

    python -m scripts.gpu.weights [--device cpu --small]

A trainer and a torch engine share the device, as with placement=colocated. Weights: the trainer
publishes a version, the engine prepares it while requests run, pauses, loads it and resumes; GB/s
count the model's bytes once. Memory: trainer and engine release the device's memory and take it
back; the line states the bytes that became free and the seconds. Transports (weight_transports.py):
the engine is in another process, and versions pass through host memory or CUDA IPC.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from scripts.gpu.generation import run
from scripts.gpu.records import Settings, gib, measured, parse_settings, synchronize
from scripts.gpu.shapes import build_shape, scratch_directory
from scripts.gpu.weight_transports import compare, train

NUM_UPDATES = 3


def main() -> None:
    """Measure and print result lines."""
    settings = parse_settings(__doc__)
    for shape in ["tiny"] if settings.small else settings.cases or ["1.7b", "4b"]:
        directory = scratch_directory()
        try:
            path = build_shape(directory / shape, shape, settings.device)
            asyncio.run(measure(path, shape, settings))
        finally:
            shutil.rmtree(directory, ignore_errors=True)


async def measure(path: Path, shape: str, settings: Settings) -> None:
    """Measure weight updates and released memory of one shape."""
    from rlsys.config import RolloutConfig
    from rlsys.engines.generation.torch.torch_engine import TorchEngine

    trainer = _trainer(path, settings)
    rollout = RolloutConfig(max_running=64, kv_cache_gib=0.1 if settings.small else 4.0)
    engine = TorchEngine(path, rollout, dtype="bfloat16", device=settings.device, stop_token_ids=())
    await engine.start()
    num_bytes = sum(p.numel() for p in trainer.model.parameters()) * 2
    try:
        for number in range(NUM_UPDATES):
            with measured(kind="weights", shape=shape, update=number + 1) as values:
                await update(trainer, engine, num_bytes, values)
        with measured(kind="release", who="trainer", shape=shape) as values:
            release_trainer(trainer, values)
        with measured(kind="release", who="engine", shape=shape) as values:
            await release_engine(trainer, engine, values)
    finally:
        await engine.close()
    try:
        compare(trainer, path, shape, num_bytes, settings)
    finally:
        trainer.close()


def _trainer(path: Path, settings: Settings) -> Any:
    from rlsys.algorithms.aggregation import token_mean
    from rlsys.algorithms.losses import clipped_surrogate
    from rlsys.config import ModelConfig, TrainerConfig
    from rlsys.engines.training.fsdp_engine import FSDPEngine

    return FSDPEngine(
        model_path=path,
        trainer=TrainerConfig(learning_rate=1e-6, optimizer_state="bfloat16"),
        model=ModelConfig(dtype="bfloat16"),
        loss=clipped_surrogate(0.2, 0.28),
        aggregation=token_mean,
        temperature=1.0,
        num_total_steps=100,
        seed=0,
        device=settings.device,
        shares_device=True,
    )


async def update(trainer: Any, engine: Any, num_bytes: int, values: dict[str, Any]) -> None:
    """Publish a version and load it into the engine; return the times."""
    from scripts.bench.train import rows

    train(trainer, rows(500, [(8, 24)] * 4))
    synchronize()
    running = asyncio.create_task(run(engine, 16, 16, 64))
    await asyncio.sleep(0)
    times = {}
    start = time.perf_counter()
    manifest = await asyncio.to_thread(trainer.publish, on_device=False)
    times["publish_s"] = time.perf_counter() - start
    start = time.perf_counter()
    await engine.prepare(manifest)
    times["prepare_s"] = time.perf_counter() - start
    start = time.perf_counter()
    await engine.pause()
    await engine.load()
    await engine.resume()
    synchronize()
    times["pause_s"] = time.perf_counter() - start
    await running
    assert engine.stats().policy_version == trainer.policy_version
    values |= {name: round(seconds, 4) for name, seconds in times.items()}
    values["model_gb"] = round(num_bytes / 1e9, 3)
    values["gb_per_s"] = round(num_bytes / 1e9 / sum(times.values()), 2)


def free_bytes() -> int:
    """Return the free bytes of the device."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def release_trainer(trainer: Any, values: dict[str, Any]) -> None:
    """Measure the release and restore of the trainer's memory."""
    from scripts.bench.train import rows

    for round_number in (1, 2):  # the first one allocates the pinned host memory
        before, start = free_bytes(), time.perf_counter()
        trainer.release()
        synchronize()
        values[f"release_{round_number}_s"] = round(time.perf_counter() - start, 3)
        values["freed_gib"] = gib(free_bytes() - before)
        start = time.perf_counter()
        trainer.take_back()
        synchronize()
        values[f"wake_{round_number}_s"] = round(time.perf_counter() - start, 3)
    train(trainer, rows(500, [(8, 24)] * 4))


async def release_engine(trainer: Any, engine: Any, values: dict[str, Any]) -> None:
    """Measure the release and restore of the engine's memory."""
    manifest = trainer.publish(on_device=False)
    before, start = free_bytes(), time.perf_counter()
    await engine.pause()
    await engine.release()
    synchronize()
    values["release_s"] = round(time.perf_counter() - start, 3)
    values["freed_gib"] = gib(free_bytes() - before)
    start = time.perf_counter()
    await engine.prepare(manifest)
    await engine.load()
    await engine.resume()
    synchronize()
    values["wake_s"] = round(time.perf_counter() - start, 3)
    await run(engine, 4, 8, 8)


if __name__ == "__main__":
    main()
