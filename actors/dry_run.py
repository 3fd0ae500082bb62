"""What --dry-run prints: a file for --config. Its comments are the graph, the placement, the
memory, warnings, and a prompt as the model will see it."""

from __future__ import annotations

from typing import Any

from rlsys.config import RunConfig
from rlsys.data.prompts import PromptSource
from rlsys.dataflow.graph import Dataflow
from rlsys.estimate import ModelShape, estimate_activations, estimate_memory, store_bytes
from rlsys.fields import to_toml
from rlsys.observe.diagnosis import foresee

from .factories import needs, role_needs


def describe(
    config: RunConfig, flow: Dataflow, shape: ModelShape, prompts: PromptSource, tokenizer: Any
) -> str:
    ranks, replicas = needs(config, flow)
    roles = [need for needs in role_needs(config, flow).values() for need in needs]
    activations, untold = 0, ""
    try:
        activations = estimate_activations(config, shape)
    except ValueError as error:
        untold = f"; not counted: {error}"
    memory = estimate_memory(config, shape, activation_bytes=activations)
    rank = memory.trainer_rank
    prompt = prompts.at(0)
    # Of the tokens, not of the row: this is what the model sees, special tokens included.
    seen = tokenizer.decode(list(prompt.token_ids), clean_up_tokenization_spaces=False)
    facts = [
        "dataflow: stage  reads -> writes",
        *flow.describe().splitlines(),
        "",
        "placement",
        *(str(need) for need in [*ranks, *roles, *replicas]),
        f"{_reward_workers(config.reward.num_workers)} and the store reserve nothing",
        "",
        f"memory for {shape.num_parameters:,} parameters{untold}",
        f"trainer rank      {_size(rank.total)}  beside the interpreter and libraries",
        f"  weights         {_size(rank.weights)}  float32",
        f"  gradients       {_size(rank.gradients)}",
        f"  moments         {_size(rank.moments)}  of AdamW{_offloaded(config)}",
        f"  gathered        {_size(rank.gathered)}  for a pass, of all ranks' weights",
        f"  activations     {_size(rank.activations)}  of a pass of "
        f"{config.trainer.micro_batch_tokens:,} tokens",
        f"published weights {_size(memory.published_bytes)}  two versions, in shared memory",
        f"its snapshots     {_size(memory.snapshot_bytes)}  of the last steps, in host memory",
        f"rollout replica   {_size(memory.replica_bytes)}  weights and a full KV cache",
        f"store, per node   {_size(store_bytes(config, flow))}  in shared memory",
        f"checkpoint        {_size(memory.checkpoint_bytes)}  on disk",
        "",
        f"data: {len(prompts):,} prompts, each with {', '.join(prompts.metadata_columns) or 'no'} "
        f"beside it; the first one has {len(prompt.token_ids)} tokens:",
        *(f"  {_printable(line)}" for line in seen.splitlines()),
        *(f"warning: {warning}" for warning in foresee(config)),
    ]
    return "\n".join(
        ["# configuration", to_toml(config), *(f"# {fact}".rstrip() for fact in facts)]
    )


def _offloaded(config: RunConfig) -> str:
    return ", in host memory" if config.trainer.offloads_moments else ""


def _reward_workers(num: int) -> str:
    return "reward-0" if num == 1 else f"reward-0 .. reward-{num - 1}"


def _printable(text: str) -> str:
    """Control characters, which TOML forbids and which could drive the terminal, written out."""
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text)


def _size(num_bytes: int) -> str:
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:9.1f} MiB"
    return f"{num_bytes / 2**30:9.1f} GiB"
