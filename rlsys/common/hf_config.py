"""Numbers of a Hugging Face configuration.

A number may be missing, be a list with one value per layer (HunYuan), or differ between layers that
have their own configuration (Gemma 4).
"""

from __future__ import annotations

from typing import Any


def numbers(config: Any, name: str) -> list[int]:
    """Return all values of an integer across layers; empty if the configuration has none."""
    try:
        value = getattr(config, name, None)
    except RuntimeError as error:  # raised by transformers if layers differ
        layers = getattr(config, "per_layer_config", None)
        if layers is None:
            raise AttributeError(f"{name}: {error}") from error
        return [number for layer in layers for number in numbers(layer, name)]
    if isinstance(value, list | tuple):
        return [one for one in value if isinstance(one, int)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def largest(config: Any, *names: str, default: int) -> int:
    """Return the largest value of the first of these numbers that exists."""
    for name in names:
        if found := numbers(config, name):
            return max(found)
    return default
