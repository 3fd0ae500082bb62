"""Measure the server of the Tinker API under its unmodified client.

    python scripts/bench/environment_primitives.py [--steps 25] [--futures 2048]

A server process (`rlsys serve`) has a model of two layers with random weights. The
client trains it with GRPO to generate one digit. Then it waits for `--futures` samples with its one
poll while the sampler works on them. Then the sampler stops, and as many commands wait for one that
does not arrive, each with its own connection and long poll. Meanwhile 20 heartbeats per second are
sent.

Prints one line of JSON last. `tinker_reward_before` and `tinker_reward_after` are the mean rewards
of the first and the last step, from 0 to 1. `tinker_step_s` is the median time of a step in
seconds. `tinker_logprob_error` is the largest difference between log-probabilities of sampler and
trainer for on-policy tokens. `heartbeat_p95_ms` is the larger one of `heartbeat_samples_p95_ms` and
`heartbeat_polls_p95_ms`. `waiting_samples` counts the samples that were still running when the last
heartbeat was answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

# Scripts of this folder have the names of recipes, so the checkout must come first.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
KEY = "tml-for-the-benchmark"
NAME = "tiny"
START_S = 180.0
BEATS, EVERY_S = 200, 0.05

GROUP, NUM_TOKENS, TARGET = 8, 8, "7"

# Tokens of each request: the sampler needs a minute for all of them.
SAMPLES = 32

FAR = 1_000_000  # number of the command that does not arrive


def build_model(directory: Path) -> Path:
    """Write a random model whose large embeddings let the frozen head be certain of a token."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlsys.engines.models.causal_lm import save_model
    from rlsys.launcher.tiny_models import build_tiny_model

    path = build_tiny_model(
        directory,
        characters="0123456789+=",
        width=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        mlp_width=128,
        max_context=2048,
    )
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.get_input_embeddings().weight *= 4
    save_model(model, path)
    return path


