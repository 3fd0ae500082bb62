"""Lower bounds of a kernel's time: arithmetic at the peak, or bytes at the memory's bandwidth.

Williams et al., Roofline (CACM 2009). Efficiencies are applied by the callers.
"""

from __future__ import annotations

from typing import Final

from rlsys.planner.hardware import TERA, Gpu

# Bytes of a value, with scales of blocks.
BYTES_OF: Final = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "fp4": 0.5625,
    "w4": 0.53,
}


def gemm_roofline(gpu: Gpu, m: float, n: float, k: float, dtype: str, weight_bytes: float) -> float:
    """Return the bound in seconds of a product (m, k) x (k, n) with 16-bit outputs.

    Args:
        gpu: The GPU.
        m: Rows: tokens.
        n: Outputs.
        k: Inputs.
        dtype: Precision of the products: bf16, fp8 or fp4.
        weight_bytes: Bytes of one weight and of one input.
    """
    arithmetic = 2.0 * m * n * k / gpu.peak(dtype)
    traffic = weight_bytes * (n * k + m * k) + 2.0 * m * n
    return max(arithmetic, traffic / (gpu.bandwidth * TERA))
