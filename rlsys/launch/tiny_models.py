"""Small randomly initialised models with tokenizers of their own, built without a network.

For the quickstart, tests and benchmarks. In: a directory and a family. Out: that directory as a
Hugging Face checkpoint that AutoModelForCausalLM and AutoTokenizer load.
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
from rlsys.config import require
from rlsys.config.fields import conform

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
    if not characters:  # few alphabets spell it
        fast.chat_template = CHAT_TEMPLATE
    return fast


# Each file's name, a checksum and its size: what tells a whole model from a damaged one.
CONTENTS = "contents.txt"

# A build takes seconds; what is older was left by a start that was killed.
ABANDONED_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """A recipe's own model, for runs whose model.path is empty; options as of build_tiny_model.

    `characters`: all that prompts and completions are made of, a token each; None: any text, a
    token a byte. A prompt with another character is refused.
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
                "OwnModel.characters='' knows no text; name its characters, or leave it out for a "
                "token a byte.",
            )
            require(
                not twice,
                f"OwnModel.characters={self.characters!r} holds {''.join(twice[:1])!r} twice; "
                "name each character once.",
            )
        require(
            self.width >= 1 and self.num_layers >= 1,
            f"OwnModel.width={self.width}, num_layers={self.num_layers} is no model; use at least "
            "1 of each.",
        )
        require(
            self.name != "" and "/" not in self.name and not self.name.startswith("."),
            f"OwnModel.name={self.name!r} is no directory name; use letters and digits.",
        )

    def path(self, runs_dir: str | Path, *, seed: int) -> Path:
        """Where it lies below `runs_dir`: the same for the same options and seed, and no other."""
        shape = (self.characters, self.width, self.num_layers)
        options = zlib.crc32(repr(shape).encode())
        return Path(runs_dir) / ".models" / f"{self.name}-{seed}-{options:08x}"

    def ensure(self, runs_dir: str | Path, *, seed: int) -> Path:
        """Its directory, built if it is not there, or not whole.

        Any number of processes may do so at once: each builds aside, and what was put in place
        first is left as it is. Raises ValueError where it cannot be written.
        """
        path = self.path(runs_dir, seed=seed)
        if is_whole(path):
            return path
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
        try:
            aside.mkdir(parents=True)
            self.build(aside, seed=seed)
            while not is_whole(path):
                try:
                    aside.rename(path)
                except OSError:
                    if not path.exists():
                        raise
                    if not is_whole(path):  # else another process was faster
                        path.rename(aside.with_suffix(".damaged.partial"))
            return path
        except OSError as error:
            raise ValueError(
                f"runs_dir={str(runs_dir)!r}: the recipe's model cannot be written to {path} "
                f"({error}); make room, set permissions, or choose another runs_dir."
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            _sweep(path.parent)

    def build(self, directory: str | Path, *, seed: int) -> Path:
        """Write it to `directory`."""
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


def is_whole(path: Path) -> bool:
    """Whether each file is there as it was when the model was built."""
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
    """Remove what killed starts have left, and models that were replaced."""
    for leftover in directory.glob(".*.partial"):
        try:
            is_abandoned = time.time() - leftover.stat().st_mtime > ABANDONED_S
        except FileNotFoundError:  # its owner has just removed it
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
    """Write a randomly initialised model and its tokenizer to `directory`; returns it. Raises
    OSError where it cannot be written.
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
