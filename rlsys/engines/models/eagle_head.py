"""EAGLE-3 head (2503.01840): one decoder layer that drafts tokens from a policy's hidden states.

    hidden states of some layers ─► fc ─► g ┐
    embedding of the next token ─────► e    ┴─► [norm e, norm g] ─► attention, MLP ─► h ─► norm ─► W
                                                                                      └─► g of the
                                                                                          next step

Files and names are those of the checkpoints that vLLM loads as LlamaForCausalLMEagle3. The
embedding is always the policy's. The output layer W is the policy's too, unless the checkpoint has
one, which may cover a part of the vocabulary (`d2t`: token minus its number in that part).

Shape legend: D width, V vocabulary, V' tokens that the head can draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlsys.common.hf_config import largest
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.config.speculation import FIELD
from rlsys.engines.models.lazy_tensors import LazyTensor
from rlsys.engines.models.weight_files import lazy_tensors
from rlsys.errors import InvalidValue, require

SETTING = f"{FIELD}.model"
PUBLISHED = "draft:"  # before the names of a head's tensors in a version of the weights

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# Fields of config.json that change the computation, and their values here.
FIXED = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "norm_output": False,
    "logit_scale": 1.0,
}
OUTPUT, TOKENS, MASK = "lm_head.weight", "d2t", "t2d"


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """Sizes of a head, and its config.json.

    Attributes:
        layers: Hidden states that the head reads, in ascending order: those after this many layers.
        num_drafted: V'.
    """

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    eps: float
    layers: tuple[int, ...]
    num_drafted: int
    config: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any], policy: Any) -> HeadSizes:
        """Return the sizes in a config.json; `policy` is the policy's configuration.

        Raises:
            InvalidValue: The head does not fit the policy, or computes in another way.
        """
        text = policy.get_text_config()
        _check(config, text)
        num_heads = config["num_attention_heads"]
        layers = _layers(config, text.num_hidden_layers)
        require(
            layers[0] >= 0 and layers[-1] <= text.num_hidden_layers,
            SETTING,
            layers,
            rule=f"reads hidden states after layers that the policy of {text.num_hidden_layers} "
            "layers does not have",
            fix="Use a head of this policy.",
        )
        return cls(
            width=config["hidden_size"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            mlp_width=config["intermediate_size"],
            eps=config.get("rms_norm_eps", 1e-6),
            layers=layers,
            num_drafted=config.get("draft_vocab_size") or config["vocab_size"],
            config=config,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights that every head has."""
        width, queries = self.width, self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        return {
            "fc.weight": (width, len(self.layers) * width),
            "midlayer.input_layernorm.weight": (width,),
            "midlayer.hidden_norm.weight": (width,),
            "midlayer.self_attn.q_proj.weight": (queries, 2 * width),
            "midlayer.self_attn.k_proj.weight": (keys, 2 * width),
            "midlayer.self_attn.v_proj.weight": (keys, 2 * width),
            "midlayer.self_attn.o_proj.weight": (width, queries),
            "midlayer.post_attention_layernorm.weight": (width,),
            "midlayer.mlp.gate_proj.weight": (self.mlp_width, width),
            "midlayer.mlp.up_proj.weight": (self.mlp_width, width),
            "midlayer.mlp.down_proj.weight": (width, self.mlp_width),
            "norm.weight": (width,),
        }

    def own_output(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an output layer of the head's own."""
        return {OUTPUT: (self.num_drafted, self.width)}


def _check(config: Mapping[str, Any], policy: Any) -> None:
    inner = config.get("eagle_config") or {}
    names = config.get("architectures") or []
    require(
        any(name in ARCHITECTURES for name in names),
        f"{SETTING}: architectures",
        names,
        rule=f"cannot be trained along; its architecture is none of {', '.join(ARCHITECTURES)}",
        fix=f"Use such a head, or leave {FIELD}.trained_along out.",
    )
    for name, value in FIXED.items():
        found = inner.get(name, config.get(name, value))
        require(
            found == value or (not found and not value),
            f"{SETTING}: {name}",
            found,
            rule=f"a head that is trained along has {value}",
            fix=f"Use such a head, or leave {FIELD}.trained_along out.",
        )
    require(
        inner.get("use_aux_hidden_state", True),
        f"{SETTING}: use_aux_hidden_state",
        False,
        rule="a head that is trained along reads hidden states of several layers",
        fix=f"Use such a head, or leave {FIELD}.trained_along out.",
    )
    for name, known in (
        ("hidden_size", policy.hidden_size),
        ("target_hidden_size", policy.hidden_size),
        ("vocab_size", policy.vocab_size),
    ):
        found = config.get(name, known)
        require(
            found == known,
            f"{SETTING}: {name}",
            found,
            rule=f"the policy has {known}",
            fix="Use a head of this policy, or leave the model out for a new one.",
        )


def _layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers that vLLM takes for this config.json."""
    name = "eagle_aux_hidden_state_layer_ids"
    found = config.get(name) or (config.get("eagle_config") or {}).get(name)
    return tuple(sorted(set(found or (2, num_layers // 2, num_layers - 3))))


def new_config(policy: Any) -> dict[str, Any]:
    """Return the config.json of a new head for a policy with this configuration."""
    text = policy.get_text_config()
    num_layers, num_heads = text.num_hidden_layers, largest(text, "num_attention_heads", default=1)
    head_dim = largest(text, "head_dim", default=text.hidden_size // num_heads)
    chosen = (1, num_layers // 2, num_layers - 1) if num_layers < 7 else _layers({}, num_layers)
    layers = sorted(set(chosen))
    return {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        "hidden_size": text.hidden_size,
        "intermediate_size": largest(text, "intermediate_size", default=4 * text.hidden_size),
        "num_attention_heads": num_heads,
        "num_key_value_heads": largest(text, "num_key_value_heads", default=num_heads),
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "vocab_size": text.vocab_size,
        "draft_vocab_size": text.vocab_size,
        "max_position_embeddings": largest(text, "max_position_embeddings", default=4096),
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": layers,
            "use_aux_hidden_state": True,
        },
    }


@dataclass(frozen=True)
class HeadWeights:
    """Weights of a head by their names in a checkpoint: float32, and `d2t` int64."""

    sizes: HeadSizes
    tensors: dict[str, torch.Tensor]

    @classmethod
    def new(cls, policy: Any) -> HeadWeights:
        """Return a new head, the same for equal configurations of the policy."""
        sizes = HeadSizes.of(new_config(policy), policy)
        generator = torch.Generator().manual_seed(0)
        return cls(
            sizes,
            {
                name: torch.ones(shape)
                if len(shape) == 1
                else torch.randn(shape, generator=generator) * shape[1] ** -0.5
                for name, shape in sizes.shapes().items()
            },
        )

    @classmethod
    def read(cls, path: str, policy: Any) -> HeadWeights:
        """Read a head.

        Raises:
            InvalidValue: The path holds no head, or one that cannot be trained with this policy.
        """
        sizes = read_sizes(path, policy)
        tensors = {name: one.read() for name, one in _files(path, sizes).items()}
        return cls(
            sizes,
            {name: one.long() if name == TOKENS else one.float() for name, one in tensors.items()},
        )

    def save(self, directory: Path, dtype: torch.dtype) -> None:
        """Write a checkpoint that vLLM loads.

        Raises OSError for an unwritable directory or a full disk.
        """
        from safetensors.torch import save_file

        directory.mkdir(parents=True, exist_ok=True)
        written = {
            name: one.detach().to("cpu", dtype if one.is_floating_point() else one.dtype)
            for name, one in self.tensors.items()
        }
        if TOKENS in written:
            mask = torch.zeros(self.sizes.config["vocab_size"], dtype=torch.bool)
            mask[drafted_tokens(written[TOKENS])] = True
            written[MASK] = mask
        save_file(written, directory / "model.safetensors", metadata={"format": "pt"})
        config = {**self.sizes.config, "dtype": str(dtype).removeprefix("torch.")}
        (directory / "config.json").write_text(dump_json(config, indent=2) + "\n")


def read_sizes(path: str, policy: Any) -> HeadSizes:
    """Return the sizes of the head at a path.

    Raises:
        InvalidValue: The path holds no head, or one that does not fit the policy.
    """
    from transformers.utils import cached_file

    try:
        file = cached_file(path, "config.json")
        config = parse_json(Path(str(file)).read_text())
        return HeadSizes.of(config, policy)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InvalidValue):
            raise
        raise InvalidValue(
            SETTING,
            path,
            rule=f"holds no EAGLE-3 head ({type(error).__name__}: {error})",
            fix="Give a Hugging Face name or directory, or leave it out for a new head.",
        ) from error


def _files(path: str, sizes: HeadSizes) -> dict[str, LazyTensor]:
    """Return the tensors of a head's files. Raises InvalidValue unless they fit the sizes."""
    found = lazy_tensors(path)
    known = sizes.shapes()
    is_part = sizes.num_drafted != sizes.config["vocab_size"]
    if OUTPUT in found or is_part:
        known |= sizes.own_output()
    if is_part:
        known[TOKENS] = (sizes.num_drafted,)
    wrong = [name for name, shape in known.items() if _shape(found.get(name)) != shape]
    extra = found.keys() - known.keys() - {TOKENS, MASK}
    require(
        not wrong and not extra,
        SETTING,
        path,
        rule="its files must have exactly the weights of a head that is trained along; absent or "
        f"of another shape: {', '.join(sorted(wrong)[:4]) or 'none'}; unknown: "
        f"{', '.join(sorted(extra)[:4]) or 'none'}",
        fix="Use another head, or leave the model out for a new one.",
    )
    return {name: found[name] for name in known}


def write_new_head(policy_path: str, directory: str, dtype: str) -> None:
    """Write a new head for the policy at a path, as the trainer begins with. Raises OSError."""
    from transformers import AutoConfig

    policy = AutoConfig.from_pretrained(policy_path)
    HeadWeights.new(policy).save(Path(directory), getattr(torch, dtype))


def drafted_tokens(offsets: torch.Tensor) -> torch.Tensor:
    """Return the tokens [V'] of a head's output layer, from its `d2t`."""
    return torch.arange(len(offsets), device=offsets.device) + offsets


def published_head(path: str, policy: Any) -> dict[str, torch.Tensor]:
    """Return tensors on the meta device by their names in a version of the weights.

    They are those of the head at a path, or of a new one for an empty path. Raises InvalidValue.
    """
    if path:
        sizes = read_sizes(path, policy)
        known = {name: _shape(one) for name, one in _files(path, sizes).items()}
    else:
        known = dict(HeadSizes.of(new_config(policy), policy).shapes())
    return {
        PUBLISHED + name: torch.empty(
            shape, dtype=torch.int64 if name == TOKENS else torch.float32, device="meta"
        )
        for name, shape in known.items()
    }


def as_parameters(
    tensors: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, nn.Parameter]:
    """Return trainable copies of the weights on a device, without `d2t`."""
    return {
        name: nn.Parameter(one.to(device, copy=True))
        for name, one in tensors.items()
        if one.is_floating_point()
    }


def _shape(tensor: torch.Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else tuple(tensor.shape)
