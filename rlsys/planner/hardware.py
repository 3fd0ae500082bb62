"""GPUs, nodes and links, and the clusters that users name.

"8x8 H100", "2x8xH100", "8xL40S" ─► parse_cluster ─► Cluster (nodes, GPUs per node, Gpu, links)
"H100-PCIe"                      ─► gpu_named     ─► Gpu
"NVIDIA H100 PCIe"               ─► find_gpu      ─► Gpu

Rates are those of the vendors' data sheets: dense products, without sparsity. Efficiencies are
constants of the profiles, not of this table. Sources, by the letter in `Gpu.sources`:

    d   the vendor's data sheet
    a   NVIDIA AIConfigurator 0.12, systems/*.yaml (Apache-2.0)
    m   Stas Bekman, ml-engineering: compute/accelerator and network
    t   pytorch/torchtitan, benchmarks (a part with HBM2e, limited to 500 W)
    p   DeepSeek-V3 technical report (links of the H800)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from rlsys.config.machine import CARDS
from rlsys.errors import InvalidValue, require

GB: Final = 1e9
TERA: Final = 1e12
GIB: Final = 2**30
MAX_GPUS: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU and the links of the node that it usually comes in.

    Attributes:
        name: Name in this table, as users write it.
        family: Generation with common efficiencies: volta, ampere, ada, hopper,
            blackwell, blackwell_ultra, cdna2; cpu for a core.
        bf16: Peak of 16-bit products in TFLOP/s.
        fp8: Peak of 8-bit products in TFLOP/s. 0 if the GPU has none.
        fp4: Peak of 4-bit products in TFLOP/s. 0 if the GPU has none.
        memory_gib: Memory that the driver reports.
        bandwidth: Memory bandwidth in TB/s.
        link: NVLink, or PCIe without it, in GB/s per GPU and direction.
        network: Network between nodes in GB/s per GPU and direction.
        pcie: Link to the host in GB/s per direction.
        per_node: GPUs of a node.
        domain: GPUs that `link` connects. Larger than a node for rack systems.
        hop_s: Latency of one rank of `domain` in a collective.
        fp32: Peak of float32 products without tensor cores in TFLOP/s.
        value_bytes: Bytes of an activation, a key or a value.
        decode_reads: Name of the constant (profiles.py) by which reads of memory take longer in
            decoding. "" if the measured kernels predict them.
        products: Measured (rows, width, seconds) of products, of a CPU core (cpu_device.py).
        sources: Letters of the module's list.
    """

    name: str
    family: str
    bf16: float
    fp8: float = 0.0
    fp4: float = 0.0
    memory_gib: float
    bandwidth: float
    link: float
    network: float
    pcie: float
    per_node: int = 8
    domain: int = 8
    hop_s: float = 2e-6
    fp32: float = 0.0
    value_bytes: float = 2.0
    decode_reads: str = ""
    products: tuple[tuple[float, float, float], ...] = ()
    sources: str

    def peak(self, dtype: str) -> float:
        """Return the peak in FLOP/s of products of `dtype`: bf16, fp8 or fp4.

        A precision that the GPU lacks computes at the rate of the next wider one.
        """
        if dtype == "fp4" and self.fp4:
            return self.fp4 * TERA
        if dtype in ("fp4", "fp8") and self.fp8:
            return self.fp8 * TERA
        return self.bf16 * TERA

    @property
    def memory_bytes(self) -> float:
        """Memory in bytes."""
        return self.memory_gib * GIB


def _hopper(name: str, memory_gib: float, bandwidth: float, **changes: float) -> Gpu:
    gpu = Gpu(
        name=name,
        family="hopper",
        bf16=989.0,
        fp8=1979.0,
        memory_gib=memory_gib,
        bandwidth=bandwidth,
        link=450.0,
        network=50.0,
        pcie=63.0,
        sources="dam",
    )
    return replace(gpu, **changes)  # type: ignore[arg-type]


def _ampere(name: str, memory_gib: float, bandwidth: float, link: float = 300.0) -> Gpu:
    return Gpu(
        name=name,
        family="ampere",
        bf16=312.0,
        memory_gib=memory_gib,
        bandwidth=bandwidth,
        link=link,
        network=25.0,
        pcie=31.0,
        sources="dam",
    )


def _blackwell(
    name: str, memory_gib: float, scale: float, network: float, domain: int, fp4: float = 2.0
) -> Gpu:
    return Gpu(
        name=name,
        family="blackwell" if fp4 == 2.0 else "blackwell_ultra",
        bf16=2250.0 * scale,
        fp8=4500.0 * scale,
        fp4=4500.0 * scale * fp4,
        memory_gib=memory_gib,
        bandwidth=8.0,
        link=900.0,
        network=network,
        pcie=63.0,
        per_node=8 if domain == 8 else 4,
        domain=domain,
        sources="dam",
    )


