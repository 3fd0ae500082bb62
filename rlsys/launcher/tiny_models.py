"""Small randomly initialised models with their own tokenizers, built without a network.

The quickstart, tests and benchmarks use them. In: a directory and a family. Out: a Hugging Face
checkpoint in this directory, for AutoModelForCausalLM and AutoTokenizer.
"""

from __future__ import annotations

import shutil
import time
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlsys.common.file_modes import apply_umask
from rlsys.config.checks import check_at_least
from rlsys.config.fields import conform
from rlsys.errors import InvalidValue, require

Family = Literal["qwen3", "llama", "gemma2", "gemma3"]

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def build_tokenizer(characters: str | None = None) -> Any:
    """Return a tokenizer with one token per character of `characters`, or per byte if it is None.

    `<pad>`, `<bos>` and `<eos>` are tokens 0, 1 and 2. No special token is added to a text.
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
    if not characters:  # the template needs letters that an alphabet may not have
        fast.chat_template = CHAT_TEMPLATE
    return fast


# File with the name, checksum and size of each file, to detect damaged models.
CONTENTS = "contents.txt"

# A build takes seconds. Older partial directories are left over from killed processes.
ABANDONED_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """A small model of a recipe, for runs with an empty model.path.

    Attributes:
        name: Name of the model's directory.
        characters: Characters of prompts and completions, one token each; prompts with other
            characters are refused. None: any text, one token per byte.
        width: Size of the hidden state.
        num_layers: Number of layers.
    """

    name: str
    characters: str | None = None
    width: int = 128
    num_layers: int = 4

    def __post_init__(self) -> None:
        conform(self, "OwnModel")
        if self.characters is not None:
            twice = [one for one in self.characters if self.characters.count(one) > 1]
            require(
                self.characters != "",
                "OwnModel.characters",
                self.characters,
                rule="must have at least one character",
                fix="Name the characters, or leave it out for one token per byte.",
            )
            require(
                not twice,
                "OwnModel.characters",
                self.characters,
                rule=f"contains {''.join(twice[:1])!r} twice",
                fix="Name each character once.",
            )
        check_at_least("OwnModel.width", self.width, 1)
        check_at_least("OwnModel.num_layers", self.num_layers, 1)
        require(
            self.name != "" and "/" not in self.name and not self.name.startswith("."),
            "OwnModel.name",
            self.name,
            rule="cannot be the name of a directory",
            fix="Use letters and digits.",
        )

    def path(self, runs_dir: str | Path, *, seed: int) -> Path:
        """Return the directory below `runs_dir`, which depends on the options and the seed."""
        shape = (self.characters, self.width, self.num_layers)
        options = zlib.crc32(repr(shape).encode())
        return Path(runs_dir) / ".models" / f"{self.name}-{seed}-{options:08x}"

    def ensure(self, runs_dir: str | Path, *, seed: int) -> Path:
        """Return the model's directory after building it if it is missing or damaged.

        Several processes may call this at once. Each builds in its own directory, and the first one
        to finish renames it.

        Raises:
            InvalidValue: The model cannot be written.
        """
        path = self.path(runs_dir, seed=seed)
        if is_complete(path):
            return path
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
        try:
            partial.mkdir(parents=True)
            self.build(partial, seed=seed)
            while not is_complete(path):
                try:
                    partial.rename(path)
                except OSError:
                    if not path.exists():
                        raise
                    if not is_complete(path):  # otherwise another process was faster
                        path.rename(partial.with_suffix(".damaged.partial"))
            return path
        except OSError as error:
            raise InvalidValue(
                "runs_dir",
                str(runs_dir),
                rule=f"the recipe's model cannot be written to {path} ({error})",
                fix="Free space, set permissions, or choose another runs_dir.",
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            _sweep(path.parent)

    def build(self, directory: str | Path, *, seed: int) -> Path:
        """Write the model to `directory` and return the directory."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        path = build_tiny_model(
            directory,
            characters=self.characters,
            width=self.width,
            num_layers=self.num_layers,
            seed=seed,
        )
        apply_umask(path)
        (path / CONTENTS).write_text("".join(_contents(path)))
        return path


def is_complete(path: Path) -> bool:
    """Return whether all files of a model are as they were built."""
    try:
        return (path / CONTENTS).read_text() == "".join(_contents(path))
    except OSError:
        return False


def _contents(path: Path) -> list[str]:
    files = sorted(file for file in path.iterdir() if file.name != CONTENTS)
    return [
        f"{file.name} {zlib.crc32(data := file.read_bytes()):08x} {len(data)}\n" for file in files
    ]


def _sweep(directory: Path) -> None:
    """Remove partial directories of killed processes, and damaged models that were replaced."""
    for leftover in directory.glob(".*.partial"):
        try:
            is_abandoned = time.time() - leftover.stat().st_mtime > ABANDONED_S
        except FileNotFoundError:  # removed by its owner
            continue
        if is_abandoned or leftover.name.endswith(".damaged.partial"):
            shutil.rmtree(leftover, ignore_errors=True)


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
    """Write a randomly initialised model and its tokenizer to `directory`, and return it.

    Raises:
        OSError: The files cannot be written.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlsys.engines.models.causal_lm import hide_progress_bars, save_model

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
    save_model(model, path)
    tokenizer.save_pretrained(path)
    return path
