"""Measure weight updates from end to end: trainer and engine processes, models of real size.

scripts/bench/weights.py calls it and documents the numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import multiprocessing
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from rlsys.algorithms.aggregation import token_mean
from rlsys.algorithms.losses import clipped_surrogate
from rlsys.config import ModelConfig, RolloutConfig, TrainerConfig
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine
from rlsys.engines.models.causal_lm import hide_progress_bars
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.launcher.tiny_models import build_tiny_model, build_tokenizer
from rlsys.reallocation.shards import Box, Holder, whole
from rlsys.reallocation.traffic import minimal_bytes
from rlsys.reallocation.transport.shared_memory import Bytes, SharedMemory
from rlsys.reallocation.transport.version_memory import NAME
from rlsys.reallocation.transport.weight_deltas import Inbox
from rlsys.reallocation.transport.weight_views import Weights
from rlsys.types import GenerationRequest, MicroBatch, SamplingParams, TrainRow, WeightManifest
from scripts.ranks import on_ranks

REPEATS = 5
NUM_STEPS = 20  # of an optimizer
NUM_RUNNING = 4  # requests, while weights change
STEP_S = 0.3  # between two updates, for readers to release the previous version
TIMEOUT_S = 600.0

T = TypeVar("T")


def build_model(directory: Path, num_bytes: int) -> Path:
    """Write a random Qwen3 of about `num_bytes` bytes in float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hide_progress_bars()
    tokenizer = build_tokenizer()
    layer_parameters = 1024 * (2 * 1024 + 2 * 512 + 3 * 3072)
    config = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=max(1, round((num_bytes / 4 - 1024 * 32_000) / layer_parameters)),
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=32_000,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def training_engine(path: Path, layout: str = "dp1", rank: int = 0) -> FSDPEngine:
    """Return the engine of a rank."""
    return FSDPEngine(
        model_path=path,
        trainer=TrainerConfig(layout=layout),
        model=ModelConfig(path=str(path), dtype="float32"),
        loss=clipped_surrogate(),
        aggregation=token_mean,
        temperature=1.0,
        num_total_steps=1,
        seed=0,
        rank=rank,
        world_size=ParallelLayout.parse(layout).num_ranks,
    )


def _train(path: Path, pipe: Any) -> None:
    """Run a trainer's process, which publishes changed weights on request."""
    hide_progress_bars()
    engine = training_engine(path)
    pipe.send(_resident_mb())
    while pipe.recv():
        engine.policy_version += 1
        _forget_peak()
        start = time.perf_counter()
        engine._before_change()
        moving_s = time.perf_counter() - start
        with torch.no_grad():
            for parameter in engine.parameters.values():
                parameter.mul_(1.001)
        start = time.perf_counter()
        manifest = engine.publish()
        pipe.send((manifest, time.perf_counter() - start, moving_s, _peak_mb()))
    engine.close()


class _Trainer:
    """Handle of a trainer's process."""

    def __init__(self, pid: int, pipe: Any) -> None:
        self._pid, self._pipe = pid, pipe
        self._resident_mb: float = pipe.recv()  # before it ever published
        self._peak_mb = self._resident_mb  # while it published last
        self.num_bytes = 2**20  # of a published version
        self.moving_s = 0.0  # before it changed its weights

    def publish(self) -> tuple[WeightManifest, float]:
        """Train a step and publish its weights."""
        self._pipe.send(True)
        published: tuple[WeightManifest, float, float, float] = self._pipe.recv()
        manifest, seconds, self.moving_s, self._peak_mb = published
        return manifest, seconds

    def extra_mb(self) -> float:
        """Return the memory of the last publication beyond that before the first one.

        It is the process's own memory at the peak, plus staged versions that it does not map any
        more.
        """
        here, there = _staged("self"), _staged(self._pid)
        given_up = here.keys() - {inode for inode in there if _maps(self._pid, inode)}
        kept_mb = sum(here[one] for one in given_up) / 1e6
        return float(self._peak_mb - self._resident_mb + kept_mb)


def _staged(pid: int | str) -> dict[int, int]:
    """Return the bytes of the versions that a process has open, by inode."""
    found = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the directory itself
            if os.readlink(descriptor).startswith(f"/memfd:{NAME} "):
                status = descriptor.stat()
                found[status.st_ino] = 512 * status.st_blocks
    return found


def _maps(pid: int, inode: int) -> bool:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return any(line.split()[4] == str(inode) for line in lines)