def _workstation(name: str, family: str, bf16: float, fp8: float, gib: float, tb_s: float) -> Gpu:
    return Gpu(
        name=name,
        family=family,
        bf16=bf16,
        fp8=fp8,
        memory_gib=gib,
        bandwidth=tb_s,
        link=25.0,
        network=12.5,
        pcie=25.0,
        sources="d",
    )


_TABLE: Final = (
    _hopper("H100", CARDS["H100"], 3.35),
    _hopper("H100-PCIe", CARDS["H100"], 2.0, bf16=756.0, fp8=1513.0, link=50.0),
    _hopper("H100-NVL", 93.1, 3.9, bf16=835.0, fp8=1671.0, link=300.0),
    replace(_hopper("H100-96GB-HBM2e", 94.5, 2.4), sources="t"),
    replace(_hopper("H800", CARDS["H100"], 3.35, link=160.0), sources="p"),
    _hopper("H200", CARDS["H200"], 4.8),
    replace(_hopper("H20", 95.6, 4.0, bf16=148.0, fp8=296.0), decode_reads="decode_h20"),
    _hopper("GH200", CARDS["GH200"], 4.0),
    _ampere("A100", CARDS["A100"], 2.039),
    _ampere("A100-40GB", CARDS["A100-40G"], 1.555),
    _ampere("A800", CARDS["A100"], 2.039, link=200.0),
    _blackwell("B200", CARDS["B200"], 1.0, 50.0, 8),
    _blackwell("B300", 268.6, 1.0, 100.0, 8, fp4=3.0),
    _blackwell("GB200", 185.0, 10 / 9, 50.0, 72),
    _blackwell("GB300", 277.5, 10 / 9, 100.0, 72, fp4=3.0),
    _workstation("L40S", "ada", 362.0, 733.0, CARDS["L40S"], 0.864),
    _workstation("L40", "ada", 181.0, 362.0, 44.5, 0.864),
    _workstation("L4", "ada", 121.0, 242.0, CARDS["L4"], 0.3),
    _workstation("RTX-4090", "ada", 165.0, 330.0, CARDS["RTX4090"], 1.008),
    _workstation("A6000", "ampere", 155.0, 0.0, 47.5, 0.768),
    _workstation("A10G", "ampere", 70.0, 0.0, CARDS["A10G"], 0.6),
    _workstation("A10", "ampere", 125.0, 0.0, 22.5, 0.6),
    replace(
        _workstation("V100", "volta", 125.0, 0.0, CARDS["V100"], 0.9), link=150.0, sources="dm"
    ),
    replace(_workstation("MI250X", "cdna2", 383.0, 0.0, 128.0, 3.28), link=100.0, sources="m"),
)

# Nominal peaks of float32 products on CUDA cores in TFLOP/s. torch uses no tensor cores for float32
# by default. Sources of the Blackwell values:
#     B200, B300  an eighth of the 600 TFLOP/s that NVIDIA states for both HGX boards, as quoted by
#                 fibermall.com/de/blog/nvidia-hgx-b300-overview.htm
#     GB300       verda.com/blog/gb300-nvl72-architecture
#     GB200       uncertain: published tables have 75 to 90
# The values of H100-NVL and A10G were not checked against a data sheet.
_FP32: Final = {
    "H100": 67.0,
    "H100-PCIe": 51.0,
    "H100-NVL": 60.0,
    "H100-96GB-HBM2e": 67.0,
    "H800": 67.0,
    "H200": 67.0,
    "H20": 44.0,
    "GH200": 67.0,
    "A100": 19.5,
    "A100-40GB": 19.5,
    "A800": 19.5,
    "B200": 75.0,
    "B300": 75.0,
    "GB200": 80.0,
    "GB300": 80.0,
    "L40S": 91.6,
    "L40": 90.5,
    "L4": 30.3,
    "RTX-4090": 82.6,
    "A6000": 38.7,
    "A10G": 31.2,
    "A10": 31.2,
    "V100": 15.7,
    "MI250X": 47.9,
}

GPUS: Final[dict[str, Gpu]] = {gpu.name: replace(gpu, fp32=_FP32[gpu.name]) for gpu in _TABLE}

# Other names of the same part.
_ALIASES: Final = {
    "a10080gb": "A100",
    "a100sxm480gb": "A100",
    "a10080g": "A100",
    "a10040g": "A100-40GB",
    "a100sxm440gb": "A100-40GB",
    "a80080gb": "A800",
    "h10080gb": "H100",
    "h100sxm": "H100",
    "h10080gbhbm3": "H100",
    "h200sxm": "H200",
    "h2096gb": "H20",
    "geforcertx4090": "RTX-4090",
    "rtxa6000": "A6000",
    "teslav100": "V100",
}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_PLAIN_NAME: Final = {
    **{_plain(name): name for name in GPUS},
    **_ALIASES,
}


