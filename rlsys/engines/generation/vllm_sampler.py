"""What samples inside vLLM: each request by its own random stream, log-probabilities uncut.

    logits [N, V] at the temperature ──► tokens [N], log-probabilities [N, V] before top-k and top-p

vLLM's own sampler draws for all requests from one stream: the same request then yields something
else in an engine that has sampled before, or with other companions. Its streams for single requests
do not survive a pause on the CPU.

Shape legend: N requests, V vocabulary, C those of them whose distribution is cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from rlsys.engines.generation.sampling import Cut, draw, uniforms
from rlsys.engines.generation.vllm_requests import STREAM


def replace_sampler(runner: Any) -> None:
    """Put ours into a vLLM model runner of either version."""
    if isinstance(runner.sampler, nn.Module):
        runner.sampler.topk_topp_sampler = SeededSampler(runner)
        return
    # Version 2 draws by the seeds of requests and by position, and only has to keep what it cuts.
    cut_and_sample = runner.sampler._sample_random

    def sample(logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        sampled, _ = cut_and_sample(logits.clone(), *args, **kwargs)  # cuts in place
        return sampled, logits

    runner.sampler._sample_random = sample


class SeededSampler(nn.Module):
    """Draws as the torch engine does; in the place of vLLM's TopKTopPSampler."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._requests: dict[str, Any] = runner.requests
        self._runner = runner

    def forward(
        self,
        logits: torch.Tensor,  # [N, V] divided by the temperature
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,  # [N]
        p: torch.Tensor | None,  # [N]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        numbers = torch.from_numpy(self._uniforms(len(logits))).to(logits.device)
        return draw(logprobs, numbers, _cut(logits, k, p)), logprobs

    def _uniforms(self, num_rows: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The numbers that draw the next token of the batch's requests."""
        batch = self._runner.input_batch
        params = [self._requests[name].sampling_params for name in batch.req_ids[:num_rows]]
        streams = [param.extra_args[STREAM] for param in params]
        keys = np.array([key for key, _ in streams], np.uint64)
        num_prior = np.array([prior for _, prior in streams])
        num_tokens = self._runner.optimistic_seq_lens_cpu[:num_rows].numpy()
        return uniforms(keys, num_tokens - batch.num_prompt_tokens[:num_rows] + num_prior)


def _cut(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> Cut | None:
    """vLLM gives the whole vocabulary as k, and 1 as p, where nothing is cut."""
    if k is None and p is None:
        return None
    num_rows, vocabulary = logits.shape
    top_k = logits.new_zeros(num_rows, dtype=torch.long) if k is None else k.long() % vocabulary
    top_p = logits.new_ones(num_rows) if p is None else p
    rows = ((top_k > 0) | (top_p < 1)).nonzero()[:, 0]  # [C]
    return Cut(rows, top_k[rows], top_p[rows])
