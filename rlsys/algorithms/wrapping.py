"""What a loss around another loss says of itself."""

from __future__ import annotations

from typing import ClassVar

from rlsys.algorithms.loss_inputs import (
    LossFn,
    candidates_of,
    needs_of,
    of_pairs,
    uses_advantages,
    whole_groups,
)
from rlsys.common.user_functions import attribute_of, name_of


class Wrapper:
    """The attributes of `loss`, which a subclass has as a field, unless it knows better; `extra`
    are columns that it needs besides.
    """

    loss: LossFn
    extra: ClassVar[tuple[str, ...]] = ()

    @property
    def denominator(self) -> str:
        return denominator_of(self.loss)

    @property
    def needs(self) -> tuple[str, ...]:
        return union(needs_of(self.loss), self.extra)

    @property
    def uses_advantages(self) -> bool:
        return uses_advantages(self.loss)

    @property
    def whole_groups(self) -> bool:
        return whole_groups(self.loss)

    @property
    def interpolates_proximal(self) -> bool:
        """π_prox needs no forward pass."""
        return getattr(self.loss, "interpolates_proximal", False)

    @property
    def of_pairs(self) -> bool:
        return of_pairs(self.loss)

    @property
    def candidates(self) -> str | None:
        return candidates_of(self.loss)


# What a loss may divide by; "interpolated" is that of interpolate_proximal (composed.py) alone.
DENOMINATORS = ("sampler", "proximal", "none", "interpolated")


def denominator_of(loss: LossFn) -> str:
    """By whose policy a loss divides. Raises ValueError for one that does not say, or says
    something else.
    """
    denominator: str | None = attribute_of(loss, "denominator", None)
    if denominator is None:
        raise ValueError(
            f"{name_of(loss)} does not say by whose policy it divides, so a weight on it may count "
            'twice; give it an attribute denominator: "sampler", "proximal", or "none" for a loss '
            "without a ratio."
        )
    if denominator not in DENOMINATORS:
        raise ValueError(
            f"{name_of(loss)} has {denominator=}, which names no policy that a loss divides by, so "
            'a weight on it may count twice; use "sampler", "proximal", or "none" for a loss '
            "without a ratio."
        )
    return denominator


def union(*names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in names for name in some))
