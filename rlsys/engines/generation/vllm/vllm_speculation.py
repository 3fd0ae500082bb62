"""Speculation inside vLLM: drafts are checked with the requests' own random streams.

    logits [R, V] after a last token and after drafted ones ──► tokens [N, K + 1] ──► accepted ones

vLLM's own rejection sampler draws from one stream for all requests, reads uninitialised
temperatures of drafted tokens on the CPU (vllm-project/vllm#55005), and returns log-probabilities
after top-k and top-p. Here each row samples its next token as a pass without drafts would, and a
drafted token is accepted if it equals the one that was sampled. So tokens do not depend on the
drafts. A draft that is the most likely token of its model, which is vLLM's default, is accepted as
often as by rejection sampling.

Model runner 2, which vLLM uses on GPUs, keeps its own rejection sampler.

Shape legend: N requests, K tokens of the longest draft, R = N + all drafted tokens, V vocabulary,
M = N · (K + 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rlsys.engines.generation.sampling import draw
from rlsys.engines.generation.vllm.vllm_sampler import Masks, SeededSampler, cut_of

PLACEHOLDER = -1  # vLLM's mark of a rejected token
GREEDY = 1e-5  # vLLM treats lower temperatures as 0


@dataclass
class DraftCounts:
    """Numbers of drafted and of accepted tokens since the engine's start."""

    drafted: int = 0
    accepted: int = 0


class SeededRejectionSampler(nn.Module):
    """Replacement of vLLM's RejectionSampler that samples as passes without drafts do."""

    def __init__(self, runner: Any, sampler: SeededSampler, masks: Masks) -> None:
        super().__init__()
        self.counts = DraftCounts()
        self._masks = masks
        self._sampler = sampler
        self._runner = runner

    def forward(
        self,
        metadata: Any,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,  # [R, V]
        sampling_metadata: Any,
    ) -> Any:
        """Return vLLM's SamplerOutput; arguments as those of RejectionSampler.forward."""
        num_drafted = np.asarray(metadata.num_draft_tokens)  # [N]
        num_rows = torch.from_numpy(num_drafted + 1).to(logits.device)  # [N]
        try:
            tokens, logprobs = self._sample(logits, num_drafted, num_rows, sampling_metadata)
        finally:
            self._masks.forget()
        drafted = metadata.draft_token_ids.long()
        accepted, rows = verified(tokens, drafted, num_rows)
        self.counts.drafted += int(num_drafted.sum())
        self.counts.accepted += int((accepted != PLACEHOLDER).sum()) - len(num_drafted)
        return _output(accepted, tokens[rows], logprobs[rows])

    def _sample(
        self,
        logits: torch.Tensor,
        num_drafted: np.ndarray[Any, Any],
        num_rows: torch.Tensor,
        params: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token after each row, [R], and its log-probability."""

        def of_rows(of_requests: torch.Tensor) -> torch.Tensor:
            return of_requests.repeat_interleave(num_rows, output_size=len(logits))

        scaled = logits.float()
        is_greedy = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        if params.all_greedy:
            is_greedy[:] = True
        else:
            temperature = of_rows(params.temperature)
            is_greedy = temperature < GREEDY
            scaled = scaled / temperature.masked_fill(is_greedy, 1)[:, None]
        logprobs = scaled.log_softmax(-1)  # [R, V]
        top_k, top_p = (None if x is None else of_rows(x) for x in (params.top_k, params.top_p))
        numbers = torch.from_numpy(self._sampler.uniforms(num_drafted)).to(logits.device)
        tokens = draw(logprobs, numbers, cut_of(scaled, top_k, top_p), self._masks.allowed())
        if is_greedy.any():
            tokens = torch.where(is_greedy, self._masks.applied(scaled).argmax(-1), tokens)
        return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def verified(
    tokens: torch.Tensor, drafted: torch.Tensor, num_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the accepted tokens [N, K + 1] and the row of each place, [M].

    `tokens` [R] were sampled after each row, `drafted` are the inputs of all rows but each
    request's first, and `num_rows` [N] count the rows. Rejected places have PLACEHOLDER; they and
    places beyond a request's rows may have any row.
    """
    starts = num_rows.cumsum(0) - num_rows  # [N]
    places = torch.arange(int(num_rows.max()), device=tokens.device)  # [K + 1]
    rows = torch.minimum(starts[:, None] + places, starts[:, None] + num_rows[:, None] - 1)
    sampled = tokens[rows]  # [N, K + 1]
    firsts = torch.arange(len(num_rows), device=tokens.device)
    # Each request has one drafted token less than rows.
    input_index = (rows[:, 1:] - 1 - firsts[:, None]).clamp(min=0)
    inputs = drafted[input_index.clamp(max=max(0, len(drafted) - 1))] if len(drafted) else None
    keep = places < num_rows[:, None]
    if inputs is not None:
        right = (inputs == sampled[:, :-1]) & keep[:, 1:]
        keep[:, 1:] = right.long().cumprod(1).bool()
    return sampled.masked_fill(~keep, PLACEHOLDER), rows.flatten()


def _output(accepted: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor) -> Any:
    """Return vLLM's SamplerOutput of tokens [N, K + 1], with log-probabilities of places [M]."""
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    return SamplerOutput(
        sampled_token_ids=accepted.to(torch.int32),
        logprobs_tensors=LogprobsTensors(
            logprob_token_ids=tokens.to(torch.int32)[:, None],
            logprobs=logprobs[:, None],
            selected_token_ranks=torch.zeros_like(tokens),
        ),
    )
