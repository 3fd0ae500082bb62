"""A test of whether sampled tokens have the distribution of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlsys.types import Generation, Int32Array

NUM_BINS = 20


def p_value(
    model: Any,
    prompts: Sequence[Sequence[int]],
    generations: Sequence[Generation],
    *,
    temperature: float,
    seed: int,
) -> float:
    """Return the probability of numbers that fit the model less than these completions.

    A token t drawn from probabilities with the cumulative sum F gives a uniform number, if one is
    drawn from [F(t - 1), F(t)). χ² over NUM_BINS bins compares these numbers with a uniform
    distribution.
    """
    numbers = np.random.default_rng(seed)
    uniform = []
    for prompt, one in zip(prompts, generations, strict=True):
        tokens: Int32Array = one.token_ids
        row = torch.tensor([[*prompt, *tokens.tolist()]])
        with torch.no_grad():
            logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]
        cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1).numpy()
        places = np.arange(len(tokens))
        above = cumulative[places, tokens]
        below = np.where(tokens > 0, cumulative[places, tokens - 1], 0.0)
        uniform.append(below + numbers.random(len(tokens)) * (above - below))
    values = np.concatenate(uniform)
    counts = np.histogram(values, bins=NUM_BINS, range=(0, 1))[0]
    expected = len(values) / NUM_BINS
    statistic = float(((counts - expected) ** 2 / expected).sum())
    half = torch.tensor([(NUM_BINS - 1) / 2, statistic / 2])
    found: float = torch.special.gammaincc(half[0], half[1]).item()
    return found
