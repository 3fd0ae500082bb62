"""Compares a model's outputs under this project's attention, head and packing with transformers'.

    model ─► miniature of its class and configuration, random float32 weights
                 ├─ transformers' eager attention: each row alone ──► expected
                 ├─ the same, later tokens changed ────────────────── causal?
                 ├─ our attention and head: rows alone, padded ────── equal? differentiable?
                 └─ our attention and head: rows packed into one ──── equal? else rows are padded
                        with shared prefixes stored once ──────────── equal? else they are copied

The trainer and the torch engine run this check once, after they have loaded a model. The torch
engine reuses the miniature to check decoding (backbone.py). The model's own weights are not used:
at their precision, rounding can hide an error.

The check compares log-probabilities, or values of another head (scalar_lm.py).

Shape legend: T tokens of a row, V vocabulary, or 1 for a head of one output.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlsys.engines.models.attention import UnknownComputation
from rlsys.engines.models.attention_context import context_length
from rlsys.engines.models.causal_lm import Head, backbone, use_engine_layers
from rlsys.engines.models.probe_model import VOCABULARY, WINDOW, build_miniature
from rlsys.engines.models.row_packing import Packing, tree_of
from rlsys.errors import InvalidValue

MODEL_CLASS = "model class"  # field of errors about an architecture

# Largest accepted difference of log-probabilities, in nats. Values of a random head have the same
# size. Float32 rounding accounts for 1e-5 in attention and 1e-3 in recurrent states. The smallest
# real error seen so far was 0.05.
TOLERANCE = 5e-3

# One row longer than every window and limit of a miniature, short rows, one at a window's edge.
ROW_LENGTHS = (3, 29, 1, WINDOW + 1)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Two ways to compute a head's output at each token."""

    by_transformers: Callable[[Any, torch.Tensor], torch.Tensor]  # (model, ids [T]) -> [T, V]
    by_engines: Callable[..., torch.Tensor]  # (model, ids [B, T], packing...) -> [B, T, V]
    name: str
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The result of the check, and the miniature with our attention for further checks."""

    packs: bool
    """Rows may be packed into one row. Otherwise they must be padded."""
    shares: bool
    """Packed rows may store a shared prefix once."""
    miniature: Any
    rows: Sequence[torch.Tensor]  # token ids [T]
    expected: Sequence[torch.Tensor]  # outputs [T, V] of transformers


def check_architecture(model: Any, outputs: Outputs | None = None) -> Architecture:
    """Check that the engines compute a model's architecture correctly.

    `outputs` defaults to log-probabilities. Raises InvalidValue for a model that the trainer and
    the torch engine would compute differently from transformers.
    """
    outputs = outputs or LOGPROBS
    kind = type(model)
    small = build_miniature(kind, model.config)
    device = next(model.parameters()).device
    if device.type != "meta":
        small.to(device)
    rows = test_rows(small.config, small.device)
    with torch.no_grad():
        expected = [outputs.by_transformers(small, row) for row in rows]
        _require_causality(small, outputs, rows, expected)
        use_engine_layers(small)
        _require_equality(small, outputs, rows, expected)
        packs = _packs(small, outputs, rows, expected)
        forked = [*rows, *_forks(small, rows)]
        shares = packs and _packs(
            small,
            outputs,
            forked,
            [outputs.by_engines(small, row[None])[0] for row in forked],
            shares=True,
        )
        return Architecture(
            packs=packs, shares=shares, miniature=small, rows=rows, expected=expected
        )


def test_rows(config: Any, device: torch.device | str) -> list[torch.Tensor]:
    """Return rows of random tokens, no longer than the configuration's context."""
    text = config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    longest = context_length(config)
    return [
        torch.randint(
            min(text.vocab_size, VOCABULARY), (min(length, longest),), generator=generator
        ).to(device)
        for length in ROW_LENGTHS
    ]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference, infinite if a value is not a number."""
    gap = (found - expected).abs().nan_to_num(nan=torch.inf)
    return float(gap.max())


def _plain_logprobs(model: Any, row: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=row[None], use_cache=False).logits[0]
    logprobs: torch.Tensor = logits.float().log_softmax(-1)  # [T, V]
    return logprobs


def _logprobs(model: Any, token_ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return log-probabilities [B, T, V] of token ids [B, T], as both engines compute them."""
    hidden = backbone(model)(input_ids=token_ids, use_cache=False, **options).last_hidden_state
    width = model.get_output_embeddings().weight.shape[-1]
    if hidden.shape[-1] != width:  # torch would only report a shape mismatch inside a kernel
        raise UnknownComputation(
            f"its layers have width {hidden.shape[-1]} in a small model of its class, but its "
            f"output embeddings have width {width}, and rlsys does not know the step in between"
        )
    logits = Head(model)(hidden.flatten(0, 1)).float().unflatten(0, token_ids.shape)
    logprobs: torch.Tensor = logits.log_softmax(-1)
    return logprobs