@contextlib.contextmanager
def serving(model: Path, directory: Path, *options: str) -> Iterator[str]:
    """Yield the URL of a server process, which ends with the block."""
    command = [
        *(sys.executable, "-m", "rlsys", "serve", "--port", "0"),
        *("--model.path", str(model), "--model.name", NAME),
        *("--checkpoints-dir", str(directory / "checkpoints"), *options),
    ]
    environment = {
        **os.environ,
        "TINKER_API_KEY": KEY,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    log = directory / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield _url(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        _, found, rest = log.read_text().partition("TINKER_BASE_URL=")
        if found:
            return rest.split()[0]
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start:\n{log.read_text()}")


@dataclass
class Step:
    """Results of one step."""

    reward: float
    seconds: float
    error: float  # of log-probabilities
    labels: set[str]  # weights that sampled the sequences


def grpo(client: Any, num_steps: int, *, learning_rate: float = 2e-2) -> Iterator[Step]:
    """Train on-policy with GRPO to generate TARGET, as users of the client write it."""
    from tinker import types

    tokenizer = client.get_tokenizer()
    (target,) = tokenizer.encode(TARGET)
    prompts = [tokenizer.encode(f"{a}+{b}=") for a in range(4) for b in range(4)]
    for number in range(num_steps):
        start = time.perf_counter()
        sampler = client.save_weights_and_get_sampling_client().result()
        asked = [
            sampler.sample(
                types.ModelInput.from_ints(prompt),
                GROUP,
                types.SamplingParams(max_tokens=NUM_TOKENS, seed=number * len(prompts) + place),
            )
            for place, prompt in enumerate(prompts)
        ]
        data, rewards, labels, sampled = [], [], set(), []
        for prompt, future in zip(prompts, asked, strict=True):
            sequences = future.result().sequences
            scores = np.array([np.mean([t == target for t in one.tokens]) for one in sequences])
            rewards += scores.tolist()
            advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
            for one, advantage in zip(sequences, advantages, strict=True):
                labels.add(one.sequence_id.partition("@")[2])
                tokens, before = [*prompt, *one.tokens], [0.0] * (len(prompt) - 1)
                own = [advantage / (len(prompts) * GROUP)] * len(one.tokens)
                data.append(
                    types.Datum(
                        model_input=types.ModelInput.from_ints(tokens[:-1]),
                        loss_fn_inputs={
                            "target_tokens": np.array(tokens[1:]),
                            "logprobs": np.array([*before, *one.logprobs], np.float32),
                            "advantages": np.array([*before, *own], np.float32),
                        },
                    )
                )
                sampled.append(np.array(one.logprobs))
        passed = client.forward_backward(data, "importance_sampling")
        client.optim_step(types.AdamParams(learning_rate=learning_rate)).result()
        trained = [np.array(one["logprobs"].data) for one in passed.result().loss_fn_outputs]
        error = max(
            float(np.abs(now[-len(then) :] - then).max())
            for now, then in zip(trained, sampled, strict=True)
        )
        yield Step(float(np.mean(rewards)), time.perf_counter() - start, error, labels)


class Connection:
    """An HTTP connection that is kept alive."""

    def __init__(self, url: str) -> None:
        self._where = urlsplit(url)
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> None:
        """Connect."""
        assert self._where.hostname
        self._reader, self._writer = await asyncio.open_connection(
            self._where.hostname, self._where.port
        )

    async def post(self, path: str, body: dict[str, Any]) -> int:
        """Send a request and return the status of the answer."""
        content = json.dumps(body).encode()
        head = (
            f"POST /api/v1/{path} HTTP/1.1\r\nHost: bench\r\nX-API-Key: {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self._writer.write(head.encode() + content)
        status = int((await self._reader.readline()).split()[1])
        length = 0
        while (line := await self._reader.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        await self._reader.readexactly(length)
        return status

    def close(self) -> None:
        """Disconnect."""
        self._writer.close()


async def heartbeats(url: str, session: str) -> list[float]:
    """Return the seconds of each heartbeat."""
    connection = Connection(url)
    await connection.open()
    found = []
    for _ in range(BEATS):
        start = time.perf_counter()
        status = await connection.post("session_heartbeat", {"session_id": session})
        found.append(time.perf_counter() - start)
        assert status == 200, status
        await asyncio.sleep(EVERY_S)
    connection.close()
    return found


def heartbeats_during_samples(service: Any, url: str, count: int) -> tuple[list[float], int]:
    """Send heartbeats while the client waits for samples.

    Returns their seconds, and the number of samples that are still running at the end.
    """
    from tinker import types

    sampler = service.create_sampling_client(base_model=NAME).result()
    prompt, params = types.ModelInput.from_ints([3, 4]), types.SamplingParams(max_tokens=2000)
    # Some have ended before the last one is sent.
    asked = [sampler.sample(prompt, SAMPLES, params) for _ in range(count + count // 4)]
    first = asked[0].future()
    first.result(START_S)  # the sampler works on them
    beats = asyncio.run(heartbeats(url, service.holder.get_session_id()))
    left = [one for one in asked if not one.future().done()]
    for one in left:
        one.future().cancel()
    return beats, len(left)


async def heartbeats_during_polls(url: str, session: str, model: str, count: int) -> list[float]:
    """Send heartbeats while commands, of which the first has not arrived, are polled one by one."""
    connections = [Connection(url) for _ in range(count)]
    for one in connections:
        await one.open()
    for number, one in enumerate(connections):
        body = {"model_id": model, "seq_id": FAR + number, "adam_params": {}}
        assert await one.post("optim_step", body) == 200
    polls = [
        asyncio.create_task(one.post("retrieve_future", {"request_id": f"{model}:{FAR + number}"}))
        for number, one in enumerate(connections)
    ]
    await asyncio.sleep(1.0)  # until the server has read them all
    try:
        beats = await heartbeats(url, session)
        assert not any(poll.done() for poll in polls), "a future was not waiting"
        return beats
    finally:
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        for one in connections:
            one.close()


def measure(*, num_steps: int = 25, num_futures: int = 2048) -> dict[str, float]:
    """Return the results."""
    import tinker

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        model = build_model(Path(directory) / "model")
        with serving(model, Path(directory)) as url:
            service = tinker.ServiceClient(base_url=url, api_key=KEY)
            client = service.create_lora_training_client(NAME, rank=8, seed=0).result()
            steps = []
            for number, step in enumerate(grpo(client, num_steps)):
                assert len(step.labels) == 1, step.labels
                print(f"step {number}: reward {step.reward:.3f}, {step.seconds:.2f} s", flush=True)
                steps.append(step)
            session = service.holder.get_session_id()
            polled = asyncio.run(
                heartbeats_during_polls(url, session, client.model_id, num_futures)
            )
            sampled, num_left = heartbeats_during_samples(service, url, num_futures)
    p95 = {
        "heartbeat_samples_p95_ms": float(np.percentile(sampled, 95)) * 1e3,
        "heartbeat_polls_p95_ms": float(np.percentile(polled, 95)) * 1e3,
    }
    return {
        "tinker_reward_before": steps[0].reward,
        "tinker_reward_after": steps[-1].reward,
        "tinker_step_s": median(step.seconds for step in steps),
        "tinker_logprob_error": max(step.error for step in steps),
        "heartbeat_p95_ms": max(p95.values()),
        **p95,
        "heartbeat_median_ms": median([*sampled, *polled]) * 1e3,
        "waiting_polls": float(num_futures),
        "waiting_samples": float(num_left),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--futures", type=int, default=2048)
    arguments = parser.parse_args()
    found = measure(num_steps=arguments.steps, num_futures=arguments.futures)
    print(json.dumps({name: round(value, 6) for name, value in found.items()}))


if __name__ == "__main__":
    main()