def find_gpu(device_name: str) -> Gpu | None:
    """Return the GPU whose name is the longest that the driver's device name contains.

    Args:
        device_name: A name such as `NVIDIA A100-SXM4-80GB`.
    """
    text = _plain(device_name)
    found = [plain for plain in _BY_PLAIN_NAME if plain in text]
    return GPUS[_BY_PLAIN_NAME[max(found, key=len)]] if found else None


def gpu_named(name: str) -> Gpu:
    """Return the GPU with this name, whatever its case and hyphens.

    Raises:
        InvalidValue: The table has no such GPU.
    """
    known = _BY_PLAIN_NAME.get(_plain(name))
    if known is None:
        raise InvalidValue(
            "gpu", name, rule="is not a known GPU", fix=f"Known are {', '.join(GPUS)}."
        )
    return GPUS[known]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal GPUs in nodes.

    Attributes:
        gpu: The GPU.
        num_nodes: Number of nodes.
        per_node: GPUs of each node.
    """

    gpu: Gpu
    num_nodes: int
    per_node: int

    def __post_init__(self) -> None:
        require(
            self.num_nodes >= 1 and self.per_node >= 1 and self.num_gpus <= MAX_GPUS,
            "cluster",
            f"{self.num_nodes}x{self.per_node}x{self.gpu.name}",
            rule=f"needs 1 to {MAX_GPUS} GPUs",
            fix="Write such as 2x8xH100.",
        )

    @property
    def num_gpus(self) -> int:
        """Number of GPUs."""
        return self.num_nodes * self.per_node

    @property
    def domain(self) -> int:
        """Number of GPUs that the fast link connects."""
        return self.gpu.domain if self.gpu.domain > self.gpu.per_node else self.per_node

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.per_node}x{self.gpu.name}"

    def in_precision(self, dtype: str) -> Cluster:
        """Return the cluster as it computes in `dtype` (model.dtype).

        Formulas count 16-bit values. float32 moves twice the bytes per value, so rates in bytes are
        given as those of 16-bit values.
        """
        gpu = self.gpu
        if dtype != "float32" or gpu.value_bytes == 4.0:
            return self
        slower = replace(
            gpu,
            bf16=gpu.fp32,
            fp8=0.0,
            fp4=0.0,
            bandwidth=gpu.bandwidth / 2,
            link=gpu.link / 2,
            network=gpu.network / 2,
            value_bytes=4.0,
        )
        return replace(self, gpu=slower)


def cluster_of(gpu: Gpu, num_gpus: int) -> Cluster:
    """Return a cluster with this number of GPUs in usual nodes.

    The last node may be partly used: a number that the node's size does not divide is rounded up.
    """
    per_node = min(num_gpus, gpu.per_node)
    return Cluster(gpu=gpu, num_nodes=-(-num_gpus // per_node), per_node=per_node)


_CLUSTER: Final = re.compile(
    r"\s*(?:(\d{1,7})\s*x\s*)?(?:(\d{1,7})\s*x?\s*)?([a-z][\w-]*)\s*",
    re.IGNORECASE | re.ASCII,
)


def parse_cluster(text: str) -> Cluster:
    """Return the cluster that `text` names, such as 8x8 H100, 2x8xH100, 8xL40S or H200.

    One number counts GPUs, which fill usual nodes. Two numbers are nodes and GPUs per node.

    Raises:
        InvalidValue: The text does not name a cluster, or its GPU is unknown.
    """
    match = _CLUSTER.fullmatch(text)
    if match is None:
        raise InvalidValue(
            "cluster",
            text,
            rule="must be nodes x GPUs x GPU",
            fix="Write such as 2x8xH100 or 8xL40S.",
        )
    name = match[3]
    try:
        gpu = gpu_named(name)
    except InvalidValue as error:
        raise InvalidValue(
            "cluster", text, rule=f"its GPU, {name}, is not a known GPU", fix=error.fix
        ) from None
    numbers = [int(number) for number in (match[1], match[2]) if number is not None]
    require(
        all(number >= 1 for number in numbers),
        "cluster",
        text,
        rule="has no GPUs",
        fix="Write such as 2x8xH100.",
    )
    if len(numbers) == 2:
        return Cluster(gpu=gpu, num_nodes=numbers[0], per_node=numbers[1])
    return cluster_of(gpu, numbers[0] if numbers else 1)
