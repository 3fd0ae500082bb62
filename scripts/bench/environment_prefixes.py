"""Measure the reuse of prefixes by later turns of conversations in groups.

    python -m scripts.bench.environment_prefixes --engine torch --shape long

Groups of 8 episodes share a prompt and have 8 turns. Each turn appends 32 to 64 tokens to the
conversation and samples 16 to 32. An episode submits its next turn as soon as its last one has
ended. `short` prompts have 64 tokens, `long` ones 2,048, like those with documents or tools. The
same conversations run in two engines in turn, one of which reuses nothing, with random weights.

Prints a line of JSON for each engine and shape, with medians: the fraction of the reusable prompt
tokens of later turns (all that the turn before had computed) that was reused, sampled tokens/s with
and without reuse, and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlsys.config import RolloutConfig
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.types import GenerationRequest, SamplingParams

GROUP_SIZE, NUM_TURNS = 8, 8
ADDED, SAMPLED = (32, 64), (16, 32)  # tokens a turn
VOCABULARY = (3, 259)  # of the tiny model's tokens, without the special ones
KV_CACHE_GIB = 1.0
TIMEOUT_S = 1800.0  # time limit of one round on a busy machine


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the conversations."""

    first_tokens: int  # of a group's prompt
    num_groups: int
    width: int
    num_layers: int

    @property
    def context(self) -> int:
        """Return the length of the longest conversation."""
        return self.first_tokens + NUM_TURNS * (ADDED[1] + SAMPLED[1])


SHAPES = {
    "short": Shape(first_tokens=64, num_groups=8, width=128, num_layers=4),
    "long": Shape(first_tokens=2048, num_groups=2, width=256, num_layers=4),
}


@dataclass
class Episode:
    """One conversation with its tokens, and those that the next turn may reuse."""

    name: str
    rng: np.random.Generator
    tokens: list[int]
    num_turns: int = 0
    num_computed: int = 0

    def next_turn(self) -> GenerationRequest:
        """Return the request of the next turn."""
        self.num_turns += 1
        return GenerationRequest(
            request_id=f"{self.name}-{self.num_turns}",
            prompt_token_ids=tuple(self.tokens),
            sampling=SamplingParams(max_tokens=int(self.rng.integers(*SAMPLED, endpoint=True))),
            seed=int(self.rng.integers(2**31)),
        )

    def append_reply(self, token_ids: Sequence[int]) -> None:
        """Append a reply."""
        self.tokens += token_ids
        self.num_computed = len(self.tokens) - 1
        self.tokens += some_tokens(self.rng, int(self.rng.integers(*ADDED, endpoint=True)))


@dataclass
class Played:
    """Results of playing all conversations once."""

    num_sampled: int = 0
    num_reusable: int = 0
    num_reused: int = 0
    seconds: float = 0.0


@dataclass
class Results:
    """Results of several rounds."""

    hit_rates: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)


def some_tokens(rng: np.random.Generator, number: int) -> list[int]:
    """Return random tokens."""
    tokens: list[int] = rng.integers(*VOCABULARY, size=number).tolist()
    return tokens


def episodes(shape: Shape, seed: int) -> dict[str, Episode]:
    """Return new conversations."""
    made = {}
    for group in range(shape.num_groups):
        prompt = some_tokens(np.random.default_rng((seed, group)), shape.first_tokens)
        for index in range(GROUP_SIZE):
            name = f"{seed}.{group}.{index}"
            rng = np.random.default_rng((seed, group, index))
            made[name] = Episode(name=name, rng=rng, tokens=[*prompt])
    return made


