"""Output of --dry-run: a configuration file for --config.

Its comments show warnings, the graph, the placement, the memory, and a prompt as the model sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlsys.common.number_text import counted, significant, span
from rlsys.common.option_names import option
from rlsys.config import RunConfig, TrainedRoleConfig
from rlsys.config.toml_document import document, printable_line
from rlsys.data.row_source import RowSource
from rlsys.dataflow.graph.drawing import as_lines
from rlsys.dataflow.graph.run_graph import RunGraph
from rlsys.dataflow.graph.stages import GenerateStage, Head, Model, PlayStage
from rlsys.engines.models.model_shape import ModelShape
from rlsys.environments.environment import Environment
from rlsys.errors import InvalidValue
from rlsys.launcher.memory_estimate import (
    MemoryEstimate,
    ReplicaMemory,
    checkpoint_bytes,
    estimate_memory,
    partner_bytes,
    partner_published_bytes,
    role_shape,
    role_snapshot_bytes,
    snapshot_bytes,
    store_bytes,
    worker_bytes,
)
from rlsys.launcher.rank_estimate import ANOTHER_NODE, ITS_NODE, estimate_rank, planned_links
from rlsys.text.tokenizer_boundary import TokenizerBoundary

from .capacity import Capacity, joins_cluster, uses_gpus
from .demands import CONTEXT_BYTES, LIBRARIES_BYTES
from .factories import needs, role_needs


def describe(
    config: RunConfig,
    flow: RunGraph,
    shape: ModelShape,
    prompts: RowSource,
    tokenizer: Any,
    warnings: Sequence[str],
    *,
    as_written: RunConfig,
    held_out: str = "",
    capacity: Capacity | None = None,
    cluster: str = "",
) -> str:
    """Return what --dry-run prints.

    Args:
        config: Configuration with every value resolved.
        flow: Graph of the run.
        shape: Shape of the main model.
        prompts: Data of the run.
        tokenizer: Tokenizer of the policy.
        warnings: Warnings about the run.
        as_written: Configuration without paths that exist only during this dry run.
        held_out: Source and number of the held-out rows; "" without evaluations.
        capacity: Comparison with the machines; None if the nodes are not known yet.
        cluster: Devices of the run, such as 2x8xH100, for the prediction of a step's time; "" if
            they are unknown.
    """
    ranks, replicas = needs(config, flow)
    roles = [need for needs in role_needs(config, flow).values() for need in needs]
    memory = estimate_memory(config, shape)
    num_nodes = None if capacity is None else len(capacity.layout.nodes)
    facts = [
        *(f"warning: {warning}" for warning in warnings),
        *([""] if warnings else []),
        "dataflow: stage  reads -> writes",
        *as_lines(flow).splitlines(),
        "",
        "placement",
        *(str(need) for need in [*ranks, *roles, *replicas]),
        *(str(need) for replica in replicas for need in replica.partners),
        f"{_reward_workers(config.reward.num_workers)} and the store reserve nothing",
        "",
        f"memory for {shape.num_parameters:,} parameters",
        *_ranks(config, flow, shape),
        f"published weights {_size(memory.published_bytes)}  {versions_text(memory)}",
        *_on_devices(memory, len(ranks)),
        *_packed(memory, num_nodes),
        f"its snapshots     {_size(memory.snapshot_bytes)}  of the last steps, in host memory",
        *(_servers(config.rollout.urls) if config.rollout.urls else _replica(memory.replica)),
        f"store, per node   {_size(store_bytes(config, flow))}  in shared memory",
        f"checkpoint        {_size(checkpoint_bytes(config, flow, shape))}  on disk",
        "",
        *_totals(
            capacity,
            num_warnings=len(warnings),
            uses_gpus=uses_gpus(config, flow),
            joins_cluster=joins_cluster(config),
        ),
        "",
        *_prediction(config, flow, shape, prompts, cluster),
        *_links(config, flow, shape, num_nodes),
        *_data(flow, prompts, tokenizer),
        *([f"held-out data: {held_out}"] if held_out else []),
    ]
    return f"# configuration\n{document(as_written, facts)}"


def _on_devices(memory: MemoryEstimate, num_ranks: int) -> Iterator[str]:
    if memory.device_bytes:
        yield (
            f"  on GPUs         {_size(memory.device_bytes // num_ranks)}  per rank, for CUDA IPC; "
            "twice if memory is free"
        )


def _packed(memory: MemoryEstimate, num_nodes: int | None) -> Iterator[str]:
    if num_nodes != 1:
        yield f"  packed          {_size(memory.packed_bytes)}  copy for replicas on other nodes"


def _prediction(
    config: RunConfig, flow: RunGraph, shape: ModelShape, prompts: RowSource, cluster: str
) -> Iterator[str]:
    """Yield the predicted time of a step on GPUs that the planner knows, or on measured CPUs."""
    from rlsys.launcher.step_prediction import predict_step

    if not flow.all(GenerateStage):
        return
    try:
        found = predict_step(config, flow, shape, prompts, cluster)
    except InvalidValue as error:  # an unknown GPU, or a model whose cost is unknown
        yield f"predicted step     unknown: {error}"
        yield ""
        return
    if found is None:
        return
    step = found.step
    yield (
        f"predicted step     {significant(step.step_s)} s (80 %: {significant(step.low_s)} to "
        f"{significant(step.high_s)} s)"
    )
    yield f"  method           {found.method}"
    yield from (f"  assumed          {assumption}" for assumption in found.assumptions)
    yield ""


def _servers(urls: Sequence[str]) -> Iterator[str]:
    yield from (f"rollout server    {url}" for url in urls)


def _replica(memory: ReplicaMemory) -> Iterator[str]:
    weights = _size(memory.weight_bytes).strip()
    if memory.cache_bytes is None:
        yield (
            f"rollout replica     {memory.device_frac:7.0%}      of each of its GPUs "
            f"(rollout.gpu_memory_frac): weights {weights}, the rest keys and values"
        )
        return
    cache = _size(memory.cache_bytes).strip()
    yield (
        f"rollout replica   {_size(memory.num_bytes)}  weights {weights}, keys and values {cache} "
        "(rollout.kv_cache_gib at most)"
    )


def _totals(
    capacity: Capacity | None, *, num_warnings: int, uses_gpus: bool, joins_cluster: bool
) -> Iterator[str]:
    """Yield the sums of each node and device, and the verdict."""
    of_gpus = f" and {_size(CONTEXT_BYTES).strip()} of CUDA context per GPU" if uses_gpus else ""
    libraries = f"{_size(LIBRARIES_BYTES).strip()} of libraries each"
    yield f"memory of all processes, including {libraries}{of_gpus}"
    if capacity is None:
        yield (
            "not compared: the run joins a cluster, whose nodes are checked before it starts; "
            f"to compare now, name a node, such as {option('dry_run', '8xH100')}"
        )
        return
    yield from capacity.layout.describe()
    if len(capacity.layout.nodes) > 1 and not joins_cluster:
        yield f"several nodes need a Ray cluster ({option('cluster.address')}, docs/cluster.md)"
    above = f"; see {counted(num_warnings, 'warning')} above" if num_warnings else ""
    yield f"verdict: {capacity.verdict.rstrip('.') if above else capacity.verdict}{above}"


def versions_text(memory: MemoryEstimate) -> str:
    """Return a note on the memory of published weights."""
    if memory.publishes_own_weights:
        return "previous weight version, kept while replicas read it"
    return "at most two versions, shared memory"


def _data(flow: RunGraph, prompts: RowSource, tokenizer: Any) -> Iterator[str]:
    if not len(prompts):
        yield "data: not read"
        return
    first, columns = prompts.at(0), [repr(name) for name in prompts.metadata_columns]
    if played := flow.all(PlayStage):
        environment = played[0].environment
        yield f"data: {counted(len(prompts), 'task')} of {environment.name}, the first one is:"
        yield from (f"  {name}: {printable_line(repr(x))}" for name, x in first.metadata.items())
        yield f"turns: {_turn_format(environment, tokenizer)}"
        return
    # Decode the tokens rather than print the row: the model sees special tokens too.
    seen = TokenizerBoundary(tokenizer).decode(first.token_ids)
    others = "no other column"
    if columns:
        others = f"the column{'s' * (len(columns) > 1)} {', '.join(columns)}"
    yield (
        f"data: {counted(len(prompts), 'prompt')} with {others}; the first one has "
        f"{counted(len(first.token_ids), 'token')}:"
    )
    yield from (f"  {printable_line(line)}" for line in seen.splitlines())


def _turn_format(environment: Environment, tokenizer: Any) -> str:
    if environment.plain_text:
        return "concatenated text (the environment has plain_text=True)"
    if tokenizer.chat_template:
        return "formatted by the model's chat template"
    return "concatenated text (the model has no chat template)"


def _ranks(config: RunConfig, flow: RunGraph, shape: ModelShape) -> Iterator[str]:
    """Yield the memory of a rank of each trained model and of a worker of each frozen one."""
    own = TrainedRoleConfig(model=config.model, trainer=config.trainer)
    yield from _rank("trainer", config, own, shape, flow.main.head)
    for name, one in flow.models.items():
        if isinstance(role := one.config, TrainedRoleConfig):
            yield from _rank(name, config, role, role_shape(config, one), one.head)
            snapshots = _size(role_snapshot_bytes(config, one))
            yield f"  snapshots       {snapshots}  of the last steps, in host memory"
        elif (
            role is not None
            and one not in flow.partners
            and (role.model.path or one.head == "logits")
        ):
            weights = _size(worker_bytes(config, one))
            yield f"{name:17} {weights}  {role.model.dtype} weights of each worker"
        if one in flow.partners:
            yield from _partner(config, flow, one)


def _partner(config: RunConfig, flow: RunGraph, model: Model) -> Iterator[str]:
    """Yield the memory of another model that plays a seat next to each replica."""
    name = f"{model.name} engine"
    if model.name in flow.engine_sharers:
        yield f"{name:17}       none      the replicas serve its adapters too"
    else:
        engine = _size(partner_bytes(config, model))
        yield f"{name:17} {engine}  per replica: weights and a full KV cache"
    if model.may_train:
        published = _size(partner_published_bytes(config, model))
        yield f"  published       {published}  at most two versions, shared memory"


def _rank(
    name: str, config: RunConfig, trained: TrainedRoleConfig, shape: ModelShape, head: Head
) -> Iterator[str]:
    rank, trainer = estimate_rank(config, trained, shape, head), trained.trainer
    offloaded = ", in host memory" if trainer.offloads_moments else ""
    yield f"{f'{name} rank':17} {_size(rank.total)}  without interpreter and libraries"
    yield f"  weights         {_size(rank.weights)}  float32"
    yield f"  gradients       {_size(rank.gradients)}"
    yield f"  moments         {_size(rank.moments)}  of AdamW{offloaded}"
    if rank.unknown_reason:
        yield f"  micro-batch           not estimated: {rank.unknown_reason}"
    else:
        yield (
            f"  micro-batch     {_size(rank.passes)}  of {trainer.micro_batch_tokens:,} tokens: "
            "activations, gathered weights, logits"
        )
    if not rank.on_gpu:
        yield f"  fragmentation   {_size(rank.fragmented)}  held by the allocator"
    for layout in trainer.layouts[1:]:
        fewer = replace(trained, trainer=trainer.with_layout(layout))
        total = _size(estimate_rank(config, fewer, shape, head).total)
        snapshots = _size(snapshot_bytes(config, fewer, shape)).strip()
        yield f"  {f'as {layout}':15} {total}  per rank, and {snapshots} of snapshots"


# Up to this number of ranks, the weight traffic of each rank is listed.
MAX_LISTED_RANKS = 8


GLOO_OR_OBJECTS = "through process groups (gloo), or through Ray objects if these fail"

# Transport of weights to a node that lacks them, by rollout.weight_transport.
TRANSPORTS = {
    "auto": GLOO_OR_OBJECTS,
    "cuda_ipc": GLOO_OR_OBJECTS,
    "gloo": "through process groups (gloo)",
    "nccl": "through process groups (NCCL) and buffers on the GPUs",
    "objects": "through Ray objects",
}


def _links(
    config: RunConfig, flow: RunGraph, shape: ModelShape, num_nodes: int | None
) -> Iterator[str]:
    """Yield the weight traffic per step to the trainer's node and, if there are any, to others."""
    if not flow.all(GenerateStage):
        return
    sent = "factors of the adapters" if config.rollout.sends_adapters else "weights"
    yield f"{sent} sent after each step"
    is_direct = config.rollout.weight_transport == "cuda_ipc"
    on_node = "from GPU to GPU (CUDA IPC)" if is_direct else "through shared memory"
    places = [("to replicas on the trainer's node", ITS_NODE, on_node)]
    if num_nodes != 1:
        transport = TRANSPORTS[config.rollout.weight_transport]
        places.append(("to each other node with replicas", ANOTHER_NODE, transport))
    for name, to, transport in places:
        try:
            links = planned_links(config, shape, to=to)
        except ValueError as error:
            yield f"not estimated: {error}"
            break
        yield f"{name:35}{_size(sum(links.put))}  {transport}"
        if 1 < len(links.put) <= MAX_LISTED_RANKS:
            for rank, num_bytes in enumerate(links.put):
                yield f"  {f'sent by rank {rank}':33}{_size(num_bytes)}"
        elif len(links.put) > 1:
            most, least = (_size(extreme(links.put)).strip() for extreme in (max, min))
            yield f"  sent by each of {len(links.put)} ranks: {span(least, most)}"
        yield f"  {'read by each replica':33}{_size(links.read)}"
    yield ""


def _reward_workers(num: int) -> str:
    return "reward-0" if num == 1 else f"reward-0 .. reward-{num - 1}"


def _size(num_bytes: int) -> str:
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:9.1f} MiB"
    return f"{num_bytes / 2**30:9.1f} GiB"
