"""Measure transformers' `generate` on the CPU, 2 threads: the peer of scripts/bench/generate.py.

    python scripts/bench/peers/hf_generate.py MODEL_DIR

Samples 128 sequences of 8 prompt tokens. Equal: 64 new tokens each. Mixed: the same total number of
new tokens, with lengths spread from 4 to 124; `generate` runs until the longest has ended, and only
the requested tokens count. Prints one line of JSON last: medians of 5 runs, in tokens/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from transformers import AutoModelForCausalLM

NUM_SEQUENCES, PROMPT_TOKENS, NEW_TOKENS, LONGEST = 128, 8, 64, 124
REPEATS = 5


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="tokens/s of transformers' generate on the CPU")
    parser.add_argument("model_dir", help="a Hugging Face checkpoint")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model_dir, dtype=torch.float32).eval()
    prompts = torch.randint(4, 40, (NUM_SEQUENCES, PROMPT_TOKENS))  # [N, T]

    def run(num_tokens: int) -> float:
        start = time.perf_counter()
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=True,
            pad_token_id=0,
        )
        return time.perf_counter() - start

    run(NEW_TOKENS)  # warm up
    equal_s = statistics.median(run(NEW_TOKENS) for _ in range(REPEATS))
    mixed_s = statistics.median(run(LONGEST) for _ in range(REPEATS))
    wanted = NUM_SEQUENCES * NEW_TOKENS
    print(
        json.dumps(
            {
                "peer": "transformers.generate",
                "equal_tokens_per_s": round(wanted / equal_s),
                "mixed_tokens_per_s": round(wanted / mixed_s),
            }
        )
    )


if __name__ == "__main__":
    main()
