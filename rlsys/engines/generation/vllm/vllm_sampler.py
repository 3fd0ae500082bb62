"""Sampling inside vLLM: a random stream per request, log-probabilities of the full distribution.

    logits [N, V] at the temperature ──► tokens [N], log-probabilities [N, V] before top-k, top-p
                                         and the masks of structured outputs

vLLM masks the logits of structured outputs before it samples, so that its log-probabilities would
be those of the masked distribution. Here the logits stay unchanged, and only the draw is masked.

vLLM's own sampler draws for all requests from one stream, so that the result of a request depends
on earlier and concurrent ones. Its streams for single requests do not survive a pause on the CPU.

Shape legend: N requests, V vocabulary, C truncated rows, M rows with a mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from rlsys.engines.generation.sampling import Allowed, Cut, draw, stream_key, uniforms
from rlsys.engines.generation.vllm.vllm_requests import STREAM
from rlsys.types import Float32Array


def replace_sampler(runner: Any) -> tuple[SeededSampler, Masks] | None:
    """Replace the sampler of a vLLM model runner of either version.

    Returns the parts that speculation needs, on runner 1.
    """
    if isinstance(runner.sampler, nn.Module):
        return _replace_in_first(runner)
    _replace_in_second(runner)
    return None


def _replace_in_first(runner: Any) -> tuple[SeededSampler, Masks]:
    from vllm.v1.worker import gpu_model_runner

    sampler = runner.sampler
    masks = Masks(gpu_model_runner.apply_grammar_bitmask, place_of_logits=3)
    gpu_model_runner.apply_grammar_bitmask = masks.keep
    seeded = sampler.topk_topp_sampler = SeededSampler(runner, masks)
    most_likely, forward = sampler.greedy_sample, sampler.forward

    def greedy_sample(logits: torch.Tensor) -> torch.Tensor:
        sampled: torch.Tensor = most_likely(masks.applied(logits))
        return sampled

    def forward_once(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        finally:
            masks.forget()

    sampler.greedy_sample, sampler.forward = greedy_sample, forward_once
    return seeded, masks


def _replace_in_second(runner: Any) -> None:
    """Keep the logits of model runner 2 from before truncation.

    It draws by the requests' seeds and positions already.
    """
    worker = getattr(runner, "structured_outputs_worker", None)
    masks = Masks(worker and worker.apply_grammar_bitmask, place_of_logits=0)
    if worker is not None:
        worker.apply_grammar_bitmask = masks.keep
    cut_and_sample = runner.sampler._sample_random

    def sample(logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        restricted = masks.applied(logits)
        masks.forget()
        if restricted is logits:
            restricted = logits.clone()  # vLLM truncates in place
        sampled, _ = cut_and_sample(restricted, *args, **kwargs)
        return sampled, logits

    runner.sampler._sample_random = sample


class Masks:
    """Masks of structured outputs for the next draw, intercepted from vLLM's function."""

    def __init__(self, apply: Any, *, place_of_logits: int) -> None:
        self._apply = apply
        self._place = place_of_logits
        self._mask: torch.Tensor | None = None  # [N, V]: 0, or -inf where a token is not allowed

    def keep(self, *args: Any) -> None:
        """Intercept the call of vLLM's function, with zeros in place of the logits."""
        mask = torch.zeros_like(args[self._place], dtype=torch.float32)
        self._apply(*args[: self._place], mask, *args[self._place + 1 :])
        self._mask = mask

    def forget(self) -> None:
        """Drop the masks after the draw."""
        self._mask = None

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] with the masks, or unchanged if there are none."""
        return logits if self._mask is None else logits + self._mask

    def allowed(self) -> Allowed | None:
        """Return the tokens that the masked rows may sample."""
        if self._mask is None:
            return None
        tokens = self._mask == 0
        rows = (~tokens).any(-1).nonzero()[:, 0]  # [M]
        return Allowed(rows, tokens[rows]) if len(rows) else None


class SeededSampler(nn.Module):
    """Replacement of vLLM's TopKTopPSampler that draws as the torch engine does."""

    def __init__(self, runner: Any, masks: Masks) -> None:
        super().__init__()
        self._masks = masks
        self._requests: dict[str, Any] = runner.requests
        self._runner = runner

    def forward(
        self,
        logits: torch.Tensor,  # [N, V] divided by the temperature
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,  # [N]
        p: torch.Tensor | None,  # [N]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [N] and log-probabilities [N, V]."""
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        numbers = self.uniforms(np.zeros(len(logits), np.int64))
        drawn = torch.from_numpy(numbers).to(logits.device)
        return draw(logprobs, drawn, cut_of(logits, k, p), self._masks.allowed()), logprobs

    def uniforms(self, num_drafted: np.ndarray[Any, Any]) -> Float32Array:
        """Return the numbers that draw the next tokens of the batch's requests.

        With drafted tokens [N], those after the last token and after each drafted one, request by
        request.
        """
        batch, num_requests = self._runner.input_batch, len(num_drafted)
        names = batch.req_ids[:num_requests]
        streams = [_stream(name, self._requests[name].sampling_params) for name in names]
        keys = np.array([key for key, _ in streams], np.uint64)
        num_prior = np.array([prior for _, prior in streams])
        # vLLM's length counts the drafted tokens.
        num_tokens = self._runner.optimistic_seq_lens_cpu[:num_requests].numpy() - num_drafted
        index = num_tokens - batch.num_prompt_tokens[:num_requests] + num_prior
        num_rows = num_drafted + 1
        ends = np.cumsum(num_rows)
        offsets = np.arange(ends[-1]) - np.repeat(ends - num_rows, num_rows)
        return uniforms(np.repeat(keys, num_rows), np.repeat(index, num_rows) + offsets)


def _stream(name: str, params: Any) -> tuple[int, int]:
    """Return key and number of prior tokens; another client of a server gives none."""
    stream: tuple[int, int] = (params.extra_args or {}).get(STREAM) or (
        stream_key(params.seed if params.seed is not None else hash(name)),
        0,
    )
    return stream


def cut_of(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> Cut | None:
    """Return the truncated rows. vLLM passes the vocabulary size as k, and 1 as p, for others."""
    if k is None and p is None:
        return None
    num_rows, vocabulary = logits.shape
    top_k = logits.new_zeros(num_rows, dtype=torch.long) if k is None else k.long() % vocabulary
    top_p = logits.new_ones(num_rows) if p is None else p
    rows = ((top_k > 0) | (top_p < 1)).nonzero()[:, 0]  # [C]
    return Cut(rows, top_k[rows], top_p[rows])
