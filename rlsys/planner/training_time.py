"""Time of a training step.

    micro-batch ─► layer (products, attention, traffic, experts, TP, CP, EP) ─► pipeline stage
                ─► stage x (micro-batches + bubble) ─► + data parallel + optimizer + host

Shape legend: T tokens of a micro-batch on one context parallel rank, T' = T / tp for the parts that
sequence parallelism splits, h hidden width, a heads, kv KV heads, d head width, f network width.

Sources: products and their gradients as in Megatron-LM (1909.08053), sequence parallelism and
selective recomputation (2205.05198), interleaving (2104.04473), FSDP (2304.11277), roofline of each
kernel in `kernels.py`. The constants are those of `profiles.PRIORS`, fitted by scripts/plan/fit.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlsys.planner.architecture import Architecture, Gemm
from rlsys.planner.communication import (
    Group,
    all_reduce_time,
    all_to_all_time,
    gather_time,
    group_of,
    ring_time,
)
from rlsys.planner.hardware import TERA, Cluster
from rlsys.planner.kernels import Kernels, kernels_of
from rlsys.planner.layer_pass import Pass
from rlsys.planner.plans import Estimate, TrainingPlan
from rlsys.planner.profiles import Constants, SoftwareProfile, fitted_constants, interval
from rlsys.planner.roofline import gemm_roofline

OPTIMIZER_BYTES = (
    34.0  # per parameter: read and write master weight, moments, gradient, 16-bit copy
)
ACCUMULATION_BYTES = 10.0  # per parameter: read a 16-bit gradient, read and write the float32 sum
ATTENTION_GRADIENT_BYTES = 24.0  # per token, head and width: dO, O, and float32 sums of dQ
PCIE_SHARE = 0.7  # of the link to the host, for copies in pieces
UNFUSED_BMM = 0.45  # of the peak
UNFUSED_ODD_BMM = 0.10  # with a head width that is not a multiple of 8
HOST_POWER = 3.0  # sharpness of the transition between bound by the device and by the host


class _Step:
    """State of a prediction: the plan's sizes and the constants, looked up once."""

    def __init__(
        self, model: Architecture, cluster: Cluster, plan: TrainingPlan, constants: Constants
    ) -> None:
        self.model, self.cluster, self.plan, self.constants = model, cluster, plan, constants
        self.kernels: Kernels = kernels_of(cluster.gpu)
        values = constants.values
        family = cluster.gpu.family
        self.gemm_scale = 1 / values.get(f"gemm_{family}", values["gemm_ampere"])
        self.bandwidth = cluster.gpu.bandwidth * TERA * values["bandwidth"]
        self.traffic_scale = values["memory_traffic"]
        if not plan.compiled:
            self.traffic_scale *= values["eager_traffic"]
        self.tokens = plan.micro_batch * plan.row_tokens / plan.cp
        self.local_tokens = self.tokens / plan.tp
        self.tp_group = group_of(cluster, plan.tp)
        self.tail = values["gemm_tail"]
        self.profile = constants.profile(plan.profile)
        self.factor = _factor(self.profile, model, values)
        self.lora = plan.lora_rank > 0

    # Products

    def _tail(self, m: float, n: float, k: float) -> float:
        """Return the factor of partly filled tiles and waves, the same for all three products."""
        tail = self.tail
        return (1 + tail / m) * (1 + tail / n) * (1 + tail / k)

    def _products(self, gemms: Sequence[Gemm], tokens: float, tp: int) -> tuple[float, float]:
        """Return the seconds of forward and backward products of these matrices."""
        forward = backward = 0.0
        gemm = self.kernels.gemm
        for one in gemms:
            n, k = one.local(tp)
            tail = self._tail(tokens, n, k)
            forward += tail * gemm(tokens, n, k)
            backward += tail * gemm(tokens, k, n)
            if not self.lora:
                backward += tail * gemm(n, k, tokens)
        return self._precision(forward, backward, gemms, tokens, tp)

    def _precision(
        self, forward: float, backward: float, gemms: Sequence[Gemm], tokens: float, tp: int
    ) -> tuple[float, float]:
        """Scale 16-bit times to the plan's precision, with the traffic of quantisation."""
        scale = self.gemm_scale
        dtype = self.plan.precision
        if dtype == "bf16" or not self.cluster.gpu.fp8:
            return forward * scale, backward * scale
        gpu, values = self.cluster.gpu, self.constants.values
        rate = gpu.peak("bf16") / gpu.peak(dtype) * values[f"{dtype}_products"]
        scale *= min(rate, 1.0)
        quantised = sum(tokens * one.local(tp)[1] for one in gemms)
        traffic = 3.0 * quantised / self.bandwidth
        return forward * scale + traffic, backward * scale + 2 * traffic

    # Attention

    def _attention(self) -> tuple[float, float]:
        """Return the seconds of forward and backward of one layer's attention."""
        model, plan, values = self.model, self.plan, self.constants.values
        length = plan.attended_tokens or plan.row_tokens
        rows = plan.micro_batch * plan.row_tokens / length
        heads = max(model.heads / plan.tp, 1)
        width = (model.head_dim + model.value_dim) / 2
        pairs = model.attended(length) / plan.cp
        if not plan.balanced_context and plan.cp > 1:
            pairs *= 2 - 1 / plan.cp
        units = rows * heads
        if plan.attention == "unfused":
            return self._unfused(units, length, width)
        forward = self.kernels.prefill(units, length, width, pairs) / values["attention_forward"]
        if model.head_dim % 8:
            forward *= values["odd_width"]
        if plan.attention == "fused_2" and self.cluster.gpu.family == "hopper":
            forward *= values["attention_fa2"]
        # gradients of queries are summed in 32 bits: passes whose time is linear in the length
        passes = ATTENTION_GRADIENT_BYTES * self.tokens * heads * width / self.bandwidth
        return forward, forward * values["attention_backward"] + passes

    def _unfused(self, units: float, length: float, width: float) -> tuple[float, float]:
        """Return the times of attention as two batched products and passes over the scores."""
        share = UNFUSED_BMM if self.model.head_dim % 8 == 0 else UNFUSED_ODD_BMM
        work = 4 * units * length * length * width / (self.cluster.gpu.peak("bf16") * share)
        scores = units * length * length * 2
        passes = self.constants["unfused_scores"] * scores / self.bandwidth
        return work + passes, 2 * (work + passes)

    # Layers

    def _traffic(self, tokens: float, width: float) -> float:
        """Return the seconds of norms, residuals, activations of one layer, forward."""
        model, plan = self.model, self.plan
        h = model.hidden
        residual = self.local_tokens if plan.sequence_parallel else self.tokens
        heads = (model.heads * model.head_dim + 2 * model.kv_heads * model.head_dim) / plan.tp
        num_bytes = 2 * (10 * residual * h + 2 * self.tokens * heads)
        num_bytes += 2 * tokens * width * (3 if model.gated else 2)
        return num_bytes / self.bandwidth * self.traffic_scale

    def _tensor_parallel(self) -> float:
        """Return the exposed seconds of one block's collectives, forward."""
        plan, values = self.plan, self.constants.values
        if plan.tp == 1:
            return 0.0
        size = 2 * self.tokens * self.model.hidden
        seconds = 2 * gather_time(self.cluster, self.tp_group, size)
        return seconds * values["tp_exposed_async" if plan.async_tp else "tp_exposed"]

    def mixer(self, kind: str) -> tuple[Pass, Pass]:
        """Return forward and backward of the mixer of a layer: attention or linear."""
        model, plan, values = self.model, self.plan, self.constants.values
        gemms = model.attention if kind == "attention" else model.linear
        forward, backward = Pass(), Pass()
        forward.products, backward.products = self._products(gemms, self.tokens, plan.tp)
        if kind == "attention":
            forward.attention, backward.attention = self._attention()
            forward.context_parallel = self._context_parallel(forward.attention)
            backward.context_parallel = 2 * forward.context_parallel
        else:
            # bytes of states that are read and written a few times per chunk of 64 tokens
            scan = 12 * self.tokens * model.linear_state / 64 / plan.tp / self.bandwidth
            scan *= values["linear_scan"]  # its kernels are far from the bandwidth
            forward.attention, backward.attention = scan, 2.5 * scan
        forward.traffic = self._traffic(0.0, 0.0)
        backward.traffic = forward.traffic * values["memory_backward"]
        forward.tensor_parallel = backward.tensor_parallel = self._tensor_parallel()
        return forward, backward

    def _context_parallel(self, attention: float) -> float:
        model, plan = self.model, self.plan
        if plan.cp == 1:
            return 0.0
        tokens = plan.micro_batch * plan.row_tokens
        width = max(model.kv_heads / plan.tp, 1) * (model.head_dim + model.value_dim)
        group = group_of(self.cluster, plan.cp, plan.tp)
        seconds = gather_time(self.cluster, group, 2 * tokens * width)
        return max(self.constants["cp_exposed"] * seconds, seconds - attention)

    def dense(self) -> tuple[Pass, Pass]:
        """Return forward and backward of a dense feed-forward network."""
        values, plan = self.constants.values, self.plan
        forward, backward = Pass(), Pass()
        forward.products, backward.products = self._products(self.model.dense, self.tokens, plan.tp)
        width = self.model.ffn / plan.tp
        traffic = 2 * self.tokens * width * (3 if self.model.gated else 2) / self.bandwidth
        forward.traffic = traffic * self.traffic_scale
        backward.traffic = forward.traffic * values["memory_backward"]
        forward.tensor_parallel = backward.tensor_parallel = self._tensor_parallel()
        return forward, backward

    def experts(self) -> tuple[Pass, Pass]:
        """Return forward and backward of a layer of experts."""
        model, plan = self.model, self.plan
        forward, backward = Pass(), Pass()
        common = self._products(model.moe_common, self.tokens, plan.tp)
        forward.products, backward.products = common
        # tokens of the ranks that share the experts of one expert-tensor-parallel group
        routed = self.local_tokens * model.top_k * plan.etp
        local = model.experts / plan.ep
        rows = routed / local
        for one in model.expert:
            n, k = one.local(plan.etp)
            seconds = self._grouped(rows, n, k, local)
            forward.products += seconds
            backward.products += seconds * (1 if self.lora else 2)
        hidden = model.expert_hidden or model.hidden
        moved = 2 * self.local_tokens * model.top_k * hidden * plan.etp
        width = model.expert_ffn / plan.etp
        activation = 2 * routed * width * (3 if model.gated else 2)
        passes = 5 if plan.fused_dispatch else 8
        traffic = (passes * moved + activation) / self.bandwidth * self.traffic_scale
        forward.traffic, backward.traffic = traffic, traffic * 7 / 5
        forward.expert_parallel = backward.expert_parallel = self._expert_parallel(hidden)
        if self.plan.tp > 1:
            shared = self._tensor_parallel() * bool(model.shared_ffn)
            forward.tensor_parallel = backward.tensor_parallel = 0.5 * shared
        return forward, backward

    def _grouped(self, rows: float, n: int, k: int, local: float) -> float:
        """Return the seconds of one grouped product over this rank's experts."""
        dtype = self.plan.precision
        single = self.kernels.gemm(max(rows, 1.0), n, k) * local
        gpu, values = self.cluster.gpu, self.constants.values
        # one launch for all experts: small products do not pay their launches
        floor = local * gemm_roofline(gpu, max(rows, 1.0), n, k, "bf16", 2.0)
        seconds = max(floor, single - local * 2e-6) * self.gemm_scale
        seconds *= self._tail(max(rows, 1.0), n, k)
        if not self.plan.balanced_routing:
            seconds *= values["imbalance"]
        if dtype != "bf16" and gpu.fp8:
            rate = gpu.peak("bf16") / gpu.peak(dtype) * values[f"{dtype}_products"]
            seconds = seconds * min(rate, 1.0) + 3 * rows * local * k / self.bandwidth
        return seconds

    def _expert_parallel(self, hidden: int) -> float:
        plan, values = self.plan, self.constants.values
        if plan.ep * plan.etp == 1:
            return 0.0
        ep = plan.ep
        copies = self.model.top_k
        fused = plan.fused_dispatch
        reached = ep * (1 - (1 - 1 / ep) ** copies) if fused else copies
        group = Group(ep, max(1, min(ep, self.cluster.domain // plan.etp)))
        domains = group.domains
        per_rank = 2 * self.local_tokens * hidden * plan.etp
        inside = all_to_all_time(
            self.cluster, Group(group.per_domain, group.per_domain), per_rank * reached
        )
        seconds = inside
        if domains > 1:
            nodes = domains * (1 - (1 - 1 / domains) ** copies) if fused else copies
            outside = all_to_all_time(self.cluster, group, per_rank * nodes)
            seconds = max(inside * values["ep_exposed"], outside * values["ep_exposed_network"])
            return 2 * seconds
        return 2 * seconds * values["ep_exposed"]

    def head(self) -> tuple[Pass, Pass]:
        """Return forward and backward of the head and the loss, in 16 bits."""
        model, plan = self.model, self.plan
        n, k = model.head.local(plan.tp)
        gemm = self.kernels.gemm
        forward, backward = Pass(), Pass()
        forward.products = gemm(self.tokens, n, k) * self.gemm_scale
        backward.products = gemm(self.tokens, k, n) * self.gemm_scale
        if not self.lora or model.has_scalar_head:  # adapters leave an output embedding frozen
            backward.products += gemm(n, k, self.tokens) * self.gemm_scale
        logits = self.tokens * n / self.bandwidth
        forward.traffic = 12 * logits * self.traffic_scale
        backward.traffic = 8 * logits * self.traffic_scale
        return forward, backward

    def recomputed(self, forward: Pass) -> Pass:
        """Return the part of a layer's forward pass that the backward pass repeats."""
        again = Pass()
        kind = self.plan.recompute
        if kind == "full":
            again.add(forward)
        elif kind == "attention":
            again.attention = forward.attention
        elif kind == "selective":
            again.add(forward, self.constants["selective"])
        return again


def _factor(profile: SoftwareProfile, model: Architecture, values: Mapping[str, float]) -> float:
    """Return the factor of the stack for a model.

    Stacks lose time on experts per token and per expert, not per operation: routing, copies,
    launches. A model with large experts therefore runs like a dense one.
    """
    if not model.is_moe:
        return profile.factor
    size = model.expert_ffn * (model.expert_hidden or model.hidden)  # values of one matrix
    large = size / (size + values["large_expert"])
    return float(profile.moe_factor * profile.large_experts**large)


def _stage(step: _Step) -> tuple[Pass, Pass, float]:
    """Return all layers of the model, head and loss, and the share of a stage's layers."""
    model = step.model
    layers, head = Pass(), Pass()
    parts: tuple[tuple[int, Callable[[], tuple[Pass, Pass]]], ...] = (
        (model.attention_layers, lambda: step.mixer("attention")),
        (model.linear_layers, lambda: step.mixer("linear")),
        (model.dense_layers, step.dense),
        (model.moe_layers, step.experts),
    )
    for count, part in parts:
        if count:
            forward, backward = part()
            backward.add(step.recomputed(forward))
            layers.add(forward, count)
            layers.add(backward, count)
    layers.host = _host(step, layers.seconds)
    forward, backward = step.head()
    head.add(forward)
    head.add(backward)
    return layers, head, 1 / step.plan.pp


def _host(step: _Step, device: float) -> float:
    """Return the seconds by which launching all layers' kernels exceeds their time on the device.

    The host runs ahead of the device, so the slower of both decides. Routing synchronises them, and
    makes a layer of experts expensive to launch. The transition is smooth, since layers differ.
    """
    constants, model = step.constants, step.model
    launches = constants["layer_host"] * (model.layers - model.moe_layers)
    launches += constants["moe_layer_host"] * model.moe_layers
    launches *= step.profile.host / step.factor
    if step.cluster.gpu.products:  # the host is the device
        return launches
    both: float = (device**HOST_POWER + launches**HOST_POWER) ** (1 / HOST_POWER)
    return both - device


def _shards(model: Architecture, plan: TrainingPlan) -> tuple[float, float]:
    """Return the parameters of one rank outside and inside experts, before sharding."""
    experts = model.moe_layers * model.expert_parameters
    dense = model.parameters - experts
    return dense / (plan.tp * plan.pp), experts / (plan.ep * plan.etp * plan.pp)


def _fsdp(step: _Step, compute: float) -> float:
    """Return the seconds that gathering and reducing parameters add to a micro-batch."""
    plan, model = step.plan, step.model
    ranks = plan.shard_ranks or plan.dp * plan.cp
    if plan.shard != "parameters" or ranks == 1:
        return 0.0
    dense, experts = _shards(model, plan)
    group = group_of(step.cluster, ranks, plan.tp)
    expert_ranks = max(1, ranks * plan.tp // (plan.ep * plan.etp))
    expert_group = group_of(step.cluster, expert_ranks, plan.ep * plan.etp)
    frozen = step.lora
    passes = 2.0 if frozen else 3.0
    seconds = passes * gather_time(step.cluster, group, 2 * dense)
    seconds += passes * gather_time(step.cluster, expert_group, 2 * experts)
    exposed = step.constants["fsdp_exposed"] * seconds
    return max(exposed, seconds - compute)


def _data_parallel(step: _Step, compute: float) -> float:
    """Return the exposed seconds of reducing gradients and gathering parameters, once per step."""
    plan, model = step.plan, step.model
    ranks = plan.dp * plan.cp
    if ranks == 1 or step.lora:
        return 0.0
    dense, experts = _shards(model, plan)
    if plan.shard == "parameters":
        replicas = ranks // (plan.shard_ranks or ranks)
        group = group_of(step.cluster, replicas, plan.tp * (ranks // max(replicas, 1)))
        shard = (dense + experts) / max(plan.shard_ranks or ranks, 1)
        return all_reduce_time(step.cluster, group, 4 * shard)
    seconds = 0.0
    expert_stride = plan.ep * plan.etp
    for parameters, stride in ((dense, plan.tp), (experts, expert_stride)):
        everyone = max(1, ranks * plan.tp // stride)
        sharers = min(plan.shard_ranks or everyone, everyone)
        # gradients in 32 bits over all ranks, parameters in 16 within the ranks that share a state
        seconds += ring_time(step.cluster, group_of(step.cluster, everyone, stride), 4 * parameters)
        seconds += ring_time(step.cluster, group_of(step.cluster, sharers, stride), 2 * parameters)
    return max(step.constants["dp_exposed"] * seconds, seconds - 0.7 * compute)


def _accumulation(step: _Step) -> float:
    """Return the seconds of adding the gradients of micro-batches, which larger ones save."""
    plan = step.plan
    if step.lora:
        return 0.0
    sharded = plan.shard in ("gradients", "parameters")
    ranks = (plan.shard_ranks or plan.dp * plan.cp) if sharded else 1
    parameters = sum(_shards(step.model, plan)) / ranks
    return (plan.micro_batches - 1) * ACCUMULATION_BYTES * parameters / step.bandwidth


def _optimizer(step: _Step) -> float:
    """Return the seconds of the optimizer on its shard."""
    plan, model, gpu = step.plan, step.model, step.cluster.gpu
    dense, experts = _shards(model, plan)
    ranks = 1 if plan.shard == "none" else (plan.shard_ranks or plan.dp * plan.cp)
    expert_ranks = max(1, ranks * plan.tp // (plan.ep * plan.etp)) if ranks > 1 else 1
    local = dense / ranks + experts / expert_ranks
    if step.lora:
        local *= 0.01
    moved = OPTIMIZER_BYTES - 2 * (8 - plan.moment_bytes)  # moments are read and written
    seconds = moved * local / step.bandwidth
    if plan.offload_optimizer:  # moments come from the host and go back
        seconds += 2 * plan.moment_bytes * local / (gpu.pcie * 1e9 * PCIE_SHARE)
    return seconds


def train_step_time(
    model: Architecture,
    cluster: Cluster,
    plan: TrainingPlan,
    *,
    constants: Constants | None = None,
) -> Estimate:
    """Return the time of one optimizer step.

    Args:
        model: The model.
        cluster: Where it trains. The plan may use a part of it.
        plan: Layout and settings.
        constants: Constants and profiles; those of the package by default.

    Raises:
        InvalidValue: The plan does not fit the model.
    """
    plan.check(model)
    constants = constants or fitted_constants()
    step = _Step(model, cluster, plan, constants)
    layers, head, share = _stage(step)
    factor = step.factor
    # The last stage also has the head. Interleaved chunks and uneven stages spread it.
    per_layer = layers.seconds / model.layers
    most = -(-model.layers // (plan.pp * plan.vp)) * plan.vp if plan.pp > 1 else model.layers
    stage = min(most, model.layers) * per_layer
    uneven = model.layers - most * (plan.pp - 1)
    stage = max(stage, max(uneven, 0) * per_layer + head.seconds)
    mean_stage = (layers.seconds + head.seconds) * share
    stage = mean_stage + constants["stage_imbalance"] * (stage - mean_stage)
    fsdp = _fsdp(step, stage)
    bubble = (plan.pp - 1) / plan.vp
    micro = stage + fsdp
    point = _pipeline(step, stage)
    data = _data_parallel(step, micro * plan.micro_batches)
    accumulation = _accumulation(step)
    optimizer = _optimizer(step)
    host = constants["step_host"]
    scale = mean_stage / (layers.seconds + head.seconds) * plan.micro_batches
    parts = {name: scale * (getattr(layers, name) + getattr(head, name)) for name in Pass.__slots__}
    parts["imbalance"] = (stage - mean_stage) * plan.micro_batches
    parts["bubble"] = bubble * micro
    parts["pipeline"] = point * plan.micro_batches
    parts["fsdp"] = fsdp * plan.micro_batches
    parts["accumulation"] = accumulation
    parts["data_parallel"] = data
    parts["optimizer"] = optimizer
    parts["step_host"] = host
    breakdown = {name: seconds * factor for name, seconds in parts.items() if seconds}
    seconds = sum(breakdown.values())
    low, high = interval(seconds, step.profile.spread_of(moe=model.is_moe))
    return Estimate(seconds=seconds, low=low, high=high, breakdown=breakdown)


def _pipeline(step: _Step, stage: float) -> float:
    """Return the exposed seconds of sending activations between stages, per micro-batch."""
    plan, cluster = step.plan, step.cluster
    if plan.pp == 1:
        return 0.0
    size = 2 * step.local_tokens * step.model.hidden * 2 * plan.vp
    gpu = cluster.gpu
    within = plan.num_gpus <= cluster.domain
    rate = (gpu.link if within else gpu.network) * 1e9 * 0.75
    return step.constants["pipeline_exposed"] * size / rate + 2 * 12e-6 * plan.vp