@contextlib.contextmanager
def _trainer(path: Path) -> Iterator[_Trainer]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_train, args=(path, theirs), daemon=True)
    process.start()
    assert process.pid is not None
    yield _Trainer(process.pid, ours)
    ours.send(False)
    process.join()


def measure_memory(path: Path) -> dict[str, float]:
    """Return a trainer's largest additional memory in MB.

    Readers release a version before the next one is published, or one of them keeps it until then.
    """
    with _trainer(path) as trainer:
        alone, beside = [], []
        for _ in range(REPEATS):
            trainer.publish()
            alone.append(trainer.extra_mb())
        manifest, _ = trainer.publish()
        for _ in range(REPEATS):
            with Weights(manifest):
                manifest, _ = trainer.publish()
                beside.append(trainer.extra_mb())
    return {"alone_mb": round(max(alone), 1), "beside_reader_mb": round(max(beside), 1)}


async def _update(engine: GenerationEngine, trainer: _Trainer) -> dict[str, float]:
    """Return medians over some updates, with memcpy times of the machine between them.

    Other programs slow down both.
    """
    found: dict[str, list[float]] = {}
    for number in range(REPEATS + 1):
        await asyncio.sleep(STEP_S)
        if engine.stats().num_running:
            await _until_more_is_sampled(engine)
        copy_s = memcpy_s(trainer.num_bytes, repeats=1)
        manifest, wait_s = await asyncio.to_thread(trainer.publish)
        trainer.num_bytes = manifest.num_bytes
        published = time.perf_counter()
        await engine.prepare(manifest)
        prepared = time.perf_counter()
        await engine.pause()
        before = time.perf_counter()
        await engine.load()
        await engine.resume()
        end = time.perf_counter()
        if number:  # the first one allocates the memory
            for name, value in (
                ("wait_ms", 1000 * wait_s),
                ("prepare_ms", 1000 * (prepared - published)),
                ("last_pass_ms", 1000 * (before - prepared)),
                ("pause_ms", 1000 * (end - before)),
                ("update_ms", 1000 * (end - published)),
                ("moving_ms", 1000 * trainer.moving_s),
                ("memcpy_ratio", copy_s / (wait_s + end - published)),
                ("gb_per_s", manifest.num_bytes / (wait_s + end - published) / 1e9),
            ):
                found.setdefault(name, []).append(value)
    return {name: round(median(values), 2) for name, values in found.items()}


async def _until_more_is_sampled(engine: GenerationEngine) -> None:
    sampled = engine.stats().num_generated_tokens
    async with asyncio.timeout(TIMEOUT_S):
        while engine.stats().num_generated_tokens == sampled:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def _measure(engine: GenerationEngine, path: Path) -> dict[str, float]:
    await engine.start()
    try:
        with _trainer(path) as trainer:
            alone = await _update(engine, trainer)
            running = asyncio.create_task(_keep_running(engine))
            await _until_more_is_sampled(engine)
            found = await _update(engine, trainer)
            running.cancel()
            results = {name: alone[name] for name in ("gb_per_s", "memcpy_ratio", "moving_ms")}
            return {**found, "alone": alone["update_ms"], "alone_wait": alone["wait_ms"], **results}
    finally:
        await engine.close()


async def _keep_running(engine: GenerationEngine) -> NoReturn:
    number = NUM_RUNNING
    engine.submit([_request(one) for one in range(number)])
    while True:
        ended = len(await engine.collect())
        engine.submit([_request(number + one) for one in range(ended)])
        number += ended


def _request(number: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(number),
        prompt_token_ids=[3 + number % 100] * 8,
        sampling=SamplingParams(max_tokens=2000, temperature=1.0),
        seed=number,
    )


def _engine(path: Path, engine: str, num_threads: int) -> GenerationEngine:
    if engine == "torch":
        config = RolloutConfig(max_running=NUM_RUNNING)
        return TorchEngine(
            path, config, dtype="float32", stop_token_ids=[], num_threads=num_threads
        )
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    config = RolloutConfig(engine="vllm", max_running=NUM_RUNNING, kv_cache_gib=0.5)
    return VLLMEngine(str(path), config, dtype="float32", max_context=2048)


def measure_update(path: Path, engine: str, *, num_threads: int = 1) -> dict[str, float]:
    """Return the numbers of updates from a trainer's process to an engine.

    GB/s run from the call to publish until the engine can continue, without requests. All other
    numbers have running requests.
    """
    return asyncio.run(_measure(_engine(path, engine, num_threads), path))


