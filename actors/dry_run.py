"""What --dry-run prints: the resolved configuration, the graph, the placement and the memory."""

from __future__ import annotations

from actors.factories import needs
from rlsys.config import RunConfig
from rlsys.dataflow.graph import Dataflow
from rlsys.estimate import ModelShape, estimate_memory
from rlsys.fields import to_toml


def describe(config: RunConfig, flow: Dataflow, shape: ModelShape) -> str:
    ranks, replicas = needs(config)
    memory = estimate_memory(config, shape)
    return "\n".join(
        [
            "# configuration",
            to_toml(config),
            "# dataflow: stage  reads -> writes",
            flow.describe(),
            "",
            "# placement",
            *(str(need) for need in [*ranks, *replicas]),
            f"reward-0 .. reward-{config.reward.num_workers - 1} and the store reserve nothing",
            "",
            f"# memory for {shape.num_parameters:,} parameters, activations not counted",
            f"trainer rank      {_size(memory.trainer_rank_bytes)}  weights, gradients, optimizer",
            f"its snapshots     {_size(memory.snapshot_bytes)}  the last two steps, in host memory",
            f"rollout replica   {_size(memory.replica_bytes)}  weights and a full KV cache",
            f"store, per node   {_size(memory.store_bytes)}  at most, in shared memory",
            f"checkpoint        {_size(memory.checkpoint_bytes)}  on disk",
        ]
    )


def _size(num_bytes: int) -> str:
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:9.1f} MiB"
    return f"{num_bytes / 2**30:9.1f} GiB"
