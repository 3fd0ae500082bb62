"""Weight updates of an engine in another process: through host memory, and over CUDA IPC.

trainer ── manifest ──► process of the engine: prepare while requests run, pause, load, resume
        ◄── seconds ───
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scripts.gpu.generation import run
from scripts.gpu.records import Settings, measured, synchronize

NUM_UPDATES = 3
LIMIT_S = 120.0


def compare(trainer: Any, path: Path, shape: str, num_bytes: int, settings: Settings) -> None:
    """Measure updates over each transport; on a CPU only through host memory."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, path, settings), daemon=True)
    process.start()
    there.close()
    try:
        for transport in ("host", "cuda_ipc") if settings.on_gpu else ("host",):
            for number in range(NUM_UPDATES):
                names = {"shape": shape, "transport": transport, "update": number + 1}
                with measured(kind="transport", **names) as values:
                    update(trainer, here, transport, num_bytes, values)
    finally:
        process.kill()
        process.join()


def update(
    trainer: Any, engine: Connection, transport: str, num_bytes: int, values: dict[str, Any]
) -> None:
    """Publish a version and let the engine load it."""
    from scripts.bench.train import rows

    train(trainer, rows(500, [(8, 24)] * 4))
    synchronize()
    start = time.perf_counter()
    manifest = trainer.publish(on_device=transport == "cuda_ipc")
    times = {"publish_s": time.perf_counter() - start}
    is_on_device = all(share.on_device is not None for share in manifest.shares)
    if is_on_device != (transport == "cuda_ipc"):
        raise RuntimeError("the version is in the other memory; the log has the reason")
    engine.send(manifest)
    if not engine.poll(LIMIT_S):
        raise TimeoutError(f"the engine did not answer within {LIMIT_S:g} s")
    answer = engine.recv()
    if isinstance(answer, Exception):
        raise answer
    times |= answer
    values |= {name: round(seconds, 4) for name, seconds in times.items()}
    values["gb_per_s"] = round(num_bytes / 1e9 / sum(times.values()), 2)


def train(trainer: Any, batch: Any) -> None:
    """Train one step."""
    from rlsys.types import MicroBatch

    trainer.accumulate(MicroBatch(rows=batch))
    trainer.optimizer_step()


def serve(trainer: Connection, path: Path, settings: Settings) -> None:
    """Load each version that arrives, and answer with the seconds or the error."""
    asyncio.run(_serve(trainer, path, settings))


async def _serve(trainer: Connection, path: Path, settings: Settings) -> None:
    from rlsys.config import RolloutConfig
    from rlsys.engines.generation.torch.torch_engine import TorchEngine

    rollout = RolloutConfig(max_running=64, kv_cache_gib=0.1 if settings.small else 4.0)
    engine = TorchEngine(path, rollout, dtype="bfloat16", device=settings.device, stop_token_ids=())
    await engine.start()
    while True:
        manifest = await asyncio.to_thread(trainer.recv)
        try:
            trainer.send(await _load(engine, manifest))
        except (OSError, ValueError, RuntimeError) as error:
            trainer.send(error)


async def _load(engine: Any, manifest: Any) -> dict[str, float]:
    running = asyncio.create_task(run(engine, 16, 16, 64))
    await asyncio.sleep(0)
    start = time.perf_counter()
    await engine.prepare(manifest)
    prepared = time.perf_counter()
    await engine.pause()
    await engine.load()
    await engine.resume()
    synchronize()
    loaded = time.perf_counter()
    await running
    assert engine.stats().policy_version == manifest.version
    return {"prepare_s": prepared - start, "pause_s": loaded - prepared}
