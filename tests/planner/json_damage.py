"""Damage of JSON files: any value of a file is replaced by any other, or removed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)

# Values that are almost right find more faults than arbitrary ones.
NEAR = st.sampled_from(
    [0, 1, 2, 3, 5, 9, -1, 0.0, 0.5, 1e-320, 1e308, 10**9, 10**400, math.nan, math.inf, "x", "M"]
)
REMOVED = st.just(...)


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the keys and indices that lead to each value below `value`."""
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in entries:
            yield (key,)
            yield from ((key, *rest) for rest in places(inner))


@st.composite
def damaged(draw: st.DrawFn, value: dict[str, Any]) -> Any:
    """Return a copy of a JSON object in which one or two values are replaced or removed."""
    found = deepcopy(value)
    for _ in range(draw(st.integers(1, 2))):
        *path, last = draw(st.sampled_from(list(places(found)) or [("x",)]))
        part: Any = found
        for key in path:
            part = part[key]
        new = draw(JSON | NEAR | REMOVED)
        if new is not ...:
            part[last] = new
        elif last in part or isinstance(part, list):
            del part[last]
    return found
