"""Small randomly initialised models with tokenizers of their own, built without a network.

For the quickstart, tests and benchmarks. In: a directory and a family. Out: that directory as a
Hugging Face checkpoint that AutoModelForCausalLM and AutoTokenizer load.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rlsys.engines.causal_lm import hide_progress_bars

Family = Literal["qwen3", "llama", "gemma2", "gemma3"]

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def build_tokenizer(characters: str | None = None) -> Any:
    """A tokenizer with one token a character of `characters`, or one a byte where that is None.

    `<pad>`, `<bos>` and `<eos>` are tokens 0, 1 and 2; no special token is added to a text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = list(characters) if characters else sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    if characters:
        tokenizer.decoder = decoders.Fuse()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """A recipe's own model, for runs whose model.path is empty; options as of build_tiny_model."""

    name: str
    characters: str | None = None

    def build(self, runs_dir: str, *, seed: int) -> str:
        """Write it below `runs_dir`, the same for the same seed; returns its path."""
        path = Path(runs_dir) / ".models" / f"{self.name}-{seed}"
        return str(build_tiny_model(path, characters=self.characters, seed=seed))


def build_tiny_model(
    directory: str | Path,
    *,
    family: Family = "qwen3",
    characters: str | None = None,
    width: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    mlp_width: int = 384,
    max_context: int = 2048,
    seed: int = 0,
) -> Path:
    """Write a randomly initialised model and its tokenizer to `directory`; returns it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hide_progress_bars()
    tokenizer = build_tokenizer(characters)
    config = AutoConfig.for_model(
        {"gemma3": "gemma3_text"}.get(family, family),
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=mlp_width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = Path(directory)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
