"""Measure several clients of one server of the Tinker API, each with its own adapter.

    python scripts/bench/tinker_clients.py [--clients 8] [--steps 5] [--prompts 8] [--group-size 8]
        [--tokens 32] [--apart]

A server process (`rlsys serve`) has a model of two layers with random weights. Each client trains
its own adapter with GRPO: it samples, computes a gradient, takes a step and saves weights for the
next samples. The clients run one after another, then all at once. Samples have seeds, so both
histories are the same up to rounding. Then all clients but one train again, first without others
and then while one in a process of its own asks for thousands of samples. `--apart` gives each
client a trainer process and a sampler of one version at a time, for comparison.

Prints one line of JSON last. `speedup` is the time of one after another over that of all at once,
without the time of creating the models. `difference` is the largest difference between the
log-probabilities of the two histories, over all trained tokens. `flood_slowdown` is the time of the
others during the flood over that without it, and `flood_difference` the largest difference between
their log-probabilities. `create_first_s` and `create_next_s` are the times of creating the first
model and, at the median, the others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

# Scripts of this folder have the names of recipes, so the checkout must come first.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from scripts.bench.environment_primitives import KEY, NAME, build_model, serving

RANK = 8
FLOOD, FLOOD_GROUP = 2048, 8  # requests of the client that floods, and samples of each
START_S = 60.0  # time limit of starting and ending that client
CLOSE_S = 10.0


@dataclass(frozen=True)
class Work:
    """The work of a client."""

    num_steps: int = 5
    num_prompts: int = 8  # of a step
    group_size: int = 8
    num_tokens: int = 32  # of each sample


@dataclass
class History:
    """Results of one client's steps."""

    seconds: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)  # of the trainer, one array per datum
    parts: Counter[str] = field(default_factory=Counter)  # seconds of each part of a step

    def difference(self, other: History) -> float:
        """Return the largest difference of log-probabilities; infinite for other tokens.

        Differences of numbers above 1 are relative.
        """
        if self.tokens != other.tokens:
            return float("inf")
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(
            float((np.abs(one - two) / np.maximum(1, np.abs(one))).max()) for one, two in pairs
        )


class Client:
    """A client of the server, with one model."""

    def __init__(self, url: str, number: int, *, key: str = KEY) -> None:
        import tinker

        self.number = number
        self._service = tinker.ServiceClient(base_url=url, api_key=key)
        start = time.perf_counter()
        self.client = self._service.create_lora_training_client(
            NAME, rank=RANK, seed=number
        ).result()
        self.create_s = time.perf_counter() - start

    def close(self) -> None:
        """End the session.

        The server ends it at once. Then the client's library may wait for its own poll for ever,
        if completions were cancelled.
        """
        with suppress(TimeoutError):
            self._service.close("success").result(CLOSE_S)

    def train(self, work: Work) -> History:
        """Train with GRPO to generate tokens that this client values."""
        from tinker import types

        history = History()
        tokenizer = self.client.get_tokenizer()
        values = np.random.default_rng(self.number).random(len(tokenizer))
        prompts = [tokenizer.encode(f"{self.number}+{one}=") for one in range(work.num_prompts)]
        for step in range(work.num_steps):
            start = time.perf_counter()
            sampler = self.client.save_weights_and_get_sampling_client().result()
            saved = time.perf_counter()
            asked = [
                sampler.sample(
                    types.ModelInput.from_ints(one),
                    work.group_size,
                    types.SamplingParams(max_tokens=work.num_tokens, seed=1000 * step + place),
                )
                for place, one in enumerate(prompts)
            ]
            data = []
            for prompt, future in zip(prompts, asked, strict=True):
                sequences = future.result().sequences
                history.tokens += [one.tokens for one in sequences]
                scores = np.array([values[one.tokens].mean() for one in sequences])
                history.rewards.append(float(scores.mean()))
                num_samples = len(asked) * work.group_size
                advantages = (scores - scores.mean()) / (scores.std() + 1e-4) / num_samples
                data += [
                    _datum(types, prompt, one, advantage)
                    for one, advantage in zip(sequences, advantages, strict=True)
                ]
            sampled = time.perf_counter()
            passed = self.client.forward_backward(data, "importance_sampling")
            self.client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            outputs = passed.result().loss_fn_outputs
            history.logprobs += [np.array(one["logprobs"].data) for one in outputs]
            end = time.perf_counter()
            history.seconds.append(end - start)
            parts = {"save": saved - start, "sample": sampled - saved, "train": end - sampled}
            history.parts.update(parts)
        return history


