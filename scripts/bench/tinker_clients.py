"""Measure several clients of one server of the Tinker API, each with its own adapter.

    python scripts/bench/tinker_clients.py [--clients 8] [--steps 5] [--prompts 8] [--group-size 8]
        [--tokens 32] [--apart]

A server process (`rlsys serve`) has a model of two layers with random weights. Each client trains
its own adapter with GRPO: it samples, computes a gradient, takes a step and saves weights for the
next samples. The clients run one after another, then all at once. Samples have seeds, so both
histories are the same up to rounding. Then one client asks for thousands of samples while the
others train. `--apart` gives each client a trainer process and a sampler of one version at a time,
for comparison.

Prints one line of JSON last. `speedup` is the time of one after another over that of all at once,
without the time of creating the models. `difference` is the largest difference between the
log-probabilities of the two histories, over all trained tokens. `flood_slowdown` is the median time
of a step during the flood over that before it. `create_first_s` and `create_next_s` are the times
of creating the first model and, at the median, the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
        """End the session."""
        self._service.close("success").result()

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

    def flood(self, is_over: threading.Event) -> None:
        """Ask for thousands of samples, and cancel those that are left at the end."""
        from tinker import types

        sampler = self.client.save_weights_and_get_sampling_client().result()
        prompt, params = types.ModelInput.from_ints([3, 4]), types.SamplingParams(max_tokens=256)
        asked = [sampler.sample(prompt, FLOOD_GROUP, params) for _ in range(FLOOD)]
        is_over.wait()
        for one in asked:
            one.future().cancel()


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


def timed(name: str, work: Callable[[], list[History]]) -> tuple[list[History], float]:
    """Return a result and the seconds that it took, and print them."""
    start = time.perf_counter()
    found = work()
    seconds = time.perf_counter() - start
    parts = sum((one.parts for one in found), Counter[str]())
    shares = ", ".join(f"{part} {of_part:.2f} s" for part, of_part in parts.items())
    print(f"{name}: {seconds:.2f} s; all steps together: {shares}", flush=True)
    return found, seconds


def measure(
    work: Work | None = None, *, num_clients: int = 8, apart: bool = False
) -> dict[str, float]:
    """Return the results."""
    work = work or Work()
    options = ["--max-models", str(2 * num_clients)]
    if apart:
        options += ["--models-per-trainer", "1"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        model = build_model(Path(directory) / "model")
        with serving(model, Path(directory), *options) as url:
            clients = [Client(url, number) for number in range(num_clients)]
            created = [one.create_s for one in clients]
            clients[0].train(replace(work, num_steps=1))  # starts what the first request starts
            clients[0].close()
            clients[0] = Client(url, 0)
            alone, alone_s = timed(
                "one after another", lambda: [one.train(work) for one in clients]
            )
            for one in clients:
                one.close()
            clients = [Client(url, number) for number in range(num_clients)]
            with ThreadPoolExecutor(num_clients) as pool:

                def together(some: Sequence[Client]) -> list[History]:
                    return list(pool.map(lambda one: one.train(work), some))

                at_once, at_once_s = timed("all at once", lambda: together(clients))
                before, _ = timed("all but one", lambda: together(clients[1:]))
                is_over = threading.Event()
                flooding = pool.submit(clients[0].flood, is_over)
                during, _ = timed("during the flood", lambda: together(clients[1:]))
                is_over.set()
                flooding.result()
            for one in clients:
                one.close()
    return {
        "clients": float(num_clients),
        "alone_s": alone_s,
        "at_once_s": at_once_s,
        "speedup": alone_s / at_once_s,
        "difference": max(one.difference(two) for one, two in zip(alone, at_once, strict=True)),
        "flood_slowdown": _median_step(during) / _median_step(before),
        "create_first_s": created[0],
        "create_next_s": median(created[1:]),
        "reward_before": float(np.mean([one.rewards[: work.num_prompts] for one in at_once])),
        "reward_after": float(np.mean([one.rewards[-work.num_prompts :] for one in at_once])),
    }


def _median_step(found: Sequence[History]) -> float:
    return median(seconds for one in found for seconds in one.seconds)


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
