"""Training speed, utilisation and memory on one GPU, against a plain transformers loop.

    python -m scripts.gpu.training [--device cpu --small]

Random weights in Qwen3's shapes, bfloat16 with float32 masters, packs of 8,192 and 16,384 tokens.
A case is one shape with one pack size, one setting of activation recomputation, and shared or
separate prompts. Each line states tokens per second (tokens that share a prompt count each time),
model FLOP utilisation (scripts/bench/flops.py: shared tokens count once, recomputation counts as
nothing), peak memory, and the estimate of --dry-run for the same case.

The plain loop is transformers' model in bfloat16 with torch's SDPA, gradient checkpointing and
fused AdamW on rows of equal length.
"""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlsys.config import (
    Checkpointing,
    DataConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TrainedRoleConfig,
    TrainerConfig,
)
from rlsys.types import TrainRow
from scripts.bench.flops import peak_tflops, step_flops
from scripts.gpu.records import (
    Settings,
    emit,
    free_memory,
    gib,
    measured,
    parse_settings,
    peak_bytes,
    seconds_of,
    synchronize,
)
from scripts.gpu.shapes import build_shape, scratch_directory

ROW_TOKENS = 2048
PROMPT_TOKENS = 512
PACKS_PER_STEP = 2
GROUP_SIZE = 8
SHARED_PROMPT, SHARED_COMPLETION = 768, 160  # a group has ROW_TOKENS if its prompt counts once


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement: see the module's docstring."""

    shape: str
    tokens: int
    recompute: Checkpointing
    rows: str = "separate"  # or "shared", "unshared": groups of 8 with one prompt
    profiled: bool = False

    @property
    def trainer(self) -> TrainerConfig:
        """Return the trainer's configuration."""
        return TrainerConfig(
            learning_rate=1e-6,
            micro_batch_tokens=self.tokens,
            optimizer_state="bfloat16",
            num_gpus=1,
        )

    @property
    def model(self) -> ModelConfig:
        """Return the model's configuration."""
        return ModelConfig(dtype="bfloat16", gradient_checkpointing=self.recompute)


CASES = (
    Case(shape="8b", tokens=8192, recompute="selective", profiled=True),
    Case(shape="8b", tokens=8192, recompute="full"),
    Case(shape="8b", tokens=16384, recompute="full"),
    Case(shape="8b", tokens=8192, recompute="selective", rows="shared"),
    Case(shape="8b", tokens=8192, recompute="selective", rows="unshared"),
    Case(shape="0.6b", tokens=16384, recompute="none"),
    Case(shape="0.6b", tokens=16384, recompute="selective", profiled=True),
    Case(shape="0.6b", tokens=16384, recompute="full"),
    Case(shape="0.6b", tokens=16384, recompute="selective", rows="shared"),
    Case(shape="0.6b", tokens=16384, recompute="selective", rows="unshared"),
    Case(shape="4b", tokens=8192, recompute="selective"),
    Case(shape="4b", tokens=16384, recompute="selective"),
    Case(shape="4b", tokens=16384, recompute="full"),
    Case(shape="1.7b", tokens=8192, recompute="selective"),
    Case(shape="1.7b", tokens=16384, recompute="selective"),
    Case(shape="1.7b", tokens=16384, recompute="none"),
)
SMALL_KINDS: tuple[tuple[Checkpointing, str], ...] = (
    ("none", "separate"),
    ("selective", "shared"),
    ("selective", "unshared"),
    ("full", "separate"),
)
SMALL_CASES = tuple(
    Case(shape="tiny", tokens=256, recompute=how, rows=rows) for how, rows in SMALL_KINDS
)


def main() -> None:
    """Measure and print result lines."""
    settings = parse_settings(__doc__)
    cases = SMALL_CASES if settings.small else CASES
    cases = tuple(case for case in cases if not settings.cases or case.shape in settings.cases)
    for shape in dict.fromkeys(case.shape for case in cases):
        measure_shape(shape, [case for case in cases if case.shape == shape], settings)


