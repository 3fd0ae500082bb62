"""Models of Qwen3's shapes with random weights, written in seconds.

The weights are drawn on the device and written to memory-backed files if there is room, because
drawing and writing 8B weights on a CPU takes minutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a dense Qwen3 model."""

    width: int
    num_layers: int
    num_heads: int
    mlp_width: int
    tied: bool
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151_936

    def config(self) -> Any:
        """Return the configuration of the model."""
        from transformers import AutoConfig

        return AutoConfig.for_model(
            "qwen3",
            vocab_size=self.vocab_size,
            hidden_size=self.width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.mlp_width,
            max_position_embeddings=32_768,
            tie_word_embeddings=self.tied,
        )


SHAPES = {
    "0.6b": Shape(width=1024, num_layers=28, num_heads=16, mlp_width=3072, tied=True),
    "1.7b": Shape(width=2048, num_layers=28, num_heads=16, mlp_width=6144, tied=True),
    "4b": Shape(width=2560, num_layers=36, num_heads=32, mlp_width=9728, tied=True),
    "8b": Shape(width=4096, num_layers=36, num_heads=32, mlp_width=12288, tied=False),
    # For tests of these scripts on a CPU.
    "tiny": Shape(
        width=64,
        num_layers=2,
        num_heads=4,
        mlp_width=128,
        tied=True,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=512,
    ),
}


def build_shape(directory: Path, name: str, device: str) -> Path:
    """Write a model of this shape in bfloat16, with a byte tokenizer; return its directory."""
    from transformers import AutoModelForCausalLM

    from rlsys.launcher.tiny_models import build_tokenizer

    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(SHAPES[name].config(), dtype=torch.bfloat16)
    model.to("cpu").save_pretrained(directory)
    del model
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    build_tokenizer().save_pretrained(directory)
    return directory


def scratch_directory() -> Path:
    """Return a new directory for model files, in memory if the system has a large /dev/shm."""
    import shutil
    import tempfile

    shm = Path("/dev/shm")
    in_memory = shm.is_dir() and shutil.disk_usage(shm).free > 24 * 2**30
    return Path(tempfile.mkdtemp(prefix="rlsys-gpu-", dir=shm if in_memory else None))
