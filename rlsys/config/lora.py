"""Low-rank adapters (LoRA, arXiv 2106.09685), described by a short string.

    "r16"                    rank 16 in every linear layer except the head; alpha is 32
    "r16a32"                 rank 16, alpha 32
    "r16a32:q_proj,v_proj"   only in the layers with these names

An adapted layer computes W x + B A x · alpha / rank. A [rank, I] and B [O, rank] are trained.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection
from dataclasses import dataclass

from rlsys.errors import InvalidValue

# Ranks for which vLLM has memory: an adapter of another rank gets the next larger one.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

_TEXT = re.compile(r"r(\d+)(?:a(\d+))?(?::([\w.]+(?:,[\w.]+)*))?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Rank, scale and layers of the adapters."""

    rank: int
    alpha: int
    targets: tuple[str, ...] | None
    """Names of linear layers, or their last parts. None: all except the head."""

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Return the adapters that `text` describes.

        Raises:
            InvalidValue: The text has another format, or a rank or alpha of 0.
        """
        found = _TEXT.fullmatch(text)
        if found is not None and (not int(found[1]) or found[2] == "0"):
            raise InvalidValue(
                "lora",
                text,
                rule="needs a rank and an alpha of at least 1",
                fix="Write such as r16 or r16a32.",
            )
        if found is None:
            raise InvalidValue(
                "lora",
                text,
                rule="is not a description of adapters",
                fix="Write the rank, then optionally alpha and the names of layers, such as r16, "
                "r16a32 or r16a32:q_proj,v_proj.",
            )
        rank = int(found[1])
        return cls(
            rank=rank,
            alpha=int(found[2] or 2 * rank),
            targets=tuple(found[3].split(",")) if found[3] else None,
        )

    @property
    def vllm_rank(self) -> int | None:
        """Rank for which vLLM allocates memory; None if the adapters are too large for it."""
        return next((one for one in VLLM_RANKS if one >= self.rank), None)

    def adapts(self, name: str) -> bool:
        """Return whether the linear layer of this name, which is not the head, has an adapter."""
        return self.targets is None or any(_matches(name, target) for target in self.targets)

    def misnamed(self, linear_layers: Collection[str]) -> list[str]:
        """Return the targets that match none of the linear layers (names without the head's)."""
        return [
            target
            for target in self.targets or ()
            if not any(_matches(name, target) for name in linear_layers)
        ]


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def check_lora(text: str, linear_layers: Collection[str], *, setting: str = "model.lora") -> None:
    """Check the adapters of a model.

    Args:
        text: Description of the adapters; empty for none.
        linear_layers: Names of the model's linear layers, without the head's.
        setting: Name of the option that gives the adapters.

    Raises:
        InvalidValue: PEFT is not installed, or a target is not one of the linear layers.
    """
    if not text:
        return
    if importlib.util.find_spec("peft") is None:
        raise InvalidValue(
            setting,
            text,
            rule="needs the package peft, which is not installed",
            fix=f"Run pip install 'rlsys[lora]', or leave {setting} out to train all weights.",
        )
    if wrong := Lora.parse(text).misnamed(linear_layers):
        known = sorted({name.rpartition(".")[2] for name in linear_layers})
        raise InvalidValue(
            setting,
            text,
            rule=f"{wrong[0]!r} is not a linear layer that PEFT can adapt (neither the head nor "
            "experts of a mixture are)",
            fix=f"Name some of {', '.join(known)}.",
        )