def measure_shape(shape: str, cases: Sequence[Case], settings: Settings) -> None:
    """Measure all cases of a shape with one engine, then the plain loop."""
    directory = scratch_directory()
    try:
        start = time.perf_counter()
        path = build_shape(directory / shape, shape, settings.device)
        emit(kind="build", shape=shape, seconds=round(time.perf_counter() - start, 1))
        # Estimates run on CPU cores while the device measures.
        num_workers = 1 if settings.small else min(4, len(cases))
        with ProcessPoolExecutor(
            num_workers, mp_context=multiprocessing.get_context("spawn")
        ) as pool:
            estimates = {case: pool.submit(estimated_bytes, case, path) for case in cases}
            with measured(kind="engine", shape=shape) as values:
                measure_engine(cases, path, settings, values, estimates)
            with measured(kind="plain_loop", shape=shape) as values:
                measure_plain_loop(cases[0], path, settings, values)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def estimated_bytes(case: Case, path: Path) -> int:
    """Return what --dry-run estimates for a rank of this case."""
    from rlsys.engines.models.model_shape import model_shape
    from rlsys.launcher.rank_estimate import estimate_rank

    torch.set_num_threads(1)
    prompt, completion = lengths(case)
    config = RunConfig(
        model=ModelConfig(path=str(path), dtype="bfloat16", gradient_checkpointing=case.recompute),
        trainer=case.trainer,
        data=DataConfig(max_prompt_tokens=prompt),
        sampling=SamplingConfig(max_tokens=completion),
    )
    trained = TrainedRoleConfig(model=config.model, trainer=config.trainer)
    return estimate_rank(config, trained, model_shape(str(path)), "logits").total


def measure_engine(
    cases: Sequence[Case],
    path: Path,
    settings: Settings,
    values: dict[str, Any],
    estimates: dict[Case, Future[int]],
) -> None:
    """Time the engine on each case; `values` gets the time that the engine took to load."""
    from rlsys.algorithms.aggregation import token_mean
    from rlsys.algorithms.losses import clipped_surrogate
    from rlsys.engines.training.fsdp_engine import FSDPEngine
    from rlsys.engines.training.recomputation import checkpoint_layers
    from rlsys.engines.training.sharding import decoder_layers

    start = time.perf_counter()
    engine = FSDPEngine(
        model_path=path,
        trainer=cases[0].trainer,
        model=ModelConfig(dtype="bfloat16", gradient_checkpointing="none"),
        loss=clipped_surrogate(0.2, 0.28),
        aggregation=token_mean,
        temperature=1.0,
        num_total_steps=1000,
        seed=0,
        device=settings.device,
    )
    synchronize()
    values["load_s"] = round(time.perf_counter() - start, 1)
    network = engine.role.network
    plain_forward = {layer: layer.forward for layer in decoder_layers(network.model)}
    peak = peak_tflops(torch.device(settings.device), "bfloat16")
    for case in cases:
        for layer, forward in plain_forward.items():
            layer.forward = forward
        checkpoint_layers(network, case.recompute)
        network.shares = case.rows == "shared"
        free_memory()
        with measured(
            kind="train",
            shape=case.shape,
            tokens=case.tokens,
            recompute=case.recompute,
            rows=case.rows,
        ) as values_of_case:
            measure_case(engine, case, settings, peak, values_of_case)
            with_estimate(values_of_case, estimates[case])
    engine.close()


def lengths(case: Case) -> tuple[int, int]:
    """Return the prompt and completion tokens of a row."""
    if case.shape == "tiny":
        return 16, 48
    if case.rows == "separate":
        return PROMPT_TOKENS, ROW_TOKENS - PROMPT_TOKENS
    return SHARED_PROMPT, SHARED_COMPLETION


