"""Check that a parallel layout divides a model, from the model's configuration alone."""

from __future__ import annotations

from typing import Any

from rlsys.common.hf_config import numbers
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.errors import require

# Names of the number of experts in configurations of transformers.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_fits(layout: ParallelLayout, config: Any, *, setting: str = "trainer.layout") -> None:
    """Check that a layout divides the heads, layers, widths and experts of a model.

    Args:
        layout: Layout of the ranks.
        config: Hugging Face configuration of the model.
        setting: Name of the option that gives the layout.

    Raises:
        InvalidValue: A size of the layout does not divide a size of the model.
    """
    text = config.get_text_config()
    pieces = f"pp x {layout.num_pieces} pieces" if layout.num_pieces > 1 else "pp"
    for names, dimensions, size in (
        (("num_attention_heads", "num_key_value_heads", "intermediate_size"), "tp", layout.tp),
        (NUM_EXPERTS, "ep x tp", layout.size("ep", "tp")),
        (("num_hidden_layers",), pieces, layout.pp * layout.num_pieces),
    ):
        for name in names:
            for number in numbers(text, name):
                require(
                    number % size == 0,
                    setting,
                    str(layout),
                    rule=f"{dimensions} = {size} does not divide {name}={number} of this model",
                    fix="Use a layout that divides it.",
                )
    require(
        layout.ep == 1 or any(numbers(text, name) for name in NUM_EXPERTS),
        setting,
        str(layout),
        rule="this model has no experts",
        fix="Remove ep from the layout.",
    )


def check_replica_fits(tensor_parallel: int, config: Any) -> None:
    """Check that vLLM can shard a model over `tensor_parallel` ranks.

    vLLM needs the same number of attention heads on each rank. It replicates key and value heads
    and pads vocabularies.

    Raises:
        InvalidValue: `tensor_parallel` does not divide the number of attention heads.
    """
    for number in numbers(config.get_text_config(), "num_attention_heads"):
        require(
            number % tensor_parallel == 0,
            "rollout.tensor_parallel",
            tensor_parallel,
            rule=f"does not divide num_attention_heads={number} of this model",
            fix="Use a number that divides it.",
        )