def memcpy_s(num_bytes: int, *, repeats: int = REPEATS) -> float:
    """Return the median seconds of the C library's copy on one thread."""
    source, target = _to_copy(num_bytes)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


@functools.lru_cache(maxsize=1)
def _to_copy(num_bytes: int) -> tuple[Bytes, Bytes]:
    source = np.random.default_rng(0).integers(0, 255, num_bytes, np.uint8)
    return source, np.zeros_like(source)


def measure_peer(path: Path, layout: str) -> dict[str, float]:
    """Return medians of rank 0 for publication and for gathering a state dict.

    Publication includes the check of weights before the step that changes them (check_ms), and each
    of two readers that takes its half. The state dict is gathered on rank 0, then written to memory
    as one file with a checksum, or broadcast to two readers.
    """
    ranks: list[tuple[dict[str, float], dict[str, int]]] = on_ranks(
        ParallelLayout.parse(layout).num_ranks, _on_rank, path, layout
    )
    seconds, num_bytes = ranks[0]
    return {name: round(1000 * value, 1) for name, value in seconds.items()} | num_bytes


def _on_rank(
    rank: int, world_size: int, path: Path, layout: str
) -> tuple[dict[str, float], dict[str, int]]:
    engine = training_engine(path, layout, rank)
    readers = [0, 1] if world_size > 1 else [0]
    seconds: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[[], T]) -> T:
        if world_size > 1:
            dist.barrier()
        start = time.perf_counter()
        result = function()
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def ours() -> None:
        timed("check_ms", engine._before_change)  # as the optimizer's step does
        manifest = timed("publish_ms", engine.publish)
        results = [manifest]
        if world_size > 1:
            dist.broadcast_object_list(results)
        if rank in readers and results[0] is not None:
            _take_half(results[0], readers.index(rank), len(readers))
        if world_size > 1:
            dist.barrier()

    for _ in range(3):
        timed("ours_ms", ours)
        timed("gather_write_ms", lambda: _gather_and_write(engine))
        timed("gather_broadcast_ms", lambda: _gather_and_broadcast(engine))
        engine.policy_version += 1
    num_bytes = _bytes(engine, len(readers))
    engine.close()
    return {name: median(values) for name, values in seconds.items()}, num_bytes


def _bytes(engine: FSDPEngine, num_readers: int) -> dict[str, int]:
    """Return the bytes of a version's shares, and the least that any plan stages (rank 0).

    The readers are on the same node and have some rows of each tensor. This is a collective.
    """
    manifest = engine.publish()
    if manifest is None:
        return {}
    publisher = engine._require_publisher()
    readers = tuple(
        Holder(
            f"reader {place}",
            publisher._node,
            tuple(
                replace(one, box=_rows(one.shape, place, num_readers)) for one in publisher._wanted
            ),
        )
        for place in range(num_readers)
    )
    least = minimal_bytes(publisher._sources, readers)
    return {
        "bytes_published": sum(share.num_bytes for share in manifest.shares),
        "bytes_published_minimal": sum(least.staged.values()) + sum(least.imported.values()),
    }


def _rows(shape: Sequence[int], place: int, of: int) -> Box:
    bounds = shape[0] * place // of, shape[0] * (place + 1) // of
    return Box((bounds, *((0, size) for size in shape[1:])))


def _take_half(manifest: WeightManifest, place: int, of: int) -> None:
    """Verify a version and copy half of the rows of each tensor, like an engine's tensor rank."""
    with Weights(manifest) as weights:
        weights.verify()
        for name, shape in weights.shapes.items():
            weights.read(name, _rows(shape, place, of)).clone()


def _gather_and_write(engine: FSDPEngine) -> None:
    """Gather every tensor on rank 0 and write one file."""
    sizes = {name: math.prod(shape) * 4 for name, (_, shape) in engine._published.items()}
    is_first = engine.ranks.rank == 0
    memory = SharedMemory("peer", sum(sizes.values()), purpose="a file") if is_first else None
    flat = None if memory is None else memory.map()
    at = 0
    for name, size in sizes.items():
        gathered = whole(engine.base[name])
        if flat is not None:
            torch.from_numpy(flat[at : at + size]).view(torch.float32).copy_(gathered.reshape(-1))
            at += size
    if memory is not None and flat is not None:
        zlib.crc32(flat.data)
        memory.close()