LOGPROBS = Outputs(
    by_transformers=_plain_logprobs, by_engines=_logprobs, name="log-probabilities", unit=" nats"
)


def _require_causality(
    small: Any, outputs: Outputs, rows: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> None:
    longest = max(range(len(rows)), key=lambda index: len(rows[index]))
    half = len(rows[longest]) // 2
    changed = rows[longest].clone()
    changed[half:] = (changed[half:] + 1) % min(
        small.config.get_text_config().vocab_size, VOCABULARY
    )
    gap = difference(outputs.by_transformers(small, changed)[:half], expected[longest][:half])
    if gap > TOLERANCE:
        raise InvalidValue(
            MODEL_CLASS,
            type(small).__name__,
            rule=f"tokens attend to later tokens (changing those changes {outputs.name} by "
            f"{gap:.1g}{outputs.unit}), so it cannot be sampled token by token",
            fix="Use a causal language model, or set is_decoder in its configuration if it has it.",
        )


def _require_equality(
    small: Any, outputs: Outputs, rows: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> None:
    name = type(small).__name__
    padded = rows[0].new_zeros(len(rows), max(map(len, rows)))
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    fix = "Use an architecture that docs/models.md calls equal."
    try:
        with torch.enable_grad():
            found = outputs.by_engines(small, padded)
        alone = [outputs.by_engines(small, row[None])[0] for row in rows]
    except UnknownComputation as error:
        raise InvalidValue(
            MODEL_CLASS, name, rule=f"cannot use the attention of rlsys: {error}", fix=fix
        ) from error
    except Exception as error:  # a class of transformers may raise any type
        raise InvalidValue(
            MODEL_CLASS,
            name,
            rule=f"does not run with the attention of rlsys: {_failing_function(error)} needs "
            "inputs that rlsys does not provide, such as masks or scores "
            f"({type(error).__name__}: {error})",
            fix=fix,
        ) from error
    try:
        with torch.enable_grad():
            found.sum().backward()
    except Exception as error:  # as above
        raise InvalidValue(
            MODEL_CLASS,
            name,
            rule="cannot be differentiated in evaluation mode, in which it is sampled "
            f"({type(error).__name__}: {error})",
            fix=fix,
        ) from error
    small.zero_grad(set_to_none=True)
    gap = max(difference(*pair) for pair in zip(alone, expected, strict=True))
    if gap > TOLERANCE:
        raise InvalidValue(
            MODEL_CLASS,
            name,
            rule="computes its attention or its logits in a way that rlsys does not know "
            f"({outputs.name} differ by {gap:.1g}{outputs.unit})",
            fix=fix,
        )
    pairs = zip(found, expected, strict=True)
    gap = max(difference(padded_row[: len(row)], row) for padded_row, row in pairs)
    if gap > TOLERANCE:
        raise InvalidValue(
            MODEL_CLASS,
            name,
            rule=f"{outputs.name} of a row change by {gap:.1g}{outputs.unit} if it is padded to "
            "the length of other rows",
            fix=fix,
        )


def _failing_function(error: Exception) -> str:
    """Return the innermost function of transformers' models that raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [
        frame.f_code.co_qualname
        for frame in frames
        if frame.f_globals.get("__name__", "").startswith("transformers.models.")
    ]
    return names[-1] if names else "transformers"


def _forks(small: Any, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return rows that share a prefix: the longest row's first half, and it with another end."""
    longest = max(rows, key=len)
    half = len(longest) // 2
    vocabulary = min(small.config.get_text_config().vocab_size, VOCABULARY)
    return [longest[:half], torch.cat([longest[:half], (longest[half:] + 1) % vocabulary])]


def _packs(
    small: Any,
    outputs: Outputs,
    rows: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    *,
    shares: bool = False,
) -> bool:
    """Return whether packed rows give the expected outputs.

    They do not if tokens depend on others by other means than attention (a convolution, a recurrent
    state), or on their position by other means than position_ids.
    """
    device = rows[0].device
    tree = tree_of([row.cpu().numpy() for row in rows], shares=shares)
    places = torch.from_numpy(tree.places).to(device)
    token_ids = places.new_zeros(tree.num_tokens)
    token_ids[places] = torch.cat(list(rows))
    packing = Packing(tree, device)
    options = {"packing": packing, "position_ids": packing.position_ids}
    try:
        found = outputs.by_engines(small, token_ids[None], **options)[0]
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False  # the model takes no positions, or no row of this length
    return difference(found[places], torch.cat(list(expected))) <= TOLERANCE
