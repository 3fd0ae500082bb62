"""Memory of a GPU while it trains or generates.

    training:   states (weights, gradients, optimizer) + saved activations + logits + context
    generation: weights + activations of a step + context, the rest is KV cache

States follow ZeRO (1910.02054): 16 bytes per parameter with Adam in mixed precision: 2 for the
weight, 2 or 4 for the gradient, 12 for the master weight and both moments. Activations of a layer
follow Korthikanti et al. (2205.05198), with fused attention. Bytes per logit decide for small
models with large vocabularies: eager float32 losses keep about 20, compiled ones 10. Chunked losses
keep those of one chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from rlsys.planner.architecture import Architecture
from rlsys.planner.hardware import Cluster
from rlsys.planner.plans import GenerationPlan, TrainingPlan
from rlsys.planner.profiles import Constants, fitted_constants
from rlsys.planner.roofline import BYTES_OF

GB = 1e9
FULL = 0.96  # share of a GPU's memory above which a step is expected to run out of it


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Peak bytes on one GPU.

    Attributes:
        total: Bytes in all.
        breakdown: Bytes by part. They add up to `total`.
    """

    total: float
    breakdown: Mapping[str, float] = field(default_factory=dict)

    def fits(self, cluster: Cluster, limit: float = FULL) -> bool:
        """Return whether the bytes fit into a share `limit` of a GPU's memory."""
        return self.total <= limit * cluster.gpu.memory_bytes


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes per parameter of the states of training.

    Attributes:
        weight: The weights that products read.
        gradient: The gradients.
        optimizer: Master weights and moments.
    """

    weight: float = 2.0
    gradient: float = 2.0
    optimizer: float = 12.0


MIXED = StateBytes()
MEGATRON = StateBytes(gradient=4.0)
FSDP_FP32 = StateBytes(weight=4.0, gradient=4.0, optimizer=8.0)  # float32 weights, cast on use
PURE_16_BIT = StateBytes(gradient=2.0, optimizer=4.0)
ADAPTER_BYTES = 16.0  # float32 weights, gradients and moments

# Logits that exist at once while a rank of this project computes the loss, on CPUs and on GPUs:
# 256 MiB and 1 GiB in float32 (rlsys/engines/models/token_policy.py).
MAX_LOGITS, GPU_MAX_LOGITS = 1 << 26, 1 << 28


def _state_parts(
    model: Architecture,
    plan: TrainingPlan,
    bytes_of: StateBytes,
    trained: float | None,
    adapter_bytes: float,
) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer on one rank."""
    experts = model.moe_layers * model.expert_parameters
    dense = float(model.parameters - experts)
    if plan.pp > 1:
        layers = model.layer_parameters - experts
        ends = 2 if model.has_output_embedding else 1
        dense = layers / plan.pp + model.embedding_parameters / ends
    local = dense / plan.tp
    local_experts = experts / (plan.ep * plan.etp * plan.pp)
    ranks = plan.shard_ranks or plan.dp * plan.cp
    expert_ranks = max(1, ranks * plan.tp // (plan.ep * plan.etp))
    level = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}[plan.shard]

    def held(bytes_per_parameter: float, since: int) -> float:
        split = level >= since
        return bytes_per_parameter * (
            local / (ranks if split else 1) + local_experts / (expert_ranks if split else 1)
        )

    weights = held(bytes_of.weight, 3)
    if trained is not None:
        adapters = trained / (ranks if level >= 3 else 1)
        return {"weights": weights, "adapters": adapter_bytes * adapters}
    optimizer = 0.0 if plan.offload_optimizer else held(bytes_of.optimizer, 1)
    return {
        "weights": weights,
        "gradients": held(bytes_of.gradient, 2),
        "optimizer": optimizer,
    }


def state_bytes(parameters: float, ranks: int, zero: int, bytes_of: StateBytes = MIXED) -> float:
    """Return the bytes of all states of one rank, as in figure 1 of ZeRO.

    Args:
        parameters: Parameters of the model.
        ranks: Data parallel ranks.
        zero: 0 replicates all, 1 splits the optimizer, 2 also gradients, 3 also weights.
        bytes_of: Bytes per parameter.
    """
    parts = (bytes_of.weight, bytes_of.gradient, bytes_of.optimizer)
    split = (zero >= 3, zero >= 2, zero >= 1)
    return parameters * sum(
        part / (ranks if divided else 1) for part, divided in zip(parts, split, strict=True)
    )


