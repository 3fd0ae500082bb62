"""Miniature models: a model's own class with few layers, small widths and random weights.

    configuration ─► miniature_config ─► configuration with every kind of layer and every switch of
                                         the model's, whose windows and limits a short row exceeds
    class, configuration ─► build_miniature ─► model, float32, in which nothing is 0 or 1

A computation that is correct for the miniature is correct for the model. The engines check
themselves on it (architecture_probe.py), and scripts/check_models.py builds its models this way.
"""

from __future__ import annotations

import copy
import enum
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from rlsys.errors import InvalidValue

WINDOW = 5  # tokens in sliding windows, chunks, and the selection of sparse attention
CONTEXT = 32  # tokens in a row with learned positions or scaled rotary angles
ORIGINAL_CONTEXT = 16  # longer rows have scaled rotary angles
CAP = 2.0  # soft cap and clip limit; random scores and logits exceed it
VOCABULARY = 64
EXPERTS = 4
FEWEST_LAYERS = 2
WIDTH = 16  # widths are multiples of it
INNER_WIDTH = 48  # width between two matrices of an MLP

Settings = dict[str, Any]

# Names of settings, as regular expressions.
LAYERS = (
    "num_hidden_layers|n_layers?|num_layers|decoder_layers|num_decoder_layers|encoder_layers|"
    "num_encoder_layers|num_blocks|depth|num_layers_per_stack|num_global_layers"
)
LAYER_INDICES = "\\w*(layers|layer_ids|idxs|indices|indexes)"
DENSE_LAYERS = "first_k_dense_replace|num_dense_layers|moe_layer_start_index"  # the first ones
PERIODS = "attn_layer_period|expert_layer_period|decoder_sparse_step|moe_layer_(interval|freq)"
HEADS = (
    "(num_|n_|swa_num_|decoder_|encoder_|num_decoder_|num_encoder_)?(attention_heads|heads?)|"
    "num_query_groups"
)
KV_HEADS = "(swa_)?num_key_value_heads|num_kv_heads|kv_n_heads|num_global_key_value_heads"
MAMBA_HEADS = "(n_mamba|mamba_n|mamba_num)_heads"
OTHER_HEADS = "linear_num_(key_|value_)?heads|index_n_heads"
HEAD_GROUPS = "(mamba_)?n_?groups"
WINDOWS = (
    "(sliding_|attention_|keep_|local_)?window(_size)?|sliding_window_size|local_attention|"
    "attention_chunk_size|index_topk|index_topk_blocks|index_block_size|floor_scale"
)
CONTEXTS = "max_position_embeddings|max_seq_len|n_positions|n_ctx|max_target_positions"
VOCABULARIES = "(\\w+_)?vocab_size(_\\w+)?|encoder_hash_byte_group_vocab"
NUM_EXPERTS = "(num_|n_|moe_num_)(local_|routed_)?experts|zero_expert_num"
CHOSEN_EXPERTS = "num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts"
CAPS = "(\\w+_)?(soft_?cap|softcapping)|clip_qkv|swiglu_limit"
# Widths that scale with the number of heads. The width of a head is kept.
WIDTHS = (
    "hidden_size|d_model|n_embd|emb_dim|d_inner|lru_width|attention_hidden_size|embedding_dim|"
    "word_embed_proj_dim|(\\w+_)?embedding_size|hidden_size_\\w+|ple_embed_dim|mamba_d_ssm|"
    "(mamba_)?(dt_rank|time_step_rank)|o_lora_rank"
)
INNER_WIDTHS = (
    "\\w*intermediate_size\\w*|(\\w+_)?ffn_(dim|hidden_size)|n_inner|dim_ff|dff|feed_forward_size|"
    "mlp_dim"
)
NOT_ARCHITECTURE = ("_name_or_path", "output_attentions")  # some nested classes reject them


class Widths(enum.Enum):
    """Ways to choose the widths of a miniature."""

    SMALL = enum.auto()
    PROPORTIONAL = enum.auto()  # inner widths shrink by the same factor as the others
    OWN = enum.auto()  # widths are kept; only layers, experts, vocabulary and limits shrink


