"""Measure the training engine alone: speed, shared prompts, load balance, memory.

    python scripts/bench/train.py                         # on a small random model, CPU
    python scripts/bench/train.py --model MODEL_DIR --device cuda --dtype bfloat16
    python scripts/bench/train.py --only tree balance     # some of its parts

The padded loop is the usual code over transformers: right-padded rows, an attention mask, logits of
every token, the same loss, AdamW. Both train on the same rows, in turn.

equal, mixed  tokens/s against the padded loop, for rows of 128 tokens, and of 64 in the median and
              at most 512
tree          groups of 8 with a prompt of 256 tokens and completions of 64: shared against separate
balance       mean load over maximum load of 4 and 8 ranks in each micro-batch; the worst of groups
              of 16k, 32k and 128k tokens
head          peak memory of forward and backward over 8k tokens at a vocabulary of 150k, against
              logits in one piece
checkpoint    the copy of a state of 500 MB for which training waits, against memcpy of as many
              bytes; every page of both destinations was touched before
load          peak memory of each of four ranks that load a model of 1B parameters, against its
              shard of the float32 masters
memory        peak of a rank that trains a model of 103M parameters, against --dry-run's estimate

Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from rlsys.algorithms.aggregation import token_mean
from rlsys.algorithms.losses import clipped_surrogate
from rlsys.config import ModelConfig, Precision, TrainerConfig
from rlsys.dataflow.scheduling.batching import ReadyGroup, StepAssembler
from rlsys.dataflow.scheduling.microbatch_plan import (
    Budget,
    GroupLengths,
    RowPlace,
    plan_micro_batches,
)
from rlsys.engines.models.collate import collate
from rlsys.engines.models.hidden_states import hidden_states
from rlsys.engines.models.token_policy import TokenPolicy
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.engines.training.trainer_state import finish_state
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.reallocation.transport.shared_memory import SharedMemory
from rlsys.types import MicroBatch, TrainRow
from scripts.bench.loading import measure_loading
from scripts.bench.memory import measure_memory

PARTS = ("equal", "mixed", "tree", "balance", "head", "checkpoint", "load", "memory")
REPEATS = 7
BATCH_ROWS = 16  # usual micro-batch of the padded loop
LOW, HIGH = 0.2, 0.28
RATE = 1e-6


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a Hugging Face checkpoint; default: a small random one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=get_args(Precision), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--peak-of", choices=("rlsys", "naive"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak_of:
        print(peak_mb(args.peak_of))
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = args.model or build_tiny_model(directory)
        bench = Bench(Path(path), args.device, args.dtype)
        if "equal" in args.only:
            found["equal_ratio"] = bench.against_padded(rows(bench.vocab_size, [(64, 64)] * 64))[2]
        if "mixed" in args.only:
            ours, padded, ratio = bench.against_padded(mixed_rows(bench.vocab_size))
            found |= {"tokens_per_s": ours, "padded_tokens_per_s": padded, "mixed_ratio": ratio}
        if "tree" in args.only:
            found |= bench.tree()
        if "checkpoint" in args.only:
            found |= checkpoint(Path(directory))
    if "balance" in args.only:
        found["balance"] = min(balance(size, ranks) for size in GROUP_TOKENS for ranks in (4, 8))
    if "head" in args.only:
        for who, name in (("rlsys", "peak_mb"), ("naive", "naive_peak_mb")):
            command = [sys.executable, __file__, "--peak-of", who]
            found[name] = int(subprocess.check_output(command, text=True).split()[-1])
    if "load" in args.only:
        found["load"] = measure_loading()
    if "memory" in args.only:
        found["memory"] = measure_memory()
    print(json.dumps(found))


class Bench:
    """The engine and the padded loop on one model."""

    def __init__(self, path: Path, device: str, dtype: Precision, **trainer: Any) -> None:
        self._path, self._device, self._dtype = path, torch.device(device), dtype
        self._engine = FSDPEngine(
            model_path=path,
            trainer=TrainerConfig(learning_rate=RATE, **trainer),
            model=ModelConfig(dtype=dtype),
            loss=clipped_surrogate(LOW, HIGH),
            aggregation=token_mean,
            temperature=1.0,
            num_total_steps=1000,
            seed=0,
            device=device,
        )
        self.config = self._engine.model.config
        self.vocab_size: int = self.config.vocab_size

    def step(self, rows: Sequence[TrainRow]) -> None:
        """Train one step and return the loss."""
        self._engine.accumulate(MicroBatch(rows=rows))
        self._engine.optimizer_step()

    def against_padded(self, rows: Sequence[TrainRow]) -> tuple[int, int, float]:
        """Return tokens/s of the engine and of the padded loop, and the median ratio."""
        loop = PaddedLoop(self._path, self._device, self._dtype)
        num_tokens = sum(len(row.prompt_token_ids) + len(row.token_ids) for row in rows)
        pairs = in_turn(lambda: self.step(rows), lambda: loop.step(rows))
        ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(theirs / ours for ours, theirs in pairs)
        return round(num_tokens / ours), round(num_tokens / theirs), round(ratio, 2)

    def tree(self) -> dict[str, float]:
        """Return the speed-up of shared prompts, and the differences of loss and gradient."""
        network, shared = self._engine.role.network, group_rows(self.vocab_size, 4, 8, 256, 64)
        assert network.shares, "this model's rows cannot share their beginnings"

        def apart() -> None:
            network.shares = False
            self.step(shared)
            network.shares = True

        pairs = in_turn(lambda: self.step(shared), apart)
        found: dict[bool, tuple[torch.Tensor, torch.Tensor]] = {}
        weights = {name: one.detach().clone() for name, one in self._engine.parameters.items()}
        for shares in (True, False):
            network.shares = shares
            self._engine.accumulate(MicroBatch(rows=shared))
            parameters = self._engine.parameters
            gradient = torch.cat([p.grad.flatten().double() for p in parameters.values()])
            loss = self._engine.optimizer_step().metrics["loss"]
            found[shares] = torch.tensor(loss, dtype=torch.float64), gradient
            with torch.no_grad():
                for name, weight in weights.items():
                    parameters[name].copy_(weight)
        network.shares = True
        errors = [
            float((tree - apart).norm() / apart.norm())
            for tree, apart in zip(found[True], found[False], strict=True)
        ]
        ratio = statistics.median(apart / tree for tree, apart in pairs)
        results = {"tree_ratio": round(ratio, 2)}
        return results | {
            name: float(f"{error:.1e}")
            for name, error in zip(("tree_loss_error", "tree_gradient_error"), errors, strict=True)
        }


class PaddedLoop:
    """The same update in the usual code."""

    def __init__(self, path: Path, device: torch.device, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self._device, self._dtype = device, getattr(torch, dtype)
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa"
        ).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=RATE)

    def step(self, rows: Sequence[TrainRow]) -> None:
        """Train one step."""
        num_trained = sum(len(row.token_ids) for row in rows)
        for start in range(0, len(rows), BATCH_ROWS):
            with torch.autocast(self._device.type, self._dtype, self._dtype != torch.float32):
                loss = self._loss(rows[start : start + BATCH_ROWS])
            (loss / num_trained).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss(self, rows: Sequence[TrainRow]) -> torch.Tensor:
        longest = max(len(row.prompt_token_ids) + len(row.token_ids) for row in rows)
        input_ids, mask, trained, sampler = (
            np.zeros((len(rows), longest), dtype)
            for dtype in (np.int64, np.int64, np.float32, np.float32)
        )
        for i, row in enumerate(rows):
            first, end = len(row.prompt_token_ids), len(row.prompt_token_ids) + len(row.token_ids)
            input_ids[i, :end] = np.concatenate((row.prompt_token_ids, row.token_ids))
            mask[i, :end] = 1
            trained[i, first:end] = 1
            sampler[i, first:end] = row.columns["sampler_logprobs"]
        tensors = [torch.from_numpy(array) for array in (input_ids, mask, trained, sampler)]
        ids, mask_, trained_, sampler_ = (tensor.to(self._device) for tensor in tensors)
        logits = self._model(input_ids=ids, attention_mask=mask_).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = (logprobs - sampler_[:, 1:]).exp()
        advantages = 1.0
        clipped = ratio.clamp(1 - LOW, 1 + HIGH) * advantages
        loss: torch.Tensor = -(torch.minimum(ratio * advantages, clipped) * trained_[:, 1:]).sum()
        return loss


STATE_WIDTH, STATE_MLP_WIDTH, STATE_REPEATS = 1024, 3264, 9  # 500 MB


def checkpoint(directory: Path) -> dict[str, float]:
    """Return median seconds of the copy, of memcpy, and until all is written and synced."""
    path = build_tiny_model(directory / "large", width=STATE_WIDTH, mlp_width=STATE_MLP_WIDTH)
    engine = Bench(path, "cpu", "float32")._engine
    memory = SharedMemory("rlsys-bench", engine.snapshot_bytes(1), purpose="the benchmark")
    file = engine.open_snapshots(memory.path, memory.name)
    num_bytes = sum(tensor.nbytes for tensor in engine.local_state().values())
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)

    def hold() -> None:
        engine.policy_version += 1  # otherwise the snapshot exists already
        engine.hold(file).release()

    pairs = in_turn(hold, lambda: np.copyto(target, source), repeats=STATE_REPEATS)
    held = engine.hold(file)
    start = time.perf_counter()
    finish_state(directory / "state", [held.write(directory / "state")])
    write_s = time.perf_counter() - start
    pause_s, memcpy_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "checkpoint_mb": round(num_bytes / 1e6),
        "checkpoint_pause_s": round(pause_s, 4),
        "memcpy_s": round(memcpy_s, 4),
        "checkpoint_ratio": round(statistics.median(ours / copy for ours, copy in pairs), 2),
        "checkpoint_write_s": round(write_s, 2),
    }


def in_turn(
    ours: Callable[[], None], theirs: Callable[[], None], repeats: int = REPEATS
) -> list[tuple[float, float]]:
    """Return the seconds of both after a warm-up."""
    pairs = []
    for _ in range(repeats + 1):
        times = []
        for work in (ours, theirs):
            start = time.perf_counter()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        pairs.append((times[0], times[1]))
    return pairs[1:]


def rows(vocab_size: int, lengths: Sequence[tuple[int, int]]) -> list[TrainRow]:
    """Return rows of random tokens; `lengths` are those of prompt and completion."""
    rng = np.random.default_rng(0)
    return [
        row(rng.integers(3, vocab_size, prompt), rng.integers(3, vocab_size, tokens), number, 1)
        for number, (prompt, tokens) in enumerate(lengths)
    ]


def mixed_rows(vocab_size: int) -> list[TrainRow]:
    """Return rows of mixed lengths."""
    rng = random.Random(0)
    totals = [min(512, max(8, round(64 * rng.lognormvariate(0, 0.9)))) for _ in range(96)]
    return rows(vocab_size, [(total // 4, total - total // 4) for total in totals])


def group_rows(
    vocab_size: int, num_groups: int, group_size: int, prompt: int, tokens: int
) -> list[TrainRow]:
    """Return groups with shared prompts."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(num_groups):
        shared = rng.integers(3, vocab_size, prompt)
        found += [
            row(shared, rng.integers(3, vocab_size, tokens), number, group_size)
            for _ in range(group_size)
        ]
    return found


