"""Masks of structured outputs in vLLM's second model runner (GPUs only), with fakes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from rlsys.engines.generation.vllm.vllm_sampler import replace_sampler


class Sampler:
    """Fake that truncates its logits in place, as vLLM does, and takes the likeliest token."""

    def _sample_random(self, logits: torch.Tensor, *args: Any) -> tuple[Any, torch.Tensor]:
        sampled = logits.argmax(-1)
        logits.fill_(0.0)
        return sampled, logits


class Worker:
    """Fake that allows only the tokens [N] of the masks."""

    def apply_grammar_bitmask(
        self, logits: torch.Tensor, batch: Any, names: list[str], masks: list[int]
    ) -> None:
        for row, allowed in enumerate(masks):
            kept = logits[row, allowed].clone()
            logits[row] = -torch.inf
            logits[row, allowed] = kept


def test_the_draw_is_masked_and_the_logits_are_not() -> None:
    runner = SimpleNamespace(sampler=Sampler(), structured_outputs_worker=Worker())
    replace_sampler(runner)
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 1.0, 5.0]])
    before = logits.clone()

    runner.structured_outputs_worker.apply_grammar_bitmask(logits, None, ["a"], [2])
    assert torch.equal(logits, before)
    sampled, returned = runner.sampler._sample_random(logits / 0.5, None)
    assert sampled.tolist() == [2, 2]  # the first row's mask; the second is free
    assert torch.equal(returned, before / 0.5)

    sampled, returned = runner.sampler._sample_random(logits, None)  # a step without masks
    assert sampled.tolist() == [1, 2]
    assert torch.equal(returned, before)


def test_a_runner_without_structured_outputs_samples_as_before() -> None:
    runner = SimpleNamespace(sampler=Sampler(), structured_outputs_worker=None)
    replace_sampler(runner)
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    sampled, returned = runner.sampler._sample_random(logits, None)
    assert sampled.tolist() == [1]
    assert torch.equal(returned, torch.tensor([[1.0, 3.0, 2.0]]))