def build_miniature(kind: Any, config: Any) -> Any:
    """Return a miniature of class `kind` and this configuration, on the CPU.

    It uses transformers' own attention. Raises InvalidValue if transformers builds none.
    """
    failure: Exception | None = None
    for widths in Widths:
        try:
            model = random_model(kind, miniature_config(config, widths))
            model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
            return model
        except Exception as error:  # noqa: BLE001 - raised below if all widths fail
            failure = failure or error
    raise InvalidValue(
        "model class",
        kind.__name__,
        rule="cannot be checked, because transformers builds no small model of its configuration "
        f"({type(failure).__name__}: {failure})",
        fix="Use an architecture of docs/models.md.",
    ) from failure


def random_model(kind: Any, config: Any, *, seed: int = 0) -> Any:
    """Return a model with random norms, biases, sinks and persistent buffers too.

    The state of torch's global random generator does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32)
        with torch.no_grad():
            embeddings = {
                id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)
            }
            for parameter in model.parameters():
                if parameter.ndim < 2:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                else:
                    width = parameter[0].numel() if parameter.ndim == 2 else parameter.shape[-1]
                    # Large enough for attention and distributions far from uniform; larger ones
                    # would amplify float32's rounding from layer to layer.
                    share = 4.0 if id(parameter) in embeddings else 1.0
                    parameter.normal_(0, share * width**-0.5)
            for buffer in _persistent_buffers(model):
                noise = 0.2 * torch.randn_like(buffer)
                # The zeros of a mask, or a table of decays, are part of the architecture.
                is_table = buffer.ndim > 1 or bool((buffer != buffer.flatten()[0]).any())
                buffer.mul_(1 + noise) if is_table else buffer.add_(noise)
    return model.eval()


def miniature_config(config: Any, widths: Widths = Widths.SMALL) -> Any:
    """Return a small copy of a configuration."""
    settings = copy.deepcopy(config.to_dict())
    _shrink(settings, widths)
    return type(config).from_dict(settings)


def _persistent_buffers(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                yield buffer


def _shrink(settings: Settings, widths: Widths) -> None:
    """Shrink settings in place, and each nested configuration by itself."""
    for value in settings.values():
        if isinstance(value, dict) and "model_type" in value:
            for name in NOT_ARCHITECTURE:
                value.pop(name, None)
            _shrink(value, widths)
    _choose_layers(settings)
    if widths is not Widths.OWN:
        _cut_widths(settings, widths)
    highest = {
        VOCABULARIES: VOCABULARY,
        WINDOWS: WINDOW,
        CONTEXTS: CONTEXT,
        NUM_EXPERTS: EXPERTS,
        CHOSEN_EXPERTS: 2,
        "n_group": 2,
        "topk_group": 1,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    }
    for names, bound in highest.items():
        for name, value in _counts(settings, names):
            settings[name] = min(value, bound)
    for name, value in settings.items():
        if _is(name, CAPS) and isinstance(value, (int, float)) and value > 0:
            settings[name] = min(float(value), CAP)
    if settings.get("indexer_budget"):  # in tokens; one block of them is enough
        settings["indexer_budget"] = settings["indexer_compress_ratio"]
    rotaries = settings.get("rope_parameters") or {}
    for rotary in (rotaries, *rotaries.values()):
        if isinstance(rotary, dict) and rotary.get("original_max_position_embeddings"):
            original = rotary["original_max_position_embeddings"]
            rotary["original_max_position_embeddings"] = min(original, ORIGINAL_CONTEXT)
    # An embedding needs the padding token; other special tokens may be beyond the vocabulary.
    for name, value in _counts(settings, "pad_token_id|pad_index"):
        settings[name] = min(value, settings.get("vocab_size", VOCABULARY) - 1)


def _choose_layers(settings: Settings) -> None:
    """Keep one layer of each kind, in order, and at least FEWEST_LAYERS."""
    numbers = dict(_counts(settings, LAYERS))
    if not numbers:
        return
    total = max(numbers.values())
    lists = {
        name: value
        for name, value in settings.items()
        if isinstance(value, list) and len(value) == total and not _is_index_list(name, value)
    }
    indices = {name: value for name, value in settings.items() if _is_index_list(name, value)}
    num_dense = dict(_counts(settings, DENSE_LAYERS))
    per_layer = {int(key): value for key, value in settings.get("per_layer_config", {}).items()}
    period = math.prod(value for _, value in _counts(settings, PERIODS))
    num_shared = settings.get("num_kv_shared_layers") or 0

    def kind(layer: int) -> str:
        return str(
            [value[layer] for value in lists.values()]
            + [layer in value for value in indices.values()]
            + [layer < value for value in num_dense.values()]
            + [layer % period, per_layer.get(layer), layer >= total - num_shared]
        )

    first = {kind(layer): layer for layer in reversed(range(total))}
    chosen = sorted(first.values())
    if period > 1:  # a layer's kind follows from its number, which must not change
        chosen = list(range(chosen[-1] + 1))
    chosen += [layer for layer in range(total) if layer not in chosen][
        : max(0, FEWEST_LAYERS - len(chosen))
    ]
    chosen.sort()
    for name, number in numbers.items():
        settings[name] = min(number, len(chosen))
    for name, entries in lists.items():
        settings[name] = [entries[layer] for layer in chosen]
    for name, entries in indices.items():
        settings[name] = [place for place, layer in enumerate(chosen) if layer in entries]
    for name, value in num_dense.items():
        settings[name] = sum(layer < value for layer in chosen)
    if per_layer:
        settings["per_layer_config"] = {
            place: per_layer[layer] for place, layer in enumerate(chosen) if layer in per_layer
        }
    if num_shared:
        settings["num_kv_shared_layers"] = sum(layer >= total - num_shared for layer in chosen)


def _is_index_list(name: str, value: Any) -> bool:
    """Return whether a setting lists the layers of one kind."""
    return (
        isinstance(value, list)
        and _is(name, LAYER_INDICES)
        and all(isinstance(one, int) for one in value)
        and len(set(value)) == len(value) > 0
    )


def _cut_widths(settings: Settings, widths: Widths) -> None:
    heads, kv_heads = dict(_counts(settings, HEADS)), dict(_counts(settings, KV_HEADS))
    main, num_kv = max(heads.values(), default=0), max(kv_heads.values(), default=0)
    if 0 < num_kv < main and main % num_kv == 0:
        few_kv = min(num_kv, 2)
        few = few_kv * min(main // num_kv, 2)
    else:
        few = few_kv = min(main, 4)
    share = Fraction(few, main) if main else Fraction(1, 16)
    for name, value in _counts(settings, f"{HEADS}|{MAMBA_HEADS}"):
        settings[name] = max(1, round(value * share))
    for name, value in kv_heads.items() if heads else ():
        settings[name] = few_kv if value == num_kv else max(1, round(value * share))
    for name, value in _counts(settings, OTHER_HEADS):
        settings[name] = min(value, 2 if "key" in name else 4)
    for name, _ in _counts(settings, HEAD_GROUPS):
        settings[name] = 1
    for name, value in settings.items():
        if _is(name, f"({HEADS})_per_layer") and isinstance(value, list):
            settings[name] = [max(1, round(one * share)) for one in value]
        elif _is(name, f"{WIDTHS}|{INNER_WIDTHS}"):
            small = widths is Widths.SMALL and _is(name, INNER_WIDTHS)
            bound = INNER_WIDTH if small else None
            if isinstance(value, list):
                settings[name] = [_narrow(one, share, bound) for one in value]
            elif isinstance(value, int):
                settings[name] = _narrow(value, share, bound)


def _narrow(width: int, share: Fraction, bound: int | None) -> int:
    if bound is not None:
        return min(width, bound)
    exact = width * share
    if exact.denominator == 1 and exact % WIDTH == 0:
        return int(exact)
    return min(width, max(WIDTH, round(exact / WIDTH) * WIDTH))


def _counts(settings: Settings, names: str) -> list[tuple[str, int]]:
    """Return settings of these names that are positive integers."""
    return [
        (name, value)
        for name, value in settings.items()
        if _is(name, names) and isinstance(value, int) and not isinstance(value, bool) and value > 0
    ]


def _is(name: str, names: str) -> bool:
    return re.fullmatch(names, name) is not None
