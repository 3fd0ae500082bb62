"""Throughput of an engine with a limited cache, with and without a limit of running requests.

    python scripts/bench/preemptions.py

Time model: rlsys/controller/simulation/batching_engine.py. Each line has a size of the cache, a
time of a recomputed token and, for each seed, the throughput with the limit relative to that
without. A decode step takes 8 ms and 20 µs for each sequence. Completions have 8 to 800 tokens,
about 100.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass

from rlsys.controller.simulation.batching_engine import BatchingEngine, SampledSequence
from rlsys.dataflow.scheduling.admission_window import AdmissionWindow

CACHE_TOKENS = (2_500, 5_000, 10_000, 100_000)
TOKEN_S = (2e-5, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
GROUP_SIZE, PROMPT_TOKENS = 8, 25


@dataclass(frozen=True)
class Costs:
    """Seconds of an engine."""

    token_s: float

    def decode_step_s(self, num_sequences: int, context_tokens: float) -> float:
        """Return the time of a step."""
        return 8e-3 + 2e-5 * num_sequences + 4e-8 * context_tokens

    def prefill_s(self, num_tokens: int) -> float:
        """Return the time to compute tokens, for the first time or again."""
        return self.token_s * num_tokens


def seconds(
    costs: Costs, cache_tokens: int, window: AdmissionWindow | None, *, seed: int, num: int
) -> float:
    """Return the time of an engine for `num` completions that are there from the start."""
    lengths = random.Random(seed)
    engine = BatchingEngine(costs, cache_tokens=cache_tokens, window=window)
    engine.is_admitting = False
    for number in range(num):
        drawn = int(lengths.lognormvariate(math.log(100), 0.8))
        sequence = SampledSequence(
            name=str(number),
            prompt=number // GROUP_SIZE,
            num_prompt_tokens=PROMPT_TOKENS,
            num_tokens=min(800, max(8, drawn)),
        )
        engine.add(sequence, 0.0)
    engine.admit_again(0.0)
    while (now_s := engine.next_event_s()) is not None:
        engine.advance(now_s)
    return engine.busy_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--completions", type=int, default=400)
    options = parser.parse_args()
    for cache_tokens in CACHE_TOKENS:
        for token_s in TOKEN_S:
            gains = []
            for seed in range(options.seeds):
                given = {"seed": seed, "num": options.completions}
                plain = seconds(Costs(token_s), cache_tokens, None, **given)
                gains.append(
                    plain / seconds(Costs(token_s), cache_tokens, AdmissionWindow(), **given)
                )
            each = " ".join(f"{gain:.2f}" for gain in gains)
            print(f"cache {cache_tokens:7,} tokens, {1e6 * token_s:4.0f} µs a token: {each}")


if __name__ == "__main__":
    main()