def make_rows(case: Case, vocab_size: int) -> list[TrainRow]:
    """Return the rows of one step, which fill `PACKS_PER_STEP` packs.

    A shared prompt counts once. Unshared rows are the shared ones, in more packs.
    """
    from scripts.bench.train import group_rows, rows

    prompt, completion = lengths(case)
    num_tokens = PACKS_PER_STEP * case.tokens
    if case.rows == "separate":
        return rows(vocab_size, [(prompt, completion)] * (num_tokens // (prompt + completion)))
    num_groups = max(1, num_tokens // (prompt + GROUP_SIZE * completion))
    return group_rows(vocab_size, num_groups, GROUP_SIZE, prompt, completion)


def measure_case(
    engine: Any, case: Case, settings: Settings, peak: float | None, values: dict[str, Any]
) -> None:
    """Time the steps of one case."""
    from rlsys.types import MicroBatch

    config = engine.model.config
    batch = make_rows(case, config.vocab_size)
    num_tokens = sum(len(row.prompt_token_ids) + len(row.token_ids) for row in batch)

    def step() -> None:
        engine.accumulate(MicroBatch(rows=batch))
        engine.optimizer_step()

    start = time.perf_counter()
    step()  # compiles, and makes the optimizer's moments
    synchronize()
    values["first_step_s"] = round(time.perf_counter() - start, 2)
    free_memory()
    seconds = seconds_of(step, repeats=2 if settings.on_gpu else 1, warm_up=0)
    tflops = step_flops(config, batch) / 1e12 / seconds
    values |= {
        "step_s": round(seconds, 3),
        "tokens_per_s": round(num_tokens / seconds),
        "tflops": round(tflops, 1),
        "mfu": None if peak is None else round(tflops / peak, 3),
        "peak_gib": gib(peak_bytes(settings)),
    }
    start = time.perf_counter()
    engine.accumulate(MicroBatch(rows=batch))
    synchronize()
    values["accumulate_s"] = round(time.perf_counter() - start, 3)
    engine.optimizer_step()
    if case.profiled:
        profile(step, case, settings)


def profile(step: Callable[[], None], case: Case, settings: Settings) -> None:
    """Emit the device's busy time and the kernels that take most of a step."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU]
    if settings.on_gpu:
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        start = time.perf_counter()
        step()
        synchronize()
        seconds = time.perf_counter() - start
    totals: dict[str, list[float]] = {}
    for event in profiler.events():
        if settings.on_gpu and event.device_type.name != "CUDA":
            continue
        total = totals.setdefault(event.name[:90], [0.0, 0])
        total[0] += event.time_range.elapsed_us() / 1e3
        total[1] += 1
    emit(
        kind="profile",
        shape=case.shape,
        tokens=case.tokens,
        recompute=case.recompute,
        step_ms=round(1e3 * seconds, 1),
        busy_ms=round(sum(ms for ms, _ in totals.values()), 1),
        num_kernels=sum(count for _, count in totals.values()),
    )
    for name, (ms, count) in sorted(totals.items(), key=lambda one: -one[1][0])[:28]:
        emit(kind="profile_kernel", shape=case.shape, name=name, ms=round(ms, 2), calls=count)


def with_estimate(values: dict[str, Any], estimate: Future[int]) -> None:
    """Add the estimate of --dry-run and its error relative to the measured peak."""
    try:
        estimated = estimate.result(timeout=60)
    except Exception as error:  # noqa: BLE001 - a missing estimate is a result
        values["estimate_error"] = f"{type(error).__name__}: {str(error)[:200]}"
        return
    values["estimated_gib"] = gib(estimated)
    if values.get("peak_gib"):
        values["estimate_off"] = round(gib(estimated) / values["peak_gib"] - 1, 3)


def measure_plain_loop(case: Case, path: Path, settings: Settings, values: dict[str, Any]) -> None:
    """Time transformers' own training loop on rows of the same lengths."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).to(settings.device)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=settings.on_gpu)
    prompt, completion = lengths(case)
    num_rows = max(1, case.tokens // (prompt + completion))
    ids = torch.randint(
        3, model.config.vocab_size, (num_rows, prompt + completion), device=settings.device
    )

    def step() -> None:
        for _ in range(PACKS_PER_STEP):
            logits = model(input_ids=ids, use_cache=False).logits[:, prompt - 1 : -1].float()
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, prompt:, None])
            (-logprobs.sum() / (num_rows * completion)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    free_memory()
    seconds = seconds_of(step, repeats=2 if settings.on_gpu else 1)
    num_tokens = PACKS_PER_STEP * ids.numel()
    values |= {
        "tokens": num_rows * (prompt + completion),
        "step_s": round(seconds, 3),
        "tokens_per_s": round(num_tokens / seconds),
        "peak_gib": gib(peak_bytes(settings)),
        "note": "weights, gradients and moments in bfloat16; every layer recomputed",
    }


if __name__ == "__main__":
    main()