def layer_activations(model: Architecture, plan: TrainingPlan) -> float:
    """Return the saved bytes of one mean layer for one micro-batch on one rank."""
    tokens = plan.micro_batch * plan.row_tokens / plan.cp
    residual = tokens / plan.tp if plan.sequence_parallel else tokens
    h = model.hidden
    if plan.recompute == "full":
        return 2 * residual * h
    heads = model.heads * model.head_dim + model.kv_heads * (model.head_dim + model.value_dim)
    output = model.heads * model.value_dim
    mixers = max(model.attention_layers + model.linear_layers, 1) / model.layers
    # fused operations keep fewer inputs of norms and activation functions
    kept = 4 if plan.compiled else 6
    saved = residual * kept * h + mixers * tokens * (heads + output) / plan.tp
    factor = 2.0 if not model.gated else 2.5 if plan.compiled else 4.0
    dense = factor * model.ffn * model.dense_layers / model.layers
    saved += tokens * dense / plan.tp
    if model.moe_layers:
        share = model.moe_layers / model.layers
        routed = tokens / plan.tp * model.top_k
        saved += share * routed * (2 * h + factor * model.expert_ffn)
        saved += share * tokens * factor * model.shared_ffn / plan.tp
    num_bytes = 2 * saved
    if plan.attention == "unfused" and plan.recompute != "attention":
        scores = plan.micro_batch * model.heads / plan.tp * plan.row_tokens**2
        num_bytes += 5 * scores
    if plan.recompute == "selective":
        num_bytes *= 0.6
    return num_bytes


def activation_bytes(model: Architecture, plan: TrainingPlan) -> dict[str, float]:
    """Return the bytes of saved activations of a rank, and of the layer being computed."""
    layers = model.layers / plan.pp
    # micro-batches in flight on the first stage: 2104.04473, section 2.2
    interleaving = 1 + (plan.pp - 1) / (plan.pp * plan.vp) if plan.vp > 1 else 1
    flying = min(plan.micro_batches, plan.pp * interleaving)
    saved = layers * layer_activations(model, plan) * max(flying, 1)
    working = 0.0
    if plan.recompute == "full":
        whole = replace(plan, recompute="none")
        working = 1.5 * layer_activations(model, whole)
    return {"activations": saved, "working_layer": working}


def memory_of(
    model: Architecture,
    cluster: Cluster,
    plan: TrainingPlan,
    *,
    bytes_of: StateBytes = MIXED,
    logit_bytes: float | None = None,
    loss_chunk: float | None = None,
    trained: float | None = None,
    adapter_bytes: float = ADAPTER_BYTES,
    constants: Constants | None = None,
) -> MemoryNeed:
    """Return the peak memory of a training step on the fullest GPU.

    Args:
        model: The model.
        cluster: Where it trains.
        plan: Layout and settings.
        bytes_of: Bytes per parameter of the states.
        logit_bytes: Bytes per logit of a micro-batch; the fitted constant by default.
        loss_chunk: Tokens whose logits exist at once; all of a micro-batch by default.
        trained: Trained parameters, if adapters are trained.
        adapter_bytes: Bytes per trained parameter of adapters.
        constants: Constants; those of the package by default.

    Raises:
        InvalidValue: The plan does not fit the model.
    """
    plan.check(model)
    constants = constants or fitted_constants()
    if trained is None and plan.lora_rank:
        trained = adapter_parameters(model, plan.lora_rank, plan.lora_targets)
    parts = _state_parts(model, plan, bytes_of, trained, adapter_bytes)
    scale = constants["activation_scale"] * cluster.gpu.value_bytes / 2
    parts.update({name: scale * size for name, size in activation_bytes(model, plan).items()})
    per_logit = constants["logit_bytes"] if logit_bytes is None else logit_bytes
    tokens = plan.micro_batch * plan.row_tokens / plan.cp
    tokens = min(tokens, loss_chunk or tokens)
    parts["logits"] = per_logit * tokens * model.outputs / plan.tp
    if plan.shard == "parameters" and plan.dp * plan.cp > 1:
        # two layers are gathered at a time, and the gradients of one
        common = model.layer_parameters - model.moe_layers * model.expert_parameters
        layer = common / model.layers / plan.tp
        layer += model.moe_layers * model.expert_parameters / model.layers / plan.ep / plan.etp
        value_bytes = cluster.gpu.value_bytes
        parts["gathered"] = 3 * value_bytes * layer
        parts["gathered"] += value_bytes * model.vocab * model.head.k / plan.tp
    total = sum(parts.values()) * constants["fragmentation"]
    parts["fragmentation"] = total - sum(parts.values())
    parts["context"] = constants["context_gb"] * GB
    return MemoryNeed(total=sum(parts.values()), breakdown=parts)


def rank_states(model: Architecture, cluster: Cluster, plan: TrainingPlan) -> dict[str, float]:
    """Return the bytes of the states that one rank of this project keeps on its device.

    Weights, gradients and moments are float32, and bfloat16 moments have 2 bytes each. The base of
    adapters has the precision of the computation (docs/training.md).
    """
    trained = None
    if plan.lora_rank:
        trained = adapter_parameters(model, plan.lora_rank, plan.lora_targets)
    bytes_of = _rank_bytes(cluster, plan)
    return _state_parts(model, plan, bytes_of, trained, 8.0 + bytes_of.optimizer)


