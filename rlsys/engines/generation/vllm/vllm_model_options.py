"""Options of vLLM that do not fit the policy's model, found from its configuration.

    rollout.vllm, rollout.speculation, config of the model ──► check_model_options ──► InvalidValue

An engine would refuse them after it has started and loaded the model, or would never run a request.
Options that depend on more than the configuration (kernels, free memory) are left to the engine.
"""

from __future__ import annotations

from typing import Any

from rlsys.config import RolloutConfig
from rlsys.config.speculation import FIELD as SPECULATION
from rlsys.config.vllm_arguments import FIELD, whole_number
from rlsys.engines.generation.vllm.vllm_server_config import plain_config
from rlsys.errors import require

CPU_BLOCK_SIZE = 32  # tokens of a block of keys and values on the CPU, as vllm_process.py sets it

# Parts of the names of fields that give the number of a model's MTP layers.
MTP_FIELDS = ("nextn", "mtp")
# Beginnings of model types that vLLM gives MTP layers without such a field.
MTP_WITHOUT_FIELD = ("longcat", "step3p", "dots3", "mimo_v2", "gemma4")
# Parts of the names of fields of layers that do not keep keys and values of all tokens.
OTHER_STATE = ("mamba", "ssm", "linear_", "conv", "recurrent", "lru_", "block_type", "hybrid")


def check_runs_on_cpu(path: str, config: Any) -> None:
    """Check that vLLM's kernels for CPUs compute the model in `path` correctly.

    Raises:
        InvalidValue: They do not.
    """
    require(
        not getattr(config.get_text_config(), "kv_lora_rank", None),
        "model.path",
        path,
        rule="vLLM's CPU kernels rotate latent attention wrongly",
        fix="Use rollout.engine=torch, or a GPU.",
    )


def check_model_options(
    rollout: RolloutConfig, path: str, config: Any, *, max_context: int
) -> None:
    """Check the options of an engine against the Hugging Face configuration of its model.

    `max_context` is the largest number of tokens of a prompt and its completion.

    Raises:
        InvalidValue: vLLM cannot run the model on CPUs, the model has no MTP layers, or a sequence
            of that length cannot run.
    """
    if not (rollout.num_gpus or rollout.urls):
        check_runs_on_cpu(path, config)
    draft = rollout.draft
    if draft is not None and draft.method == "mtp":
        require(
            _has_mtp_layers(config),
            f"{SPECULATION}.method",
            draft.method,
            rule="the configuration of model.path has no layers for further tokens (MTP)",
            fix="Use ngram, draft_model or eagle3.",
        )
    _check_blocks(rollout, config, max_context)
    _check_lengths(rollout, max_context)


def _check_blocks(rollout: RolloutConfig, config: Any, max_context: int) -> None:
    """Check that the blocks of keys and values hold one sequence, and vLLM's empty block."""
    num_blocks = whole_number(rollout.vllm, "num_gpu_blocks_override")
    if num_blocks is None:
        return
    needed = 2
    size = whole_number(rollout.vllm, "block_size") or (
        None if rollout.num_gpus else CPU_BLOCK_SIZE
    )
    if size is not None and _keeps_all_tokens(config):
        needed = -(-max_context // size) + 1
    require(
        num_blocks >= needed,
        f"{FIELD}.num_gpu_blocks_override",
        num_blocks,
        rule=f"prompt and completion of {max_context} tokens need {needed} blocks, with one that "
        "vLLM keeps empty",
        fix=f"Use at least {needed}, or leave it out.",
    )


def _check_lengths(rollout: RolloutConfig, max_context: int) -> None:
    """Check the tokens of a pass against those of prompt and completion together."""
    batched = whole_number(rollout.vllm, "max_num_batched_tokens")
    require(
        batched is None
        or rollout.vllm.get("enable_chunked_prefill") is not False
        or batched >= max_context,
        f"{FIELD}.max_num_batched_tokens",
        batched,
        rule="with enable_chunked_prefill=False a pass must hold a whole prompt and completion, "
        f"which have up to {max_context} tokens",
        fix=f"Use at least {max_context}, or leave out enable_chunked_prefill.",
    )
    threshold = whole_number(rollout.vllm, "long_prefill_token_threshold")
    require(
        threshold is None or threshold <= max_context,
        f"{FIELD}.long_prefill_token_threshold",
        threshold,
        rule=f"prompt and completion have at most {max_context} tokens",
        fix=f"Use at most {max_context}, or leave it out.",
    )


def _has_mtp_layers(config: Any) -> bool:
    """Return whether the model has MTP layers, or may have some."""
    if str(config.model_type).startswith(MTP_WITHOUT_FIELD):
        return True
    fields = plain_config(config)
    fields |= {name: value for name, value in vars(config).items() if not name.startswith("_")}
    return any(value for name, value in fields.items() if any(part in name for part in MTP_FIELDS))


def _keeps_all_tokens(config: Any) -> bool:
    """Return whether all layers certainly keep keys and values of all tokens, in equal blocks."""
    fields = plain_config(config)
    kinds = fields.get("layer_types") or ["full_attention"]
    return (
        bool(fields.get("num_attention_heads"))
        and set(kinds) == {"full_attention"}
        and not any("sliding_window" in name and value for name, value in fields.items())
        and not any(part in name for name in fields for part in OTHER_STATE)
    )
