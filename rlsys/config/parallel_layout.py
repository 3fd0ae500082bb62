"""Parallel layout of a model's ranks: a short string, and the coordinates of each rank.

    "dp2tp2pp2"   2 x 2 x 2 ranks        "dp2x4"   two replicas of four shards each (HSDP)

    dp    data: ranks have different rows and shard the parameters (FSDP)
    tp    tensor: heads, MLP widths and vocabulary are sharded; between them, tokens (sequence
          parallelism)
    pp    pipeline: ranks have different layers; pp2v3: 3 stages on each of 2 ranks (interleaved)
    cp    context: ranks have different tokens of the same rows; attention exchanges heads for
          tokens (Ulysses), and passes keys around if there are too few heads (ring)
    ep    expert: ranks have different rows and different experts of a mixture

The last of DIMENSIONS varies fastest with the rank, so that the ranks that communicate most are on
the same node.

    "dp2x2,dp2,dp1"   a list: the preferred layout, then smaller ones for when nodes are lost
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import pairwise

from rlsys.errors import InvalidValue, require

# From the outermost, whose ranks communicate least, to the innermost.
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
# Ranks that differ in one of these dimensions have different rows; other ranks have the same rows.
DATA_DIMENSIONS = ("dp_replicate", "dp_shard", "ep")
_PART = re.compile(r"(dp|tp|pp|cp|ep)(\d+)(?:([xv])(\d+))?", re.ASCII)
_SECOND = {"dp": "x", "pp": "v"}  # letter before a second number


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Number of ranks along each dimension."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    num_pieces: int = 1
    """Stages on each pipeline rank: the p-th of r ranks has the stages p, p + r, p + 2r, ..."""
    text: str = field(default="", compare=False, repr=False)
    """The text that describes this layout in the configuration, for messages."""

    def __post_init__(self) -> None:
        for name in (*DIMENSIONS, "num_pieces"):
            size = getattr(self, name)
            require(
                size >= 1,
                "layout",
                f"{name}={size}",
                rule="a size must be at least 1",
                fix="Use 1 or more.",
            )
        require(
            self.num_pieces == 1 or self.pp > 1,
            "layout",
            f"pp1v{self.num_pieces}",
            rule="has all stages on one rank",
            fix="Use pp2 or more, or remove v.",
        )

    @classmethod
    def parse(cls, text: str) -> ParallelLayout:
        """Return the layout that `text` describes.

        Raises:
            InvalidValue: The text is not a layout.
        """
        sizes: dict[str, int] = {}
        at = 0
        while at < len(text):
            found = _PART.match(text, at)
            if found is None or (found[3] and _SECOND.get(found[1]) != found[3]):
                raise _unreadable(text, at)
            name, first, second = found[1], int(found[2]), int(found[4] or 1)
            if name in {one.partition("_")[0] for one in sizes}:
                raise InvalidValue(
                    "layout", text, rule=f"has {name} twice", fix="Write each dimension once."
                )
            if name == "dp":
                copies, shards = (first, second) if found[4] else (1, first)
                sizes |= {"dp_replicate": copies, "dp_shard": shards}
            else:
                sizes[name] = first
            if name == "pp":
                sizes["num_pieces"] = second
            at = found.end()
        if not sizes:
            raise _unreadable(text, 0)
        return cls(**sizes, text=text)

    def __str__(self) -> str:
        """Return the string that was parsed, or the shortest one that `parse` reads."""
        if self.text:
            return self.text
        data = f"dp{self.dp_shard}" if self.dp_shard > 1 else ""
        if self.dp_replicate > 1:
            data = f"dp{self.dp_replicate}x{self.dp_shard}"
        pieces = f"v{self.num_pieces}" if self.num_pieces > 1 else ""
        others = (
            f"{name}{size}{pieces if name == 'pp' else ''}"
            for name in ("tp", "pp", "cp", "ep")
            if (size := self.size(name)) > 1
        )
        return data + "".join(others) or "dp1"

    def size(self, *dimensions: str) -> int:
        """Return the product of the sizes of these dimensions."""
        return math.prod(getattr(self, name) for name in dimensions)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.size(*DIMENSIONS)

    @property
    def num_data(self) -> int:
        """Number of parts into which the rows are split."""
        return self.size(*DATA_DIMENSIONS)

    @property
    def num_token_shards(self) -> int:
        """Number of ranks that share the tokens of a row."""
        return self.size("cp", "tp")

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the rank's index along each dimension."""
        found = {}
        for name in reversed(DIMENSIONS):
            rank, found[name] = divmod(rank, self.size(name))
        return found

    def data_index(self, rank: int) -> int:
        """Return the index of the rank's part of the rows, below `num_data`."""
        coordinates, index = self.coordinates(rank), 0
        for name in DATA_DIMENSIONS:
            index = index * self.size(name) + coordinates[name]
        return index

    def counts(self, rank: int) -> bool:
        """Return whether this rank reports the results of its rows.

        Among the ranks with the same rows, it is one that has the last layers.
        """
        at = self.coordinates(rank)
        return not at["cp"] and not at["tp"] and at["pp"] == self.pp - 1


def parse_layouts(text: str) -> tuple[ParallelLayout, ...]:
    """Return the layouts of a comma-separated list, the preferred one first.

    Raises:
        InvalidValue: An item is not a layout, or does not have fewer ranks than the one before it,
            as a trainer needs that has lost ranks.
    """
    names = [name.strip() for name in text.split(",")]
    require(
        len(names) == 1 or all(names),
        "layout",
        text,
        rule="has a comma without a layout on both sides",
        fix="Write a list such as dp2,dp1.",
    )
    layouts = tuple(ParallelLayout.parse(name) for name in names)
    for one, other in pairwise(layouts):
        require(
            other.num_ranks < one.num_ranks,
            "layout",
            text,
            rule=f"{other} ({other.num_ranks} ranks) follows {one} ({one.num_ranks} ranks)",
            fix="Each layout of a list needs fewer ranks than the one before it.",
        )
    return layouts


def _unreadable(text: str, at: int) -> InvalidValue:
    return InvalidValue(
        "layout",
        text,
        rule=f"{text[at:]!r} is not a dimension and its size",
        fix="Write such as dp4, dp2tp2pp2, dp2x4 (two replicas of four shards), pp2v3 (three "
        "stages on each of two ranks), cp2 or ep2.",
    )