def _rank_bytes(cluster: Cluster, plan: TrainingPlan) -> StateBytes:
    return StateBytes(
        weight=cluster.gpu.value_bytes if plan.lora_rank else 4.0,
        gradient=4.0,
        optimizer=0.0 if plan.offload_optimizer else plan.moment_bytes,
    )


def rank_memory(
    model: Architecture, cluster: Cluster, plan: TrainingPlan, constants: Constants
) -> MemoryNeed:
    """Return the peak memory of a training step on the fullest rank of this project.

    Raises:
        InvalidValue: The plan does not fit the model.
    """
    logits = MAX_LOGITS if cluster.gpu.products else GPU_MAX_LOGITS
    bytes_of = _rank_bytes(cluster, plan)
    return memory_of(
        model,
        cluster,
        plan,
        bytes_of=bytes_of,
        loss_chunk=max(1, logits // model.outputs),
        adapter_bytes=8.0 + bytes_of.optimizer,
        constants=constants,
    )


def adapter_parameters(
    model: Architecture, rank: int, targets: Collection[str] | None = None
) -> float:
    """Return the parameters of PEFT's adapters of this rank: one A and B for each linear layer.

    A scalar head is trained whole, in addition to them (rlsys/engines/training/adapters.py).
    Mixtures have adapters in attention only. Targets that name none of the usual linear layers
    count as all of them.
    """
    widths = [
        (name.rpartition(".")[2], layers * (n + k))
        for layers, matrices in (
            (model.attention_layers, model.attention_linear),
            (0 if model.is_moe else model.dense_layers, model.dense_linear),
        )
        for name, n, k in matrices
    ]
    ends = {target.rpartition(".")[2] for target in targets or ()}
    chosen = [width for name, width in widths if name in ends]
    linear = model.linear_layers * sum(one.n + one.k for one in model.linear)
    head = model.hidden if model.has_scalar_head else 0
    return head + rank * (sum(chosen) if chosen else sum(width for _, width in widths) + linear)


def weight_bytes(model: Architecture, plan: GenerationPlan) -> float:
    """Return the bytes of a replica's weights on one GPU."""
    experts = model.moe_layers * model.expert_parameters
    size = BYTES_OF[plan.weights]
    rest_size = 2.0 if plan.weights == "w4" and model.is_moe else size
    attention_tp = max(plan.tp // plan.attention_dp, 1)
    attention = model.attention_layers * model.attention_parameters
    embedding = model.embedding_parameters
    others = model.layer_parameters - experts - attention
    return (
        size * experts / plan.num_gpus
        + rest_size * (others / plan.num_gpus + attention / (attention_tp * plan.pp))
        + 2.0 * embedding / plan.tp
    )


def kv_capacity(
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    *,
    row_tokens: float = 0.0,
    constants: Constants | None = None,
) -> float:
    """Return the tokens that a replica's KV cache holds. 0 if the weights do not fit.

    Args:
        model: The model.
        cluster: Where the replica is.
        plan: The replica's layout.
        row_tokens: Length of the rows. Layers with a window then keep their window only, if the
            plan's engine does so. 0 counts every token in every layer.
        constants: Constants; those of the package by default.
    """
    constants = constants or fitted_constants()
    usable = plan.memory_fraction * cluster.gpu.memory_bytes
    weights = weight_bytes(model, plan) * cluster.gpu.value_bytes / 2
    left = usable - weights - 1.5 * constants["context_gb"] * GB
    if plan.cache_gib:
        left = min(left, plan.cache_gib * 2**30)
    attention_tp = max(plan.tp // plan.attention_dp, 1)
    size = BYTES_OF[plan.kv] * cluster.gpu.value_bytes / 2
    per_token = model.kv_bytes_per_token(size, attention_tp) / plan.pp
    if row_tokens and plan.keeps_windows:
        per_token *= model.seen(row_tokens) / row_tokens
    return max(0.0, left / per_token * plan.attention_dp) if per_token else float("inf")


def generation_memory_of(
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    batch: float,
    context: float,
    *,
    prefill_tokens: float = 0.0,
    constants: Constants | None = None,
) -> MemoryNeed:
    """Return the memory that a batch of rows needs on one GPU of a replica."""
    constants = constants or fitted_constants()
    attention_tp = max(plan.tp // plan.attention_dp, 1)
    per_token = model.kv_bytes_per_token(BYTES_OF[plan.kv], attention_tp) / plan.pp
    tokens = prefill_tokens or batch
    width = 4 * model.hidden + (model.ffn or model.expert_ffn * model.top_k) * 2 / plan.tp
    parts = {
        "weights": weight_bytes(model, plan),
        "kv_cache": per_token * batch / plan.attention_dp * context,
        "activations": 2 * tokens * width,
        "logits": 6.0 * batch * model.vocab,
        "context": constants["context_gb"] * GB,
    }
    return MemoryNeed(total=sum(parts.values()), breakdown=parts)
