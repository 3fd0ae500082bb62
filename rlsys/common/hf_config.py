"""Numbers of a Hugging Face configuration, whatever the model makes of them.

A number may be missing, a list with one a layer (HunYuan), or differ between layers that have
configurations of their own (Gemma 4).
"""

from __future__ import annotations

from typing import Any


def numbers(config: Any, name: str) -> list[int]:
    """All values that layers have of a whole number; none where there is no such number."""
    try:
        value = getattr(config, name, None)
    except RuntimeError as error:  # of transformers, for what its layers have several of
        layers = getattr(config, "per_layer_config", None)
        if layers is None:
            raise AttributeError(f"{name}: {error}") from error
        return [number for layer in layers for number in numbers(layer, name)]
    if isinstance(value, list | tuple):
        return [one for one in value if isinstance(one, int)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def largest(config: Any, *names: str, default: int) -> int:
    """Of the first of these numbers that there is."""
    for name in names:
        if found := numbers(config, name):
            return max(found)
    return default