def row(prompt: Any, tokens: Any, group_id: int, group_size: int) -> TrainRow:
    """Return a row."""
    count = len(tokens)
    return TrainRow(
        prompt_token_ids=prompt.astype(np.int32),
        token_ids=tokens.astype(np.int32),
        policy_versions=np.zeros(count, np.int32),
        loss_mask=np.ones(count, np.bool_),
        columns={
            "sampler_logprobs": np.full(count, -5.0, np.float32),
            "advantages": np.ones(count, np.float32),
        },
        group_id=group_id,
        group_size=group_size,
        group_num_tokens=group_size * count,
    )


GROUP_TOKENS = (16_000, 32_000, 128_000)
GROUPS_PER_STEP, GROUP_SIZE, PROMPT_TOKENS, SPREAD = 128, 16, 512, 0.5
BUDGET = 16_384  # maximum of a micro-batch, and so of a row


def balance(group_tokens: int, num_ranks: int) -> float:
    """Return mean load over maximum load, summed over the micro-batches of one step.

    The controller plans them. Completions are log-normal, but end where the micro-batch does.
    Attention costs as in a model of 1.7B parameters.
    """
    chance = random.Random(group_tokens)
    mean = group_tokens / GROUP_SIZE
    groups = [
        GroupLengths(
            prompt=PROMPT_TOKENS,
            completions=[
                min(
                    BUDGET - PROMPT_TOKENS,
                    round(mean * chance.lognormvariate(-(SPREAD**2) / 2, SPREAD)),
                )
                for _ in range(GROUP_SIZE)
            ],
        )
        for _ in range(GROUPS_PER_STEP)
    ]
    budget = Budget(num_ranks=num_ranks, max_tokens=BUDGET, attention_tokens=12_000)
    assembler = StepAssembler(
        groups_per_step=GROUPS_PER_STEP,
        num_ranks=num_ranks,
        micro_batch_tokens=budget.max_tokens,
        stream=True,
    )
    assembler.add([ReadyGroup(group_id=i, row_ids=(), lengths=one) for i, one in enumerate(groups)])
    means = maxima = 0.0
    while (part := assembler.next_part()) is not None:
        lengths = [ready.lengths for ready in part]
        for shares in plan_micro_batches(lengths, budget):
            loads = [load(lengths, share, budget) for share in shares]
            means, maxima = means + statistics.fmean(loads), maxima + max(loads)
    return round(means / maxima, 3)


