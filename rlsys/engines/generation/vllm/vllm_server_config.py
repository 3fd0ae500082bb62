"""Comparison of the model that a server has with the model of the run.

    server's hf_config ─► plain_config ─► JSON ─┐
    run's AutoConfig ───► plain_config ─────────┴─► differences ─► texts

All fields of both configurations must be equal, except those of IGNORED: two models with the same
sizes compute other probabilities if, for example, only their rope_theta differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlsys.common.safe_json import parse_json

# Fields that do not change what a model computes in inference. Names that begin with "_" are
# private fields of transformers and are ignored too.
_IGNORED = """
    architectures auto_map tokenizer_class transformers_version
    dtype torch_dtype head_dtype
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    use_cache return_dict output_attentions output_hidden_states output_router_logits
    id2label label2id problem_type chunk_size_feed_forward
    attention_dropout hidden_dropout dropout activation_dropout classifier_dropout layerdrop
    attn_pdrop embd_pdrop resid_pdrop summary_first_dropout embedding_dropout resid_dropout
    initializer_range initializer_factor router_aux_loss_coef router_z_loss_coef
"""
IGNORED = frozenset(_IGNORED.split())

MISSING = "nothing"  # in messages, for a field that one side does not have


def plain_config(config: Any) -> dict[str, Any]:
    """Return the text model's part of a Hugging Face configuration as plain JSON values.

    The keys are dotted names, and fields without a value are left out.
    """
    plain = parse_json(config.get_text_config().to_json_string(use_diff=False))
    return dict(_flat(plain))


def differences(served: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return each field in which two results of `plain_config` differ, with both values."""
    return [
        f"{name} is {served.get(name, MISSING)!r} instead of {own.get(name, MISSING)!r}"
        for name in sorted({*served, *own})
        if served.get(name) != own.get(name)
    ]


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if name in IGNORED or name.startswith("_"):
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, value
