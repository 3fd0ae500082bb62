"""Which low-rank adapters are trained (LoRA, 2106.09685), as a short string.

    "r16"                    rank 16 beside every linear layer but the head; alpha twice the rank
    "r16a32"                 with its alpha
    "r16a32:q_proj,v_proj"   beside the layers of these names

A layer computes W x + B A x · alpha / rank, of which A [rank, I] and B [O, rank] are trained.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection
from dataclasses import dataclass

_TEXT = re.compile(r"r(\d+)(?:a(\d+))?(?::([\w.]+(?:,[\w.]+)*))?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Lora:
    rank: int
    alpha: int
    targets: tuple[str, ...] | None
    """Names of linear layers, or their ends; None: all but the head."""

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Raises ValueError for what says no rank."""
        found = _TEXT.fullmatch(text)
        if found is None or not int(found[1]) or found[2] == "0":
            raise ValueError(
                f"{text!r} says no adapters; write their rank, and if need be alpha and the names "
                "of layers, such as r16, r16a32 or r16a32:q_proj,v_proj."
            )
        rank = int(found[1])
        return cls(
            rank=rank,
            alpha=int(found[2] or 2 * rank),
            targets=tuple(found[3].split(",")) if found[3] else None,
        )

    def adapts(self, name: str) -> bool:
        """Whether there is one beside the linear layer of this name, which is not the head."""
        return self.targets is None or any(_is(name, target) for target in self.targets)

    def misnamed(self, linear_layers: Collection[str]) -> list[str]:
        """Targets that are none of them; these names are without the head's."""
        return [
            target
            for target in self.targets or ()
            if not any(_is(name, target) for name in linear_layers)
        ]


def _is(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def check_lora(text: str, linear_layers: Collection[str], *, setting: str = "model.lora") -> None:
    """Raise ValueError for adapters where PEFT is not there, or that name what is none of the
    model's linear layers (names, without the head's). `setting` gives them.
    """
    if not text:
        return
    if importlib.util.find_spec("peft") is None:
        raise ValueError(
            f"{setting}={text!r} needs the package peft, which is not installed; pip install "
            f"'rlsys[lora]', or leave {setting} out to train all weights."
        )
    if wrong := Lora.parse(text).misnamed(linear_layers):
        known = sorted({name.rpartition(".")[2] for name in linear_layers})
        raise ValueError(
            f"{setting}={text!r}: {wrong[0]!r} is no linear layer of this model that PEFT adapts "
            f"(heads and experts of a mixture are none). Name some of {', '.join(known)}."
        )
