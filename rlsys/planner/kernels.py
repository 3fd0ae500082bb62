"""Time of single kernels: roofline times a measured ratio, interpolated and clamped.

    sizes ─► roofline (gpu) ─┐
    sizes ─► KernelTable ────┴► seconds of one kernel, cached by its sizes

The tables hold log(latency / roofline) of kernels measured on six GPUs (data/NOTICE). A GPU without
a table takes the ratios of the nearest generation, and its own peak and bandwidth. Outside a table
the ratio at its edge holds. The latencies are of inference kernels on an otherwise idle GPU:
profiles scale them to training.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from rlsys.planner.hardware import TERA, Gpu
from rlsys.planner.model_config import DATA
from rlsys.planner.roofline import BYTES_OF, gemm_roofline

_TABLE_OF: Final = {
    "A100": "A100",
    "H100": "H100",
    "H200": "H200",
    "B200": "B200",
    "GB200": "GB200",
    "L40S": "L40S",
    "H20": "H200",
    "B300": "B200",
    "GB300": "GB200",
}
_TABLE_OF_FAMILY: Final = {
    "hopper": "H100",
    "ampere": "A100",
    "blackwell": "B200",
    "blackwell_ultra": "B200",
    "ada": "L40S",
    "volta": "A100",
    "cdna2": "A100",
}
LAUNCH_S: Final = 2.5e-6  # shortest kernel
CACHED: Final = 1 << 17


class KernelTable:
    """Values on a grid of log2 axes, interpolated linearly and clamped at the edges."""

    def __init__(self, axes: Sequence[Iterable[float]], values: np.ndarray) -> None:
        self.axes = [[math.log2(point) for point in axis] for axis in axes]
        self.strides = [int(np.prod(values.shape[d + 1 :])) for d in range(values.ndim)]
        self.values: list[float] = values.astype(float).ravel().tolist()

    def at(self, *point: float) -> float:
        """Return the value at a point."""
        corners = [(0, 1.0)]
        for axis, stride, value in zip(self.axes, self.strides, point, strict=True):
            position = math.log2(value) if value > 0 else axis[0]
            if position <= axis[0]:
                continue
            if position >= axis[-1]:
                last = (len(axis) - 1) * stride
                corners = [(offset + last, weight) for offset, weight in corners]
                continue
            low = bisect_right(axis, position) - 1
            share = (position - axis[low]) / (axis[low + 1] - axis[low])
            base = low * stride
            corners = [
                corner
                for offset, weight in corners
                for corner in (
                    (offset + base, weight * (1 - share)),
                    (offset + base + stride, weight * share),
                )
            ]
        values = self.values
        return sum(values[offset] * weight for offset, weight in corners)


@lru_cache(maxsize=16)
def _load(name: str) -> dict[str, Any]:
    with np.load(DATA / f"kernels_{name}.npz") as archive:
        return {key: archive[key] for key in archive.files}


_AXES: Final = {
    "gemm": ("axis_m", "axis_n", "axis_n"),
    "prefill": ("axis_width", "axis_length", "axis_units"),
    "decode": ("axis_width", "axis_context", "axis_units"),
    "experts": ("axis_expert_rows", "axis_experts", "axis_expert_weights"),
    "nccl": ("axis_ranks", "axis_message"),
    "engine": ("axis_ranks", "axis_message"),
}


# Powers of the axes in the roofline of attention.
_POWERS: Final = {"prefill": (0, 2, 1), "decode": (0, 1, 1)}


def _table(key: str, axes: list[np.ndarray], values: np.ndarray) -> KernelTable:
    """Return a table, with latencies of attention that grow with its sizes despite noise."""
    powers = _POWERS.get(key.split("_")[0])
    result = values.astype(float)
    if powers is not None:
        bound = np.zeros_like(result)
        for number, (axis, power) in enumerate(zip(axes, powers, strict=True)):
            shape = [1] * result.ndim
            shape[number] = -1
            bound += power * np.log(axis).reshape(shape)
        result += bound
        for number, power in enumerate(powers):
            if power:  # a size takes at most as long as any larger one
                ascending = np.minimum.accumulate(np.flip(result, number), axis=number)
                result = np.flip(ascending, number)
        result -= bound
    return KernelTable(axes, result)


class Kernels:
    """Kernel times of one GPU. Use `kernels_of`, which builds one per GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.tables = self._measured()
        self.bandwidth = gpu.bandwidth * TERA
        self.gemm = lru_cache(maxsize=CACHED)(self._gemm)
        self.experts = lru_cache(maxsize=CACHED)(self._experts)
        self.prefill = lru_cache(maxsize=CACHED)(self._prefill)
        self.decode = lru_cache(maxsize=CACHED)(self._decode)

    def _measured(self) -> dict[str, KernelTable]:
        """Return the tables of measured ratios."""
        gpu = self.gpu
        arrays = _load(_TABLE_OF.get(gpu.name, _TABLE_OF_FAMILY[gpu.family]))
        return {
            key: _table(key, [arrays[axis] for axis in _AXES[key.split("_")[0]]], values)
            for key, values in arrays.items()
            if not key.startswith("axis_")
        }

    def _table(self, kind: str, dtype: str) -> KernelTable:
        for name in (dtype, "fp8", "bf16"):
            if found := self.tables.get(f"{kind}_{name}"):
                return found
        return self.tables[kind]

    def _gemm(self, m: float, n: float, k: float, dtype: str = "bf16") -> float:
        """Return the seconds of a product of m tokens with an (n, k) matrix.

        Args:
            m: Tokens.
            n: Outputs.
            k: Inputs.
            dtype: bf16, fp8, fp8_block, fp4, or w4 (4-bit weights, 16-bit products).
        """
        if dtype == "w4":
            weights = n * k * BYTES_OF["w4"] / self.bandwidth
            return max(self._gemm(m, n, k) - n * k * 1.4 / self.bandwidth, weights)
        products = "fp8" if dtype == "fp8_block" else dtype
        bound = gemm_roofline(self.gpu, m, n, k, products, BYTES_OF[dtype])
        ratio = math.exp(self._table("gemm", dtype).at(m, n, k))
        return max(bound * max(ratio, 1.0), LAUNCH_S)

    def _prefill(self, units: float, length: float, width: float, pairs: float = 0.0) -> float:
        """Return the seconds of fused causal attention, forward.

        Args:
            units: Rows times heads.
            length: Tokens of a row.
            width: Mean width of queries and values of a head.
            pairs: Pairs of tokens that a row compares, if windows make it less than length^2/2.
        """
        work = 4 * units * (pairs or length * length / 2) * width
        ratio = math.exp(self.tables["prefill"].at(width, length, units))
        return max(work / self.gpu.peak("bf16") * max(ratio, 1.1), LAUNCH_S)

    def _decode(self, units: float, context: float, width: float, dtype: str = "bf16") -> float:
        """Return the seconds of attention of one new token per row.

        Args:
            units: Rows times KV heads of this rank.
            context: Mean tokens that a row attends to.
            width: Width of a head.
            dtype: Precision of the KV cache.
        """
        num_bytes = 2 * units * context * width * BYTES_OF[dtype]
        ratio = math.exp(self._table("decode", dtype).at(width, context, units))
        return max(num_bytes / self.bandwidth * max(ratio, 1.05), LAUNCH_S)

    def _experts(
        self, tokens: float, top_k: int, local: float, ep: int, weights: float, dtype: str
    ) -> float:
        """Return the seconds of the grouped products of one rank's experts in inference.

        Args:
            tokens: Tokens of all ranks that route to these experts.
            top_k: Experts of a token.
            local: Experts of this rank.
            ep: Ranks that the experts are split over.
            weights: Parameters of one expert on this rank.
            dtype: Precision: bf16, fp8, fp8_block, fp4 or w4.
        """
        routed = tokens * top_k / ep
        reached = local * (1 - math.exp(-routed / local))
        products = {"fp8_block": "fp8", "w4": "bf16"}.get(dtype, dtype)
        bound = max(
            2 * routed * weights / self.gpu.peak(products),
            reached * weights * BYTES_OF[dtype] / self.bandwidth,
        )
        ratio = math.exp(self._table("experts", dtype).at(routed / local, local, weights))
        return max(bound * max(ratio, 1.0), 4 * LAUNCH_S)


