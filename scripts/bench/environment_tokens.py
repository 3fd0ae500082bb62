"""Measure the cost of conversations beside generation, and search for lost tokens.

    python scripts/bench/environment_tokens.py

tokens       10,000 random episodes over eight kinds of chat template, with every kind of joint
             between texts: counts texts that are encoded twice, and trained tokens that differ
             from the sampled ones
bookkeeping  episodes of 128 turns of 32 tokens with the torch engine: seconds that conversations
             take for prompts and replies, divided by the seconds of the engine's thread

Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

import rlsys
from rlsys.config import RolloutConfig
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.environments.episode_host import EpisodeHost, EpisodeRequest
from rlsys.environments.token_budget import EpisodeLimits
from rlsys.environments.tokens.codec import Codec
from rlsys.environments.tokens.conversation import Conversation
from rlsys.environments.workers.sync_worker import SyncWorkerFunctions
from rlsys.launcher.tiny_models import build_tiny_model, build_tokenizer
from rlsys.text.tokenizer_boundary import Position
from rlsys.types import INJECTED, Generation, GenerationRequest, SamplingParams
from tests.environments.templates import tokenizer
from tests.environments.test_random_episodes import KINDS, Episode

T = TypeVar("T")

NUM_EPISODES = 10_000
NUM_TURNS, TURN_TOKENS, NUM_LONG = 128, 32, 8
CONTEXT = 16_384


def measure_tokens(num_episodes: int = NUM_EPISODES) -> dict[str, int]:
    """Return the counts over random episodes."""
    num_twice = num_other = num_sampled = 0
    for kind in KINDS.values():
        codec = Codec(tokenizer(), chat_template=kind.template, template_kwargs=kind.options)
        texts: list[str] = []
        encode = codec.boundary.encode_plain

        def noted(
            text: str,
            position: Position,
            texts: list[str] = texts,
            encode: Callable[[str, Position], list[int]] = encode,
        ) -> list[int]:
            texts.append(text)
            return encode(text, position)

        codec.boundary.encode_plain = noted  # type: ignore[method-assign]
        for seed in range(num_episodes // len(KINDS)):
            texts.clear()
            episode = Episode(codec, kind, seed)
            episode.run()
            num_twice += len(texts) - len(set(texts))
            made = episode.conversation.trajectory()
            is_trained = made.policy_versions != INJECTED
            trained = Counter(
                zip(
                    made.token_ids[is_trained].tolist(),
                    made.sampler_logprobs[is_trained].tolist(),
                    made.policy_versions[is_trained].tolist(),
                    strict=True,
                )
            )
            sampled: Counter[tuple[int, float, int]] = Counter()
            for _, generation in episode.sampled:
                sampled.update(_tokens(generation))
            num_sampled += sampled.total()
            num_other += (trained - sampled).total() + (sampled - trained).total()
    return {
        "random_episodes": num_episodes,
        "sampled_tokens": num_sampled,
        "texts_encoded_twice": num_twice,
        "tokens_trained_otherwise": num_other,
    }


def _tokens(generation: Generation) -> list[tuple[int, float, int]]:
    columns = (generation.token_ids, generation.sampler_logprobs, generation.policy_versions)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@rlsys.environment(turn_tokens=TURN_TOKENS)
async def long(chat: Any, task: Any) -> float:
    """Play 128 turns."""
    for number in range(NUM_TURNS):
        await chat(f"What of {number}?")
    return 1.0


class EngineSampler:
    """Sampler with an engine in this process."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._waiting: dict[str, asyncio.Future[Generation]] = {}

    async def sample(self, request: GenerationRequest) -> Generation:
        """Return the reply of the engine."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = answer
        self._engine.submit([request])
        generation: Generation = await answer
        return generation

    async def listen(self) -> None:
        """Deliver replies until cancelled."""
        while True:
            for generation in await self._engine.collect():
                self._waiting.pop(generation.request_id).set_result(generation)


class Stopwatch:
    """Total CPU time of calls of functions in this thread."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return the function with its time measured."""

        def call(*args: Any, **named: Any) -> T:
            start = time.thread_time()
            try:
                return function(*args, **named)
            finally:
                self.seconds += time.thread_time() - start

        return call


async def bookkeeping(model: Path) -> dict[str, float]:
    """Return the two times."""
    watch = Stopwatch()
    prompt, reply = Conversation.prompt, Conversation.reply
    Conversation.prompt = watch.timed(prompt)  # type: ignore[method-assign]
    Conversation.reply = watch.timed(reply)  # type: ignore[method-assign]
    engine = TorchEngine(model, RolloutConfig(num_cpus=1), dtype="float32", num_threads=1)
    await engine.start()
    sampler = EngineSampler(engine)
    listening = asyncio.create_task(sampler.listen())
    host = EpisodeHost(
        long,
        Codec(build_tokenizer()),
        sampler,
        limits=EpisodeLimits(max_prompt_tokens=64, max_tokens=CONTEXT - 64, max_context=CONTEXT),
        executor=SyncWorkerFunctions(long, memory_gib=4.0, start_timeout_s=60.0),
    )
    start, before = time.perf_counter(), time.process_time() - time.thread_time()
    host.submit(
        [
            EpisodeRequest(
                request_id=f"{n}.0.0",
                task={},
                sampling=SamplingParams(max_tokens=CONTEXT),
                seed=n,
                group_id=n,
                index=0,
                group_size=1,
            )
            for n in range(NUM_LONG)
        ]
    )
    num_ended = 0
    while num_ended < NUM_LONG:
        ended = await host.collect()
        assert all(one.played and len(one.played.transcript) == 2 * NUM_TURNS for one in ended)
        num_ended += len(ended)
    seconds = time.perf_counter() - start
    engine_s = time.process_time() - time.thread_time() - before
    listening.cancel()
    await engine.close()
    await host.close()
    Conversation.prompt, Conversation.reply = prompt, reply  # type: ignore[method-assign]
    return {
        "bookkeeping_s": watch.seconds,
        "generation_cpu_s": engine_s,
        "bookkeeping_wall_s": seconds,
        "bookkeeping_frac": watch.seconds / engine_s,
    }


def measure_bookkeeping() -> dict[str, float]:
    """Return the ratio of the times."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model = build_tiny_model(directory, max_context=CONTEXT)
        return asyncio.run(bookkeeping(model))


def measure(parts: Sequence[str] = ("tokens", "bookkeeping")) -> dict[str, float]:
    """Return the results of the parts."""
    found: dict[str, float] = {}
    if "tokens" in parts:
        found |= measure_tokens()
    if "bookkeeping" in parts:
        found |= measure_bookkeeping()
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=["tokens", "bookkeeping"])
    print(json.dumps(measure(parser.parse_args().only)))


if __name__ == "__main__":
    main()
