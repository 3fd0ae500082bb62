"""How the ranks of one model are laid out: a short string, and each rank's coordinates.

    "dp2tp2pp2"   2 x 2 x 2 ranks        "dp2x4"   two copies of four shards each (HSDP)

    dp    data: other rows; parameters sharded over it (FSDP). dp2x4: 2 copies of 4 shards
    tp    tensor: heads, MLP widths and vocabulary cut; between them each rank keeps its tokens
    pp    pipeline: other layers; pp2v3: 3 pieces of them on each of 2 ranks (interleaved)
    cp    context: other tokens of the same rows; in attention heads are exchanged for tokens
          (Ulysses), and keys travel where there are too few heads (ring)
    ep    expert: other rows, and other experts of a mixture

Ranks are numbered with the last of DIMENSIONS fastest, so that what talks most lies closest.

    "dp2x2,dp2,dp1"   the preferred one, and those to go on with in fewer places
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from itertools import pairwise

# From the outermost, whose ranks talk least, to the innermost.
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
# Ranks that differ in these only have different rows; in the others, the same.
DATA_DIMENSIONS = ("dp_replicate", "dp_shard", "ep")
_PART = re.compile(r"(dp|tp|pp|cp|ep)(\d+)(?:([xv])(\d+))?", re.ASCII)
_SECOND = {"dp": "x", "pp": "v"}  # what stands before a second number


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
    """Of layers on each pipeline rank: the p-th of r ranks has the pieces p, p + r, p + 2r, ..."""

    def __post_init__(self) -> None:
        for each in fields(self):
            size = getattr(self, each.name)
            if size < 1:
                raise ValueError(f"a layout with {each.name}={size} has no rank; use at least 1.")
        if self.num_pieces > 1 and self.pp == 1:
            raise ValueError(
                f"a layout with pp1v{self.num_pieces} has all pieces on one rank, which gains "
                "nothing; use pp2 or more, or leave v out."
            )

    @classmethod
    def parse(cls, text: str) -> ParallelLayout:
        """Raises ValueError for what is no layout."""
        sizes: dict[str, int] = {}
        at = 0
        while at < len(text):
            found = _PART.match(text, at)
            if found is None or (found[3] and _SECOND.get(found[1]) != found[3]):
                raise ValueError(_unread(text, at))
            name, first, second = found[1], int(found[2]), int(found[4] or 1)
            if name in {one.partition("_")[0] for one in sizes}:
                raise ValueError(f"layout {text!r} says {name} twice; say it once.")
            if name == "dp":
                copies, shards = (first, second) if found[4] else (1, first)
                sizes |= {"dp_replicate": copies, "dp_shard": shards}
            else:
                sizes[name] = first
            if name == "pp":
                sizes["num_pieces"] = second
            at = found.end()
        if not sizes:
            raise ValueError(_unread(text, 0))
        return cls(**sizes)

    def __str__(self) -> str:
        """The shortest string that parses to it."""
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
        """Ranks along these dimensions together."""
        return math.prod(getattr(self, name) for name in dimensions)

    @property
    def num_ranks(self) -> int:
        return self.size(*DIMENSIONS)

    @property
    def num_data(self) -> int:
        """Of ranks with rows of their own."""
        return self.size(*DATA_DIMENSIONS)

    @property
    def num_token_shards(self) -> int:
        """Of ranks that share the tokens of the same rows."""
        return self.size("cp", "tp")

    def coordinates(self, rank: int) -> dict[str, int]:
        """Along each dimension."""
        found = {}
        for name in reversed(DIMENSIONS):
            rank, found[name] = divmod(rank, self.size(name))
        return found

    def data_index(self, rank: int) -> int:
        """Which of `num_data` shares of rows a rank trains on."""
        coordinates, index = self.coordinates(rank), 0
        for name in DATA_DIMENSIONS:
            index = index * self.size(name) + coordinates[name]
        return index

    def counts(self, rank: int) -> bool:
        """Whether what this rank says of its rows counts: of those with the same rows, one, which
        has the last layers.
        """
        at = self.coordinates(rank)
        return not at["cp"] and not at["tp"] and at["pp"] == self.pp - 1


def split_layouts(text: str) -> list[str]:
    """Of a list, the preferred one first; one is a list too. Raises ValueError for what is no
    layout, and for a list that does not fall: who has lost places looks for a layout of fewer.
    """
    names = [name.strip() for name in text.split(",")]
    if len(names) > 1 and not all(names):
        raise ValueError(
            f"the list {text!r} has no layout before or behind a comma; write such as dp2,dp1."
        )
    layouts = [ParallelLayout.parse(name) for name in names]
    for (name, one), (after, other) in pairwise(zip(names, layouts, strict=True)):
        if other.num_ranks >= one.num_ranks:
            raise ValueError(
                f"the list {text!r} has {after} ({_ranks(other)}) behind {name} ({_ranks(one)}); "
                "each layout of a list is for fewer places than the one before: give it strictly "
                "fewer ranks."
            )
    return names


def _ranks(layout: ParallelLayout) -> str:
    return f"{layout.num_ranks} rank{'s' * (layout.num_ranks > 1)}"


def _unread(text: str, at: int) -> str:
    return (
        f"layout {text!r} cannot be read from {text[at:]!r} on; write dimensions and their sizes, "
        "such as dp4, dp2tp2pp2, dp2x4 (two copies of four shards), pp2v3 (three pieces on each of "
        "two ranks), cp2 or ep2."
    )