ATTENTION_SHARE: Final = 0.3  # of a core's peak, of fused attention over short rows


class CoreKernels(Kernels):
    """Kernel times of a CPU core, from the products that a probe measured."""

    def _measured(self) -> dict[str, KernelTable]:
        rows = sorted({row for row, _, _ in self.gpu.products})
        widths = sorted({width for _, width, _ in self.gpu.products})
        seconds = {(row, width): time for row, width, time in self.gpu.products}
        ratios = [
            [math.log(seconds[row, width] / self._bound(row, width, width)) for width in widths]
            for row in rows
        ]
        return {"gemm": KernelTable([rows, widths], np.array(ratios))}

    def _bound(self, m: float, n: float, k: float) -> float:
        return gemm_roofline(self.gpu, m, n, k, "bf16", 2.0)

    def _gemm(self, m: float, n: float, k: float, dtype: str = "bf16") -> float:
        """Return the seconds of a product of m tokens with an (n, k) matrix."""
        return self._bound(m, n, k) * math.exp(self.tables["gemm"].at(m, math.sqrt(n * k)))

    def _prefill(self, units: float, length: float, width: float, pairs: float = 0.0) -> float:
        """Return the seconds of causal attention, forward."""
        work = 4 * units * (pairs or length * length / 2) * width
        return work / self.gpu.peak("bf16") / ATTENTION_SHARE

    def _decode(self, units: float, context: float, width: float, dtype: str = "bf16") -> float:
        """Return the seconds of attention of one new token per row."""
        return 2 * units * context * width * BYTES_OF[dtype] / self.bandwidth

    def _experts(
        self, tokens: float, top_k: int, local: float, ep: int, weights: float, dtype: str
    ) -> float:
        """Return the seconds of one rank's experts: one product after the other."""
        routed = tokens * top_k / ep
        reached = local * (1 - math.exp(-routed / local))
        width = math.sqrt(weights / 3)
        return reached * 3 * self._gemm(max(routed / max(reached, 1), 1.0), width, width)


@lru_cache(maxsize=64)
def kernels_of(gpu: Gpu) -> Kernels:
    """Return the kernels of a GPU, or of a core."""
    return CoreKernels(gpu) if gpu.products else Kernels(gpu)
