"""Lock for several frozen models that share a device, which holds one of them at a time.

    with lock.hold():       waits until no other model uses the device; copies the weights there
        ...
                            weights are in host memory only; the next model may run

The lock is a file named after the device, so that processes find each other. The operating system
releases it when a process dies. The weights are frozen: a copy stays in host memory, and the copy
on the device is dropped, not copied back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch


class DeviceLock:
    """Lock of a device for one frozen module, used by one thread."""

    def __init__(
        self, module: torch.nn.Module, device: torch.device, *, lock: Path | None = None
    ) -> None:
        """Move the weights to host memory. `lock` defaults to `lock_path(device)`."""
        self._device = device
        self._lock_path = lock or lock_path(device)
        tensors = [*module.parameters(), *module.buffers()]
        self._host_copies = [(tensor, self._host_copy(tensor.data)) for tensor in tensors]
        self._release()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the weights on the device within the block, and other models' weights off it."""
        with self._lock_path.open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                for tensor, host_copy in self._host_copies:
                    tensor.data = host_copy.to(self._device, non_blocking=True, copy=True)
                yield
            finally:
                self._release()

    def _host_copy(self, weights: torch.Tensor) -> torch.Tensor:
        copy = weights.to("cpu")
        return copy.pin_memory() if self._device.type == "cuda" else copy

    def _release(self) -> None:
        for tensor, host_copy in self._host_copies:
            tensor.data = host_copy
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # activations too


def lock_path(device: torch.device) -> Path:
    """Return the lock file of a device, common to all processes of this user on this machine."""
    name = device.type
    if device.type == "cuda":
        name = str(torch.cuda.get_device_properties(device).uuid)
    return Path(tempfile.gettempdir()) / f"rlsys-device-{os.getuid()}-{name}.lock"
