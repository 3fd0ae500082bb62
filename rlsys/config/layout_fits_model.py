"""Whether a model can be laid out so, told from its configuration before any weight is read."""

from __future__ import annotations

from typing import Any

from rlsys.common.hf_config import numbers
from rlsys.config.parallel_layout import ParallelLayout

# As configurations of transformers name it.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_fits(said: str, config: Any, *, setting: str = "trainer.layout") -> None:
    """Raise ValueError where the layout, as `setting` says it, does not divide the model of this
    Hugging Face configuration.
    """
    layout, text = ParallelLayout.parse(said), config.get_text_config()
    pieces = f"pp x {layout.num_pieces} pieces" if layout.num_pieces > 1 else "pp"
    for names, dimensions, size in (
        (("num_attention_heads", "num_key_value_heads", "intermediate_size"), "tp", layout.tp),
        (NUM_EXPERTS, "ep x tp", layout.size("ep", "tp")),
        (("num_hidden_layers",), pieces, layout.pp * layout.num_pieces),
    ):
        for name in names:
            for number in numbers(text, name):
                if number % size:
                    raise ValueError(
                        f"{setting}={said!r}: {dimensions} = {size} does not divide "
                        f"this model's {name}={number}; use a layout that does."
                    )
    if layout.ep > 1 and not any(numbers(text, name) for name in NUM_EXPERTS):
        raise ValueError(f"{setting}={said!r}: this model has no experts; leave ep out.")


def check_replica_fits(tensor_parallel: int, config: Any) -> None:
    """Raise ValueError where vLLM would not cut the model of this configuration so: it has as many
    heads on each rank. Keys and values it copies, vocabularies it pads.
    """
    for number in numbers(config.get_text_config(), "num_attention_heads"):
        if number % tensor_parallel:
            raise ValueError(
                f"rollout.tensor_parallel={tensor_parallel} does not divide this model's "
                f"num_attention_heads={number}; use a number that does."
            )