def flood(
    url: str, number: int, is_ready: Any, is_over: Any, *, num_requests: int = FLOOD, key: str = KEY
) -> None:
    """Ask for many samples until an event is set, and cancel those that are left.

    Args:
        url: Of the server.
        number: Of the client.
        is_ready: Event of threads or processes, set before the requests begin.
        is_over: Event that ends them.
        num_requests: For FLOOD_GROUP samples each.
        key: Of the server.
    """
    from tinker import types

    client = Client(url, number, key=key)
    sampler = client.client.save_weights_and_get_sampling_client().result()
    prompt, params = types.ModelInput.from_ints([3, 4]), types.SamplingParams(max_tokens=256)
    is_ready.set()
    asked = [sampler.sample(prompt, FLOOD_GROUP, params) for _ in range(num_requests)]
    is_over.wait()
    for one in asked:
        one.future().cancel()
    client.close()


@contextmanager
def flooded(url: str, number: int) -> Iterator[None]:
    """Let another process flood the server during the block."""
    context = multiprocessing.get_context("spawn")
    is_ready, is_over = context.Event(), context.Event()
    process = context.Process(target=flood, args=(url, number, is_ready, is_over), daemon=True)
    process.start()
    try:
        if not is_ready.wait(START_S):
            raise RuntimeError(f"the flooding client did not start within {START_S} s")
        yield
    finally:
        is_over.set()
        process.join(START_S)
        process.kill()


def _datum(types: Any, prompt: Sequence[int], sequence: Any, advantage: float) -> Any:
    tokens, before = [*prompt, *sequence.tokens], [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:]),
            "logprobs": np.array([*before, *sequence.logprobs], np.float32),
            "advantages": np.array([*before, *[advantage] * len(sequence.tokens)], np.float32),
        },
    )


@dataclass
class Phase:
    """Results of clients that train at the same time, or one after another."""

    histories: list[History]
    seconds: float  # of the training
    create_s: list[float]  # of each client's model

    def difference(self, other: Phase) -> float:
        """Return the largest difference between the log-probabilities of the same clients."""
        pairs = zip(self.histories, other.histories, strict=True)
        return max(one.difference(two) for one, two in pairs)


def train(name: str, url: str, numbers: Sequence[int], work: Work, *, at_once: bool) -> Phase:
    """Train new clients with these numbers, and print the times."""
    clients = [Client(url, number) for number in numbers]
    start = time.perf_counter()
    with ThreadPoolExecutor(len(clients) if at_once else 1) as pool:
        histories = list(pool.map(lambda one: one.train(work), clients))
    seconds = time.perf_counter() - start
    for one in clients:
        one.close()
    parts = sum((one.parts for one in histories), Counter[str]())
    shares = ", ".join(f"{part} {of_part:.2f} s" for part, of_part in parts.items())
    print(f"{name}: {seconds:.2f} s; all steps together: {shares}", flush=True)
    return Phase(histories, seconds, [one.create_s for one in clients])


def measure(
    work: Work | None = None, *, num_clients: int = 8, apart: bool = False
) -> dict[str, float]:
    """Return the results."""
    work = work or Work()
    everyone, others = range(num_clients), range(1, num_clients)
    options = ["--max-models", str(2 * num_clients)]
    if apart:
        options += ["--models-per-trainer", "1"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        model = build_model(Path(directory) / "model")
        with serving(model, Path(directory), *options) as url:
            # The first request starts the trainer and the sampler.
            first = train("first request", url, [0], replace(work, num_steps=1), at_once=False)
            alone = train("one after another", url, everyone, work, at_once=False)
            at_once = train("all at once", url, everyone, work, at_once=True)
            before = train("all but one", url, others, work, at_once=True)
            with flooded(url, num_clients):
                during = train("during the flood", url, others, work, at_once=True)
    rewards = [one.rewards for one in at_once.histories]
    return {
        "clients": float(num_clients),
        "alone_s": alone.seconds,
        "at_once_s": at_once.seconds,
        "speedup": alone.seconds / at_once.seconds,
        "difference": alone.difference(at_once),
        "flood_slowdown": during.seconds / before.seconds,
        "flood_difference": before.difference(during),
        "create_first_s": first.create_s[0],
        "create_next_s": median(alone.create_s),
        "reward_before": float(np.mean([one[: work.num_prompts] for one in rewards])),
        "reward_after": float(np.mean([one[-work.num_prompts :] for one in rewards])),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--apart", action="store_true")
    arguments = parser.parse_args()
    work = Work(arguments.steps, arguments.prompts, arguments.group_size, arguments.tokens)
    found = measure(work, num_clients=arguments.clients, apart=arguments.apart)
    print(json.dumps({name: round(value, 7) for name, value in found.items()}))


if __name__ == "__main__":
    main()
