"""CPUs as devices of the planner: one core is one device, with rates that a probe measured.

    CpuProbe (cpu_probe.py measures it) ─► cpu_cluster   ─► Cluster of cores
                                        └► cpu_constants ─► Constants without a GPU's overlaps

Formulas count 16-bit values. A core that computes in float32 moves twice the bytes per value, so
its bandwidth is given as that of 16-bit values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from rlsys.errors import require
from rlsys.planner.hardware import TERA, Cluster, Gpu
from rlsys.planner.profiles import Constants
from rlsys.planner.run_plan import PROFILES, TRAINING_PROFILE
from rlsys.planner.stored_values import MAX_NUMBER

CPU: Final = "CPU"
FAMILY: Final = "cpu"

# Latency of one rank in a gloo collective, and rate between processes in GB/s, if not measured.
GLOO_HOP_S: Final = 150e-6
GLOO_GB_S: Final = 1.0

BYTES_OF: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_CORES: Final = 4096
MIN_NUMBER: Final = 1e-12  # of measured times and rates: others are a damaged file


@dataclass(frozen=True)
class ProductTime:
    """Seconds of a product (rows, width) x (width, width) on one core."""

    dtype: str
    rows: int
    width: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CpuProbe:
    """Measured rates of one core of a machine.

    Attributes:
        processor: Name of the processor.
        cores: Cores that processes of this machine may use.
        memory_gib: Memory of the machine.
        products: Times of products on a full grid of rows and widths per dtype.
        bandwidth: GB/s of reads and writes.
        layer_forward_s: Seconds of the host per layer and forward pass.
        layer_train_s: Seconds of the host per layer, forward and backward.
        traffic: Time of norms and activations relative to the bytes that the formulas count.
        decode_tokens_s: Tokens per second of a small model in a batch of 32 rows.
        hop_s: Latency of a rank in a collective.
        link: GB/s between two processes in a collective.
    """

    processor: str
    cores: int
    memory_gib: float
    products: tuple[ProductTime, ...]
    bandwidth: float
    layer_forward_s: float
    layer_train_s: float
    traffic: float
    decode_tokens_s: float = 0.0
    hop_s: float = GLOO_HOP_S
    link: float = GLOO_GB_S

    def __post_init__(self) -> None:
        numbers = {
            "cores": self.cores,
            "memory_gib": self.memory_gib,
            "bandwidth": self.bandwidth,
            "layer_forward_s": self.layer_forward_s,
            "layer_train_s": self.layer_train_s,
            "traffic": self.traffic,
            "decode_tokens_s": self.decode_tokens_s or 1.0,  # 0 if it was not measured
            "hop_s": self.hop_s,
            "link": self.link,
        }
        for i, one in enumerate(self.products):
            numbers[f"products[{i}]"] = one.seconds
            numbers |= {f"products[{i}].rows": one.rows, f"products[{i}].width": one.width}
        for name, value in numbers.items():
            require(
                MIN_NUMBER <= value <= MAX_NUMBER,
                f"probe.{name}",
                value,
                rule=f"must be from {MIN_NUMBER:.0e} to {MAX_NUMBER:.0e}",
                fix="Measure again with rlsys plan --probe.",
            )
        require(
            self.cores <= MAX_CORES,
            "probe.cores",
            self.cores,
            rule=f"must be at most {MAX_CORES}",
            fix="Measure again with rlsys plan --probe.",
        )
        for dtype in self.dtypes:
            own = [(one.rows, one.width) for one in self.products if one.dtype == dtype]
            grid = {(rows, width) for rows, _ in own for _, width in own}
            require(
                set(own) == grid and len(own) == len(grid),
                f"probe.products of {dtype}",
                len(own),
                rule="must have each number of rows with each width once",
                fix="Measure again with rlsys plan --probe.",
            )
        require(
            "float32" in self.dtypes,
            "probe.products",
            rule="has none of float32",
            fix="Measure again with rlsys plan --probe.",
        )

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Types of the measured products."""
        return tuple(dict.fromkeys(one.dtype for one in self.products))


def cpu_core(probe: CpuProbe, dtype: str) -> Gpu:
    """Return one core as a device that computes in `dtype`. Types without a probe are float32."""
    dtype = dtype if dtype in probe.dtypes else "float32"
    own = [one for one in probe.products if one.dtype == dtype]
    peak = max(2 * one.rows * one.width**2 / one.seconds for one in own)
    return Gpu(
        name=CPU,
        family=FAMILY,
        bf16=peak / TERA,
        memory_gib=probe.memory_gib / probe.cores,
        bandwidth=probe.bandwidth / 1e3 * 2 / BYTES_OF[dtype],
        link=probe.link * 2 / BYTES_OF[dtype],
        network=probe.link * 2 / BYTES_OF[dtype],
        pcie=math.inf,
        per_node=probe.cores,
        domain=probe.cores,
        hop_s=probe.hop_s,
        value_bytes=float(BYTES_OF[dtype]),
        products=tuple((float(one.rows), float(one.width), one.seconds) for one in own),
        sources="probe",
    )


def cpu_cluster(
    probe: CpuProbe, dtype: str, num_nodes: int = 1, cores: int | None = None
) -> Cluster:
    """Return machines like the probed one, with `cores` cores each."""
    core = cpu_core(probe, dtype)
    if cores is not None:
        require(
            1 <= cores <= MAX_CORES,
            "cluster",
            cores,
            rule=f"needs 1 to {MAX_CORES} cores of a machine",
            fix="Write such as 1x2xCPU.",
        )
        core = replace(core, per_node=cores, domain=cores)
    return Cluster(gpu=core, num_nodes=num_nodes, per_node=core.per_node)


def cpu_constants(constants: Constants, probe: CpuProbe) -> Constants:
    """Return constants for cores: nothing overlaps on one core, and products have no tails."""
    changed = constants.with_values(
        gemm_cpu=1.0,
        gemm_tail=1e-9,
        attention_forward=1.0,
        memory_traffic=probe.traffic,
        memory_backward=1.6,
        bandwidth=1.0,
        tp_exposed=1.0,
        cp_exposed=1.0,
        fsdp_exposed=1.0,
        dp_exposed=1.0,
        layer_host=probe.layer_train_s,
        step_host=1e-3,
        decode_gemm=1.0,
        decode_attention=1.0,
        decode_layer=probe.layer_forward_s,
        decode_all_reduce=1.0,
        prefill_scale=1.0,
        rl_training=1.0,
        rl_generation=1.0,
        rl_overlap=1.0,
        sync_gb_s=probe.bandwidth,
        context_gb=0.3,
    )
    for name in (TRAINING_PROFILE, *PROFILES.values()):
        plain = {
            "factor": 1.0,
            "moe_factor": 1.0,
            "large_experts": 1.0,
            "step_host": 1e-3,
            "row_host": 15e-6,
        }
        changed = changed.with_profile(replace(changed.profile(name), **plain))  # type: ignore[arg-type]
    return changed