def _gather_and_broadcast(engine: FSDPEngine) -> None:
    """Gather a state dict on rank 0 and send all of it to each reader."""
    for name in engine._published:
        gathered = whole(engine.base[name])
        if dist.is_initialized():
            dist.broadcast(gathered.contiguous(), src=0)


def measure_changes(path: Path) -> float:
    """Return the bytes sent to another node divided by those of whole versions.

    The optimizer steps are on random rows, in bfloat16 with a learning rate of 1e-6. Each version
    must arrive as it was published.
    """
    engine = FSDPEngine(
        model_path=path,
        trainer=TrainerConfig(learning_rate=1e-6),
        model=ModelConfig(path=str(path), dtype="bfloat16"),
        loss=clipped_surrogate(),
        aggregation=token_mean,
        temperature=1.0,
        num_total_steps=NUM_STEPS,
        seed=0,
    )
    inbox = Inbox()
    base, num_sent, num_whole = None, 0, 0
    for step in range(NUM_STEPS + 1):
        if step:
            engine.accumulate(MicroBatch(rows=[_row(step, number) for number in range(4)]))
            engine.optimizer_step()
        manifest = engine.publish()
        assert manifest is not None
        weight_delta = engine.weight_delta(manifest, "elsewhere", base)
        assert weight_delta is not None
        arrived = replace(manifest, shares=(inbox.take(weight_delta),))
        with Weights(arrived) as there, Weights(manifest) as here:
            there.verify()
            for name, box, part in here.parts():
                assert torch.equal(there.read(name, box), part), name
        if step:  # the first one has no previous version
            num_sent += weight_delta.num_bytes
            num_whole += manifest.num_bytes
        base = manifest.version
    engine.close()
    return num_sent / num_whole


def _row(step: int, number: int) -> TrainRow:
    drawn = np.random.default_rng((step, number))
    tokens = drawn.integers(3, 200, 64).astype(np.int32)
    ones = np.ones(48, np.float32)
    return TrainRow(
        prompt_token_ids=tokens[:16],
        token_ids=tokens[16:],
        policy_versions=np.full(48, step - 1, np.int32),
        columns={
            "sampler_logprobs": -ones,
            "advantages": drawn.normal() * ones,
        },
        loss_mask=ones.astype(bool),
        group_id=number,
        group_size=1,
        group_num_tokens=48,
    )


def _resident_mb() -> float:
    return _status("VmRSS")


def _peak_mb() -> float:
    return _status("VmHWM")


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e6


def measure(num_bytes: int, parts: Sequence[str]) -> dict[str, float]:
    """Return the numbers of these parts: "torch", "memory", "vllm", "peer", "changes"."""
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        large = build_model(Path(directory) / "large", num_bytes)
        copy_s = memcpy_s(num_bytes)
        results["memcpy_gb_per_s"] = round(num_bytes / copy_s / 1e9, 2)
        results["memcpy_500mb_ms"] = round(1000 * copy_s, 1)
        if "torch" in parts:
            found = measure_update(large, "torch")
            print(f"to the torch engine: {found}", flush=True)
            results["gb_per_s"], results["memcpy_ratio"] = found["gb_per_s"], found["memcpy_ratio"]
        if "memory" in parts:
            memory = measure_memory(large)
            print(f"memory of the trainer: {memory}", flush=True)
            results["peak_extra_mb"] = memory["beside_reader_mb"]
            results["peak_extra_alone_mb"] = memory["alone_mb"]
        if "vllm" in parts:
            small = build_tiny_model(Path(directory) / "small")
            found = measure_update(small, "vllm")
            print(f"0.8M parameters to vLLM: {found}", flush=True)
            results["vllm_update_ms"], results["vllm_pause_ms"] = (
                found["update_ms"],
                found["pause_ms"],
            )
            found = measure_update(large, "vllm")
            print(f"the large model to vLLM: {found}", flush=True)
            results["pause_500mb_ms"] = found["pause_ms"]
        if "peer" in parts:
            for layout in ("dp1", "dp2tp2"):
                found = measure_peer(large, layout)
                print(f"{layout}: {found}", flush=True)
                results[f"wait_ratio_{layout}"] = round(
                    found["publish_ms"] / found["gather_write_ms"], 3
                )
            results["gather_broadcast_ratio"] = round(
                found["gather_broadcast_ms"] / found["ours_ms"], 2
            )
            results |= {
                name: found[name] for name in ("bytes_published", "bytes_published_minimal")
            }
        if "changes" in parts:
            results["delta_ratio"] = round(measure_changes(large), 3)
    return results