def load(groups: Sequence[GroupLengths], share: Sequence[RowPlace], budget: Budget) -> float:
    """Return mean load over maximum load of the planned micro-batches."""
    prompts = sum(budget.cost(0, groups[number].prompt) for number in {n for n, _ in share})
    return prompts + sum(
        budget.cost(groups[number].prompt, groups[number].completions[place])
        for number, place in share
    )


NUM_HEAD_TOKENS, HEAD_ROW_TOKENS, VOCAB_SIZE, WIDTH = 8192, 128, 150_000, 64


def peak_mb(who: str) -> int:
    """Return this process's additional peak memory for log-probabilities and their gradient.

    With `naive` they are computed from the model's own logits.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=WIDTH,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    batch = collate(rows(VOCAB_SIZE, [(1, HEAD_ROW_TOKENS)] * (NUM_HEAD_TOKENS // HEAD_ROW_TOKENS)))
    policy = TokenPolicy(model)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if who == "naive":
        hidden, places = hidden_states(model, batch, None)
        targets = places.of(batch.targets)[:, None]
        logprobs = model.get_output_embeddings()(hidden).log_softmax(-1).gather(-1, targets)
    else:
        logprobs, _, _ = policy(batch, 1.0)
    logprobs.sum().backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024


if __name__ == "__main__":
    main()