async def play(engine: GenerationEngine, shape: Shape, seed: int) -> Played:
    """Submit all first turns, then each later turn when its predecessor has ended."""
    played = Played()
    talking = episodes(shape, seed)
    start = time.perf_counter()
    engine.submit([episode.next_turn() for episode in talking.values()])
    waiting: list[Episode] = []
    while len(waiting) < len(talking):
        waiting += await next_requests(engine, talking, played)
    num_reused = (
        engine.stats().num_reused_tokens
    )  # shared within the group, not with a previous turn
    num_left = len(talking)
    while num_left:
        again = [one for one in waiting if one.num_turns < NUM_TURNS]
        num_left -= len(waiting) - len(again)
        played.num_reusable += sum(one.num_computed for one in again)
        if again:
            engine.submit([one.next_turn() for one in again])
        waiting = await next_requests(engine, talking, played) if num_left else []
    played.seconds = time.perf_counter() - start
    played.num_reused = engine.stats().num_reused_tokens - num_reused
    return played


async def next_requests(
    engine: GenerationEngine, talking: dict[str, Episode], played: Played
) -> list[Episode]:
    """Add the finished replies to their conversations, and return the next requests."""
    ended = await engine.collect()
    for generation in ended:
        played.num_sampled += len(generation.token_ids)
        name = generation.request_id.rpartition("-")[0]
        talking[name].append_reply(generation.token_ids.tolist())
    return [talking[one.request_id.rpartition("-")[0]] for one in ended]


def build_engine(
    name: str, path: Path, shape: Shape, num_threads: int, *, reuses: bool
) -> GenerationEngine:
    """Return an engine."""
    config = RolloutConfig(
        engine="vllm" if name == "vllm" else "torch",
        max_running=GROUP_SIZE * shape.num_groups,
        kv_cache_gib=KV_CACHE_GIB,
        num_cpus=num_threads,
    )
    if name == "vllm":
        return VLLMEngine(str(path), config, dtype="float32", reuses_prefixes=reuses)
    return TorchEngine(path, config, dtype="float32", stop_token_ids=(), reuses_prefixes=reuses)


async def measure(
    engine_name: str, shape_name: str, *, repeats: int = 3, num_threads: int = 1
) -> dict[str, float | str]:
    """Return the results of one engine and shape; engines with and without reuse take turns."""
    shape = SHAPES[shape_name]
    results = {True: Results(), False: Results()}
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        path = build_tiny_model(
            Path(directory),
            width=shape.width,
            num_layers=shape.num_layers,
            max_context=shape.context,
        )
        engines = {
            reuses: build_engine(engine_name, path, shape, num_threads, reuses=reuses)
            for reuses in (True, False)
        }
        for engine in engines.values():
            await engine.start()
            stack.push_async_callback(engine.close)
        for repeat in range(repeats + 1):
            for reuses, engine in engines.items():
                async with asyncio.timeout(TIMEOUT_S):
                    played = await play(engine, shape, seed=repeat)
                if repeat:  # the first one warms up
                    rate = played.num_reused / played.num_reusable
                    results[reuses].hit_rates.append(rate)
                    results[reuses].tokens_per_s.append(played.num_sampled / played.seconds)
    with_reuse, without = results[True], results[False]
    assert not any(without.hit_rates), "the engine without reuse has reused tokens"
    return {
        "engine": engine_name,
        "shape": shape_name,
        "hit_rate": round(statistics.median(with_reuse.hit_rates), 4),
        "tokens_per_s": round(statistics.median(with_reuse.tokens_per_s)),
        "tokens_per_s_without": round(statistics.median(without.tokens_per_s)),
        "ratio": round(
            statistics.median(
                one / other
                for one, other in zip(with_reuse.tokens_per_s, without.tokens_per_s, strict=True)
            ),
            2,
        ),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", choices=("torch", "vllm"), action="append")
    parser.add_argument("--shape", choices=tuple(SHAPES), action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of vLLM's processes
    for engine in args.engine or ("torch", "vllm"):
        for shape in args.shape or SHAPES:
            result = asyncio.run(
                measure(engine, shape, repeats=args.repeats, num_threads=args.threads)
            )
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
