"""Train rollouts of eight branches, as a tree against one row per branch.

There are two kinds of trees, in steps of four rollouts with random tokens:

    forks      seven branches of 64 tokens after a path of 256, which the first one also continues
    thinking   eight turns; the template keeps the answer (32 tokens) of each reply and strips the
               thinking (64), so each turn begins a branch after the previous answers; the
               environment adds 32 tokens between turns, and the prompt has 128

In separate rows, each branch has its own copy of all tokens before it. The loss is a mean over
tokens, so both have the same gradient.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rlsys.algorithms.aggregation import token_mean
from rlsys.algorithms.losses import clipped_surrogate
from rlsys.config import ModelConfig, TrainerConfig
from rlsys.engines.models.branches import Paths
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.types import BRANCH_FIELDS, INJECTED, NO_PARENT, MicroBatch, TrainRow

NUM_BRANCHES, NUM_ROLLOUTS, REPEATS = 8, 4, 7
SHARED, FORK = 256, 64
PROMPT, THINKING, ANSWER, CONTEXT = 128, 64, 32, 32
Flat = list[tuple[int, int, int, int]]


def measure_branches(directory: Path) -> dict[str, float]:
    """Return the speed-up and the errors of loss and gradient, of the worse kind of tree."""
    path = build_tiny_model(directory)
    engine = FSDPEngine(
        model_path=path,
        trainer=TrainerConfig(learning_rate=1e-6),
        model=ModelConfig(),
        loss=clipped_surrogate(0.2, 0.28),
        aggregation=token_mean,
        temperature=1.0,
        num_total_steps=1000,
        seed=0,
    )
    network = engine.role.network
    ratios, errors = {}, []
    for kind, make in (("forks", forks), ("thinking", thinking)):
        rng = np.random.default_rng(0)
        trees = [make(rng, network.model.config.vocab_size) for _ in range(NUM_ROLLOUTS)]
        apart = [row for tree in trees for row in branches_apart(tree)]

        def step(rows: Sequence[TrainRow], *, shares: bool) -> tuple[float, torch.Tensor, float]:
            """Seconds, gradient before the update, loss."""
            network.shares = shares
            start = time.perf_counter()
            engine.accumulate(MicroBatch(rows=rows))
            seconds = time.perf_counter() - start
            parameters = engine.parameters.values()
            gradient = torch.cat([p.grad.flatten().double() for p in parameters])
            loss = engine.optimizer_step().metrics["loss"]
            network.shares = True
            return seconds, gradient, loss

        weights = {name: one.detach().clone() for name, one in engine.parameters.items()}
        of_kind = []
        for _ in range(REPEATS + 1):
            found = []
            for rows, shares in ((trees, True), (apart, False)):
                found.append(step(rows, shares=shares))
                with torch.no_grad():
                    for name, weight in weights.items():
                        engine.parameters[name].copy_(weight)
            (tree_s, of_tree, loss), (apart_s, of_apart, expected) = found
            of_kind.append(apart_s / tree_s)
        ratios[kind] = statistics.median(of_kind[1:])
        errors.append(float((of_tree - of_apart).norm() / of_apart.norm()))
        errors.append(abs(loss - expected) / abs(expected))
    return {
        "tree_branches_ratio": round(min(ratios.values()), 2),
        **{f"tree_{kind}_ratio": round(ratio, 2) for kind, ratio in ratios.items()},
        "tree_branches_error": float(f"{max(errors):.1e}"),
    }


def forks(rng: np.random.Generator, vocab_size: int) -> TrainRow:
    """Return a rollout with forks."""
    flat: Flat = [(SHARED // 2 + FORK, NO_PARENT, SHARED // 2, 0)]
    flat += [(FORK, 0, SHARED, 0)] * (NUM_BRANCHES - 1)
    sampled = np.ones(sum(own for own, *_ in flat), np.bool_)
    tokens = rng.integers(3, vocab_size, len(sampled))
    return _row(rng.integers(3, vocab_size, SHARED // 2), tokens, sampled, flat)


def thinking(rng: np.random.Generator, vocab_size: int) -> TrainRow:
    """Return a rollout whose template strips the thinking."""
    flat: Flat = []
    tokens: list[int] = []
    sampled: list[bool] = []
    answer: list[int] = []
    at = PROMPT
    for number in range(NUM_BRANCHES):
        context = [*answer, *rng.integers(3, vocab_size, CONTEXT if number else 0).tolist()]
        reply = rng.integers(3, vocab_size, THINKING + ANSWER).tolist()
        answer = reply[THINKING:]
        flat.append((len(context) + len(reply), number - 1 if number else NO_PARENT, at, 0))
        at += len(context)  # the next one branches off where this one's thinking begins
        tokens += [*context, *reply]
        sampled += [*[False] * len(context), *[True] * len(reply)]
    prompt = rng.integers(3, vocab_size, PROMPT)
    return _row(prompt, np.array(tokens), np.array(sampled), flat)


def branches_apart(row: TrainRow) -> list[TrainRow]:
    """Return a row for each branch."""
    paths = Paths.of(row)
    whole = np.concatenate((row.prompt_token_ids, row.token_ids))
    rows, end = [], 0
    for number, place in zip(paths.branches[::BRANCH_FIELDS].tolist(), paths.places, strict=True):
        own, end = slice(end, end + number), end + number
        rows.append(
            replace(
                row,
                prompt_token_ids=whole[place[: len(place) - number]],
                token_ids=row.token_ids[own],
                policy_versions=row.policy_versions[own],
                loss_mask=row.loss_mask[own],
                columns={name: values[own] for name, values in row.columns.items()},
                branches=None,
            )
        )
    return rows


def _row(prompt: np.ndarray, tokens: np.ndarray, sampled: np.ndarray, flat: Flat) -> TrainRow:
    return TrainRow(
        prompt_token_ids=prompt.astype(np.int32),
        token_ids=tokens.astype(np.int32),
        policy_versions=np.where(sampled, 0, INJECTED).astype(np.int32),
        loss_mask=sampled,
        columns={
            "sampler_logprobs": np.full(len(tokens), -3.0, np.float32),
            "advantages": np.ones(len(tokens), np.float32),
        },
        group_id=0,
        group_size=1,
        group_num_tokens=int(sampled.sum()),
        branches=np.array(flat, np.int32).flatten(),
    )


def main() -> None:
    """Run the benchmark."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure_branches(Path(directory))))


if __name__ == "__main__":
    main()
