"""Short measurement of this machine's CPUs, and the file in the user's cache that keeps it.

    probe ─► CpuProbe ─► ~/.cache/rlsys/cpu-*.json ─► later calls of saved_probe

The probe measures products at a few sizes, a copy, and a layer of a small model on one core, and
collectives between two processes. It takes some seconds besides the import of torch. Other work on
the machine lowers the rates by its use of caches and memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

from rlsys.common.atomic_files import write_atomically
from rlsys.common.available_memory import total_bytes
from rlsys.common.installed_versions import versions
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.planner.cpu_device import CpuProbe, ProductTime
from rlsys.planner.link_probe import measured_link
from rlsys.planner.stored_values import restored

logger = logging.getLogger(__name__)

ROWS: Final = (1, 8, 64, 512, 2048)
WIDTHS: Final = (64, 128, 512, 1536)
DTYPES: Final = ("float32", "bfloat16")
MIN_S: Final = 0.02  # of repetitions of one size
MAX_REPETITIONS: Final = 200
COPIED_BYTES: Final = 1 << 27

# The layer: width, width of the feed-forward network, rows that decode, tokens of a training step.
WIDTH, FFN, HEADS = 128, 384, 4
DECODED_ROWS, TRAINED_TOKENS, ROW_TOKENS = 32, 2048, 64
NUM_LAYERS: Final = 4


def probe() -> CpuProbe:
    """Measure one core of this machine, and collectives if it has a second one."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = _probe(torch)
    finally:
        torch.set_num_threads(threads)
    if num_cores() == 1:
        return measured
    try:
        hop_s, link = measured_link()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.warning(
            "Collectives between two processes were not measured: %s. %g GB/s are assumed.",
            error,
            measured.link,
        )
        return measured
    return replace(measured, hop_s=hop_s, link=link)


def _probe(torch: Any) -> CpuProbe:
    products = tuple(
        ProductTime(dtype, rows, width, _product_s(torch, dtype, rows, width))
        for dtype, rows, width in product(DTYPES, ROWS, WIDTHS)
    )
    source = torch.ones(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    bandwidth = 2 * COPIED_BYTES / _seconds(lambda: target.copy_(source)) / 1e9
    layer = _Layer(torch)
    with torch.no_grad():
        forward_s = _seconds(lambda: layer.forward(1, 1))
        decode_s = _seconds(lambda: layer.forward(DECODED_ROWS, 1))
    host_s = _seconds(lambda: layer.train(1, 1))
    train_s = _seconds(lambda: layer.train(TRAINED_TOKENS // ROW_TOKENS, ROW_TOKENS))
    matrices = 4 * WIDTH * WIDTH + 3 * WIDTH * FFN
    rate = max(
        2 * one.rows * one.width**2 / one.seconds
        for one in products
        if one.dtype == "float32" and one.width == WIDTH
    )
    rest_s = train_s - host_s - 6 * TRAINED_TOKENS * matrices / rate
    # bytes of the formulas: residual stream, heads and network, forward and 1.6 times backward
    counted = 4 * TRAINED_TOKENS * (10 * WIDTH + 8 * WIDTH + 3 * FFN) * 2.6
    return CpuProbe(
        processor=processor_name(),
        cores=num_cores(),
        memory_gib=total_bytes() / 2**30,
        products=products,
        bandwidth=bandwidth,
        layer_forward_s=forward_s,
        layer_train_s=host_s,
        traffic=max(rest_s * bandwidth * 1e9 / counted, 0.1),
        decode_tokens_s=DECODED_ROWS / (decode_s * NUM_LAYERS),
    )


class _Layer:
    """A layer of a Llama-like model in plain operations, as transformers computes it."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

        def weight(outputs: int, inputs: int) -> Any:
            return torch.randn(outputs, inputs).mul_(inputs**-0.5).requires_grad_()

        self.qkv = [weight(WIDTH, WIDTH) for _ in range(3)]
        self.output = weight(WIDTH, WIDTH)
        self.gate, self.up = weight(FFN, WIDTH), weight(FFN, WIDTH)
        self.down = weight(WIDTH, FFN)
        self.norms = [torch.ones(WIDTH, requires_grad=True) for _ in range(2)]

    def _norm(self, x: Any, weight: Any) -> Any:
        return weight * (x * self.torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def _turned(self, x: Any) -> Any:
        first, second = x.chunk(2, dim=-1)
        return x * 0.9 + self.torch.cat((-second, first), dim=-1) * 0.1

    def forward(self, rows: int, length: int) -> Any:
        """Return the output for `rows` rows of `length` tokens."""
        functional = self.torch.nn.functional
        x = self.torch.ones(rows, length, WIDTH, requires_grad=self.torch.is_grad_enabled())
        normed = self._norm(x, self.norms[0])
        q, k, v = (
            functional.linear(normed, one).view(rows, length, HEADS, -1).transpose(1, 2)
            for one in self.qkv
        )
        mixed = functional.scaled_dot_product_attention(
            self._turned(q), self._turned(k), v, is_causal=length > 1
        )
        x = x + functional.linear(mixed.transpose(1, 2).reshape(rows, length, WIDTH), self.output)
        normed = self._norm(x, self.norms[1])
        inner = functional.silu(functional.linear(normed, self.gate))
        return x + functional.linear(inner * functional.linear(normed, self.up), self.down)

    def train(self, rows: int, length: int) -> None:
        """Compute forward and backward."""
        self.forward(rows, length).sum().backward()


def _product_s(torch: Any, dtype: str, rows: int, width: int) -> float:
    kind = getattr(torch, dtype)
    x, weight = torch.ones(rows, width, dtype=kind), torch.ones(width, width, dtype=kind)
    with torch.no_grad():
        return _seconds(lambda: torch.nn.functional.linear(x, weight))


def _seconds(work: Callable[[], object]) -> float:
    """Return the median processor seconds of repetitions, after one that is not counted.

    The time on a core does not count the time in which other processes had it.
    """
    work()
    times: list[float] = []
    while len(times) < MAX_REPETITIONS and (len(times) < 3 or sum(times) < MIN_S):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return median(times)


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def processor_name() -> str:
    """Return the name of the processor."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def cache_directory() -> Path:
    """Return the directory of measurements in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "rlsys"


def cache_file() -> Path:
    """Return the file that keeps the probe of this machine and this torch."""
    key = f"{processor_name()} {num_cores()} {versions()['torch']}"
    return cache_directory() / f"cpu-{sha256(key.encode()).hexdigest()[:12]}.json"


def saved_probe(path: Path | None = None) -> CpuProbe | None:
    """Return the probe that was saved, or None without a readable one."""
    try:
        return restored(CpuProbe, parse_json((path or cache_file()).read_text()), "probe")
    except (OSError, ValueError):
        return None


def known_probe() -> CpuProbe:
    """Return the saved probe, or measure one and save it if the cache can be written."""
    found = saved_probe()
    if found is None:
        found = probe()
        with contextlib.suppress(OSError):  # measured again the next time
            save_probe(found)
    return found


def save_probe(measured: CpuProbe, path: Path | None = None) -> Path:
    """Write a probe to the cache file and return its path."""
    target = path or cache_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, dump_json(asdict(measured), indent=1) + "\n")
    return target
