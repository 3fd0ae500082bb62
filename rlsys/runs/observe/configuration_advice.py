"""Warnings about allowed but costly settings, before a run starts.

Input: the configuration. Output: messages with the value, the cause and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlsys.config import RunConfig, SamplingConfig, TrainedRoleConfig, TrainerConfig

# Escapes that a shell passes on as two characters.
ESCAPES = {"\\n": "line break", "\\t": "tab", "\\r": "carriage return"}
ESCAPE = re.compile(r"\\[ntr]")


def configuration_warnings(config: RunConfig) -> list[str]:
    """Return warnings about allowed but costly settings, for the start of a run."""
    trainers = {"trainer": config.trainer} | {
        f"{name}.trainer": role.trainer
        for name, role in vars(config).items()
        if isinstance(role, TrainedRoleConfig)
    }
    warmed = [_long_warmup(name, one, config.num_steps) for name, one in trainers.items()]
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    exceeded = [_long_rows(name, one, longest) for name, one in trainers.items()]
    warnings = [*_cut_distribution(config.sampling), *_escaped_stops(config.sampling)]
    return [*warnings, *filter(None, [*warmed, *exceeded])]


def _escaped_stops(sampling: SamplingConfig) -> Iterator[str]:
    """Yield a warning for each stop string with a backslash that a shell has not interpreted."""
    for text in sampling.stop:
        if found := ESCAPE.search(text):
            meant, letter = ESCAPES[found.group()], found.group()[1]
            yield (
                f"sampling.stop={text!r} has a backslash and the letter {letter!r}, not a "
                f"{meant}. If a {meant} is meant, write it in the shell as $'{text}'."
            )


def _long_rows(name: str, trainer: TrainerConfig, longest: int) -> str:
    if longest <= trainer.micro_batch_tokens:
        return ""
    return (
        f"{name}.micro_batch_tokens={trainer.micro_batch_tokens} is less than a row may have "
        f"(data.max_prompt_tokens + sampling.max_tokens = {longest}): a longer row gets its own "
        "micro-batch, which takes more memory. Raise it, or lower one of the others."
    )


def _long_warmup(name: str, trainer: TrainerConfig, num_steps: int) -> str:
    if trainer.warmup_steps <= num_steps:
        return ""
    highest = num_steps / (trainer.warmup_steps + 1)
    return (
        f"{name}.warmup_steps={trainer.warmup_steps} is more than num_steps={num_steps}: the "
        f"learning rate rises to {highest:.0%} of {name}.learning_rate and no higher. Use fewer "
        "warm-up steps, such as a tenth of num_steps."
    )


def _cut_distribution(sampling: SamplingConfig) -> list[str]:
    cuts = [f"sampling.top_p={sampling.top_p:g}"] if sampling.top_p < 1 else []
    cuts += [f"sampling.top_k={sampling.top_k}"] if sampling.top_k > 0 else []
    if not cuts:
        return []
    # Tokens are sampled from μ/Z over the kept tokens, whose total probability is Z; recorded is μ.
    loss = (
        "other tokens are never sampled, and importance ratios are too large by 1/Z per token, "
        "where Z is the probability of the kept tokens (1.25 if they have 80%)"
    )
    if sampling.top_k == 0:
        loss = (
            f"up to {1 - sampling.top_p:.2g} of the probability is never sampled, and importance "
            f"ratios are too large by a factor of up to {1 / sampling.top_p:.3g} per token"
        )
    return [
        f"{' and '.join(cuts)}: completions come from the truncated distribution, but "
        f"log-probabilities from the full one. So {loss}. kl/sampler_trainer does not show this, "
        "and no correction removes it. "
        "Gradients are exact with sampling.top_p=1 and sampling.top_k=0."
    ]
